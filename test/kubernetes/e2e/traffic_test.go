// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// Addresses of ../cluster and testdata/pods.yaml.
const (
	port         = "7777"
	outside      = "203.0.113.9"
	outside6     = "2001:db8::9"
	company      = "10.77.0.100" // ext, too, but in a range that keeps the source
	clusterIP    = "10.96.77.77"
	nodePort     = "30077"
	nodePortHere = "30078" // externalTrafficPolicy: Local
)

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
		_, err := c.try(t, "", "ext", c.probe, "ask", "tcp", outside+":"+port)
		return err
	})
}

// seen is the address that a server saw when a pod asked.
func (c cluster) seen(t *testing.T, pod, proto, host string) (string, error) {
	t.Helper()
	answer, err := c.tryKubectl(t, "", "exec", pod, "--", "/probe", "ask", proto, net.JoinHostPort(host, port))
	if err != nil {
		return "", err
	}
	address, _, err := net.SplitHostPort(answer)
	return address, err
}

// sees says what is wrong if a server does not see a pod with an address.
func (c cluster) sees(t *testing.T, pod, proto, host, want string) error {
	t.Helper()
	got, err := c.seen(t, pod, proto, host)
	if err == nil && got != want {
		err = fmt.Errorf("%s by %s: %s saw %s, want %s", pod, proto, host, got, want)
	}
	return err
}

// checkTraffic checks who sees which address: towards the outside nodes or pods,
// everywhere else pods.
func (c cluster) checkTraffic(t *testing.T, masqueraded bool) {
	t.Helper()
	server := c.podAddress(t, "server")
	for _, node := range c.nodes(t) {
		pod := "client-" + node
		own := c.podAddress(t, pod)
		public := own
		if masqueraded {
			public = c.nodeAddress(t, node)
		}
		for _, proto := range []string{"tcp", "udp"} {
			for host, want := range map[string]string{outside: public, company: own, server: own, clusterIP: own} {
				if err := c.sees(t, pod, proto, host, want); err != nil {
					t.Error(err)
				}
			}
		}
	}
	c.checkNodePorts(t)
}

// checkNodePorts asks the server pod from outside: through any node, and through
// its own node, where it sees the client.
func (c cluster) checkNodePorts(t *testing.T) {
	t.Helper()
	home := c.kubectl(t, "get", "pod", "server", "--output=jsonpath={.spec.nodeName}")
	for _, proto := range []string{"tcp", "udp"} {
		for _, node := range c.nodes(t) {
			if _, err := c.try(t, "", "ext", c.probe, "ask", proto, c.nodeAddress(t, node)+":"+nodePort); err != nil {
				t.Errorf("node port of %s: %v", node, err)
			}
		}
		answer, err := c.try(t, "", "ext", c.probe, "ask", proto, c.nodeAddress(t, home)+":"+nodePortHere)
		if err != nil || !strings.HasPrefix(answer, company+":") {
			t.Errorf("node port by %s: the server saw %s (%v), want %s", proto, answer, err, company)
		}
	}
	for _, node := range c.nodes(t) {
		if _, err := c.tryKubectl(t, "", "exec", "client-"+node, "--", "/probe", "ask", "tcp", c.nodeAddress(t, home)+":"+nodePort); err != nil {
			t.Errorf("node port, asked by a pod: %v", err)
		}
	}
}

func (c cluster) nodes(t *testing.T) []string {
	t.Helper()
	return strings.Fields(c.kubectl(t, "get", "nodes", "--output=jsonpath={.items[*].metadata.name}"))
}

// nodeAddress of node1 is 10.77.0.1.
func (c cluster) nodeAddress(t *testing.T, node string) string {
	t.Helper()
	return "10.77.0." + strings.TrimPrefix(node, "node")
}

// startTalk has a pod on each node talk to the outside until checkTalk.
func (c cluster) startTalk(t *testing.T) {
	t.Helper()
	for _, node := range c.nodes(t) {
		c.kubectl(t, "run", "talk-"+node, "--image=localhost/probe:e2e", "--image-pull-policy=Never", "--restart=Never",
			"--overrides", `{"spec": {"nodeName": "`+node+`", "terminationGracePeriodSeconds": 1}}`,
			"--", "talk", outside+":"+port)
		c.kubectl(t, "wait", "--for=condition=Ready", "pod/talk-"+node, "--timeout=80s")
		eventually(t, func() error {
			if lines := c.kubectl(t, "logs", "talk-"+node); strings.Count(lines, "\n") < 3 {
				return fmt.Errorf("it says %q", lines)
			}
			return nil
		})
	}
}

// checkTalk ends that and holds that from its first to its last packet the
// outside saw the node, that what was open stayed open, with its port, and that
// nothing failed: each way to talk has one line.
func (c cluster) checkTalk(t *testing.T) {
	t.Helper()
	for _, node := range c.nodes(t) {
		lines := strings.Split(c.kubectl(t, "logs", "talk-"+node), "\n")
		slices.Sort(lines)
		address := c.nodeAddress(t, node)
		want := []string{"new tcp " + address, "new udp " + address, "open tcp " + address + ":", "open udp " + address + ":"}
		if len(lines) != 4 {
			t.Errorf("talk-%s, a line for each change:\n%s", node, strings.Join(lines, "\n"))
		}
		for i, line := range lines {
			if i < len(want) && strings.HasPrefix(want[i], "open") != strings.HasPrefix(line, "open") || !strings.Contains(line, " "+address) {
				t.Errorf("talk-%s: %q, want %q", node, line, want[min(i, 3)])
			}
		}
		c.kubectl(t, "delete", "pod", "talk-"+node, "--now")
	}
}
