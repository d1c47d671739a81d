// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
)

const port = "7777"

// family has the addresses of ../cluster and testdata/pods.yaml.
type family struct {
	outside      string
	company      string // the same host, but in a range that keeps the source
	clusterIP    string
	nodes        string // what a node's address begins with
	pod          int    // of a pod's addresses
	nodePort     string
	nodePortHere string // externalTrafficPolicy: Local
}

var (
	ipv4 = family{"203.0.113.9", "10.77.0.100", "10.96.77.77", "10.77.0.", 0, "30077", "30078"}
	ipv6 = family{"2001:db8::9", "fd00:77::100", "fd00:10:96::7777", "fd00:77::", 1, "30077", "30078"}
)

// of a node named node1 it is 10.77.0.1.
func (f family) of(node string) string { return f.nodes + strings.TrimPrefix(node, "node") }

// way is an argument of the probe.
func way(proto, host, port string) string { return proto + "/" + net.JoinHostPort(host, port) }

// startOutside starts the server outside of the cluster.
func (c cluster) startOutside(t *testing.T) {
	t.Helper()
	server := exec.CommandContext(t.Context(), "nsenter", "--net=/run/netns/ext", c.probe, "serve", port)
	server.Cancel = func() error { return server.Process.Signal(syscall.SIGTERM) }
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Wait() })
	eventually(t, func() error {
		for _, f := range []family{ipv4, ipv6} {
			if seen := c.on(t, "ext", c.probe, "ask", way("tcp", f.outside, port)); strings.HasPrefix(seen, "failed") {
				return errors.New(seen)
			}
		}
		return nil
	})
}

// expectation is whom a server has to see when it is asked by a way.
type expectation struct{ way, seen string }

// compare holds what a probe printed against the expectations.
func compare(printed string, want []expectation) error {
	lines := strings.Split(printed, "\n")
	if len(lines) != len(want) {
		return fmt.Errorf("%d lines for %d ways:\n%s", len(lines), len(want), printed)
	}
	var all error
	for i, e := range want {
		host, _, err := net.SplitHostPort(lines[i])
		if err != nil || host != e.seen && e.seen != anybody {
			all = errors.Join(all, fmt.Errorf("%s saw %s, want %s", e.way, lines[i], e.seen))
		}
	}
	return all
}

// anybody is who may be seen where that is not the agent's to say.
const anybody = "anybody"

// asks has a pod, or with no name the outside, ask by all ways.
func (c cluster) asks(t *testing.T, pod string, want ...expectation) error {
	t.Helper()
	ask := []string{"ask"}
	for _, e := range want {
		ask = append(ask, e.way)
	}
	printed, err := "", error(nil)
	if pod == "" {
		printed, err = c.try(t, "", "ext", append([]string{c.probe}, ask...)...)
	} else {
		printed, err = c.tryKubectl(t, "", append([]string{"exec", pod, "--", "/probe"}, ask...)...)
	}
	if err == nil {
		err = compare(printed, want)
	}
	if err != nil {
		err = fmt.Errorf("asked by %q: %w", pod, err)
	}
	return err
}

// checkTraffic checks who sees which address: towards the outside nodes, for the
// masqueraded families, and everywhere else pods.
func (c cluster) checkTraffic(t *testing.T, masqueraded ...family) {
	t.Helper()
	home := c.kubectl(t, "get", "pod", "server", "--output=jsonpath={.spec.nodeName}")
	for _, f := range []family{ipv4, ipv6} {
		c.checkPods(t, f, home, slices.Contains(masqueraded, f))
		c.checkOutside(t, f, home)
	}
}

// checkPods has a pod on each node ask.
func (c cluster) checkPods(t *testing.T, f family, home string, masqueraded bool) {
	t.Helper()
	server := c.podAddress(t, "server", f)
	for _, node := range c.nodes(t) {
		pod := "client-" + node
		own := c.podAddress(t, pod, f)
		public := own
		if masqueraded {
			public = f.of(node)
		}
		want := []expectation{{way("tcp", f.of(home), f.nodePort), anybody}}
		for _, proto := range []string{"tcp", "udp"} {
			want = append(want,
				expectation{way(proto, f.outside, port), public},
				expectation{way(proto, f.company, port), own},
				expectation{way(proto, server, port), own},
				expectation{way(proto, f.clusterIP, port), own})
		}
		if err := c.asks(t, pod, want...); err != nil {
			t.Error(err)
		}
	}
}

// checkOutside asks the server pod from outside: through any node, and through
// its own node, where it sees the client.
func (c cluster) checkOutside(t *testing.T, f family, home string) {
	t.Helper()
	var want []expectation
	for _, proto := range []string{"tcp", "udp"} {
		for _, node := range c.nodes(t) {
			want = append(want, expectation{way(proto, f.of(node), f.nodePort), anybody})
		}
		want = append(want, expectation{way(proto, f.of(home), f.nodePortHere), f.company})
	}
	if err := c.asks(t, "", want...); err != nil {
		t.Error(err)
	}
}

func (c cluster) nodes(t *testing.T) []string {
	t.Helper()
	return strings.Fields(c.kubectl(t, "get", "nodes", "--output=jsonpath={.items[*].metadata.name}"))
}

// startTalk has a pod on each node talk to the outside until checkTalk.
func (c cluster) startTalk(t *testing.T, families ...family) {
	t.Helper()
	for _, node := range c.nodes(t) {
		run := []string{"run", "talk-" + node, "--image=localhost/probe:e2e", "--image-pull-policy=Never", "--restart=Never",
			"--overrides", `{"spec": {"nodeName": "` + node + `", "terminationGracePeriodSeconds": 1}}`, "--", "talk"}
		for _, f := range families {
			run = append(run, net.JoinHostPort(f.outside, port))
		}
		c.kubectl(t, run...)
	}
	for _, node := range c.nodes(t) {
		c.kubectl(t, "wait", "--for=condition=Ready", "pod/talk-"+node, "--timeout=80s")
		eventually(t, func() error {
			if lines := c.kubectl(t, "logs", "talk-"+node); strings.Count(lines, "\n") < 4*len(families)-1 {
				return fmt.Errorf("it says %q", lines)
			}
			return nil
		})
	}
}

// checkTalk ends that and holds that from its first to its last packet the
// outside saw the node, that what was open stayed open, with its port, and that
// nothing failed: each way to talk has one line.
func (c cluster) checkTalk(t *testing.T, families ...family) {
	t.Helper()
	for _, node := range c.nodes(t) {
		said := c.kubectl(t, "logs", "talk-"+node)
		if lines := strings.Count(said, "\n") + 1; lines != 4*len(families) {
			t.Errorf("talk-%s has %d lines, want one for each of %d ways", node, lines, 4*len(families))
		}
		for _, f := range families {
			for _, proto := range []string{"tcp", "udp"} {
				asked := way(proto, f.outside, port)
				for _, want := range []string{"new " + asked + " " + f.of(node), "open " + asked + " " + openFrom(f.of(node))} {
					if !strings.Contains(said, want) {
						t.Errorf("talk-%s never says %q", node, want)
					}
				}
			}
		}
		if t.Failed() {
			t.Logf("talk-%s, a line for each change:\n%s", node, said)
		}
		c.kubectl(t, "delete", "pod", "talk-"+node, "--now")
	}
}

// openFrom is how an address with some port begins.
func openFrom(address string) string { return strings.TrimSuffix(net.JoinHostPort(address, "0"), "0") }
