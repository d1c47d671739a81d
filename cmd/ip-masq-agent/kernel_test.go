// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/lab"
)

// promptly is the second within which a change is to be in force, and one more
// for a busy machine and for looking.
const promptly = 2 * time.Second

// node is a lab's node with a config for the agent.
type node struct {
	*lab.Lab
	t      *testing.T
	config string
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{
		Lab:    lab.New(t, lab.Options{Pods: 1, RoutedPods: -1}),
		t:      t,
		config: filepath.Join(t.TempDir(), "ip-masq-agent"),
	}
	n.write("nonMasqueradeCIDRs: [10.0.0.0/8]")
	return n
}

func (n *node) write(config string) {
	n.t.Helper()
	if err := os.WriteFile(n.config, []byte(config+"\n"), 0o600); err != nil {
		n.t.Fatal(err)
	}
}

// flags are those of an agent on the node.
func (n *node) flags(more ...string) []string {
	return append([]string{"--config=" + n.config}, more...)
}

// chain lists the agent's chain, empty where there is none.
func (n *node) chain() string {
	n.t.Helper()
	text, err := n.Node.Run(n.t.Context(), "iptables-nft-save", "-t", "nat")
	if err != nil {
		n.t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(text) {
		if strings.Contains(line, "IP-MASQ-AGENT") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return strings.Join(lines, "\n")
}

// within waits for a condition and fails the test where it does not come true.
func (n *node) within(limit time.Duration, what string, is func() bool) {
	n.t.Helper()
	for deadline := time.Now().Add(limit); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			n.t.Fatalf("not within %v: %s\nthe chain is\n%s", limit, what, n.chain())
		}
	}
}

func (n *node) keeps(cidr string) func() bool {
	return func() bool { return strings.Contains(n.chain(), "-d "+cidr+" ") }
}

func (n *node) status() api.Status {
	n.t.Helper()
	got := lab.RunAgent(n.t, n.Node, "status", "-o", "json")
	if got.Code != exitFine {
		n.t.Fatalf("status: %+v", got)
	}
	if strings.Contains(got.Stdout, "null") {
		n.t.Errorf("want lists, got %s", got.Stdout)
	}
	var status api.Status
	if err := json.Unmarshal([]byte(got.Stdout), &status); err != nil {
		n.t.Fatal(err)
	}
	return status
}

func TestKernelOnce(t *testing.T) {
	n := newNode(t)
	if got := lab.RunAgent(t, n.Node, n.flags("--once", "--metrics-bind-address=0")...); got.Code != exitFine {
		t.Fatalf("got %+v", got)
	}
	if !n.keeps("10.0.0.0/8")() || !strings.Contains(n.chain(), "-j MASQUERADE") {
		t.Errorf("the chain is\n%s", n.chain())
	}
	status := n.status()
	if status.Datapath != agent.IPTables || status.Backend.Name != "nft" {
		t.Errorf("status without an agent: %+v", status)
	}
	for range 2 {
		if got := lab.RunAgent(t, n.Node, "cleanup"); got.Code != exitFine {
			t.Errorf("cleanup: %+v", got)
		}
		if got := n.chain(); got != "" {
			t.Errorf("left after cleanup:\n%s", got)
		}
	}
	if status := n.status(); status.Datapath != "" {
		t.Errorf("status after cleanup: %+v", status)
	}
}

func TestKernelDryRun(t *testing.T) {
	for datapath, want := range map[string]string{agent.IPTables: "-A IP-MASQ-AGENT -d 10.0.0.0/8 ", agent.EBPF: "cidr 10.0.0.0/8 keep\n"} {
		n := newNode(t)
		got := lab.RunAgent(t, n.Node, n.flags("--dry-run", "--datapath="+datapath)...)
		if got.Code != exitFine || !strings.Contains(got.Stdout, want) || strings.Contains(got.Stdout, "::") {
			t.Errorf("%s: got %+v, want %q and no IPv6 in it", datapath, got, want)
		}
		if chain := n.chain(); chain != "" {
			t.Errorf("%s: it made\n%s", datapath, chain)
		}
		if _, err := n.Node.Run(t.Context(), "ls", defaultPinPath); err == nil {
			t.Errorf("%s: it made the pin directory", datapath)
		}
	}
}

func TestKernelAgentFollowsItsConfig(t *testing.T) {
	n := newNode(t)
	a := lab.StartAgent(t, n.Node, n.flags()...)
	n.within(0, "the config at the start", n.keeps("10.0.0.0/8"))

	n.write("nonMasqueradeCIDRs: [203.0.113.0/24]")
	n.within(promptly, "an edited config in force", n.keeps("203.0.113.0/24"))

	n.write("nonMasqueradeCIDRs: [203.0.113.1/24]")
	n.within(promptly, "the fault in status", func() bool { return !n.status().Config.Valid })
	if status := n.status(); !strings.HasPrefix(status.Config.Error, n.config+":1: nonMasqueradeCIDRs: ") || status.NonMasqueradeCIDRs[0].String() != "203.0.113.0/24" {
		t.Errorf("got %+v", status)
	}
	if _, err := n.Node.Run(t.Context(), "iptables-nft", "-t", "nat", "-F"); err != nil {
		t.Fatal(err)
	}
	n.within(promptly, "the last good config healed", n.keeps("203.0.113.0/24"))
	if code, body, err := a.Get("/healthz"); code != 200 || err != nil {
		t.Errorf("/healthz: %d %s %v", code, body, err)
	}
	if code, body, err := a.Get("/readyz"); code != 200 || err != nil || !strings.Contains(body, `"config_good":false`) {
		t.Errorf("/readyz: %d %s %v", code, body, err)
	}
	for _, want := range []string{"config_last_reload_successful 0", "repairs_total 1", "sync_errors_total 0"} {
		// A repair counts once it was read back, a moment after it is seen.
		n.within(promptly, want+" in the metrics", func() bool {
			_, page, err := a.Get("/metrics")
			return err == nil && strings.Contains(page, "\nip_masq_agent_"+want+"\n")
		})
	}
	if got := strings.Count(a.Logs(), "config refused"); got != 1 {
		t.Errorf("the fault is logged %d times:\n%s", got, a.Logs())
	}
}

func TestKernelAgentEndsAndLeavesItsRules(t *testing.T) {
	for name, signal := range map[string]unix.Signal{"SIGTERM": unix.SIGTERM, "SIGINT": unix.SIGINT} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			a := n.Node.Command(t.Context(), lab.AgentBinary(t), n.flags("--metrics-bind-address=0")...)
			if err := a.Start(); err != nil {
				t.Fatal(err)
			}
			n.within(10*time.Second, "the rules", n.keeps("10.0.0.0/8"))
			before, start := n.chain(), time.Now()
			if err := a.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			if err := a.Wait(); err != nil || time.Since(start) > 5*time.Second {
				t.Errorf("ended after %v with %v", time.Since(start), err)
			}
			if after := n.chain(); after != before {
				t.Errorf("chain before\n%s\nafter\n%s", before, after)
			}
		})
	}
}

func TestKernelSecondAgentExits(t *testing.T) {
	n := newNode(t)
	a := lab.StartAgent(t, n.Node, n.flags()...)
	got := lab.RunAgent(t, n.Node, n.flags("--masq-chain=OTHER")...)
	if got.Code != exitFailure || strings.Count(got.Stderr, agent.ErrRunning.Error()) != 1 {
		t.Errorf("got %+v", got)
	}
	if got := lab.RunAgent(t, n.Node, "cleanup"); got.Code != exitFailure {
		t.Errorf("cleanup beside an agent: %+v", got)
	}
	if err := a.Stop(); err != nil {
		t.Errorf("the first agent: %v", err)
	}
}

func TestKernelHangupResyncs(t *testing.T) {
	n := newNode(t)
	a := lab.StartAgent(t, n.Node, n.flags()...)
	if err := a.Signal(unix.SIGHUP); err != nil {
		t.Fatal(err)
	}
	n.within(promptly, "a second sync", func() bool {
		_, page, _ := a.Get("/metrics")
		return strings.Contains(page, "ip_masq_agent_sync_duration_seconds_count 2\n")
	})
}

func TestKernelExplain(t *testing.T) {
	n := newNode(t)
	ask := func(dst string) (answer api.Answer) {
		t.Helper()
		got := lab.RunAgent(t, n.Node, "explain", "--dst", dst, "-o", "json", "--config="+n.config)
		if err := json.Unmarshal([]byte(got.Stdout), &answer); err != nil {
			t.Fatalf("%v: %+v", err, got)
		}
		return answer
	}
	check := func(t *testing.T) {
		out := ask(n.Remote.V4.String())
		if out.Verdict != "masquerade" || out.Interface != "eth0" || out.SNATAddress != n.Addresses.Node.V4 {
			t.Errorf("outside: got %+v", out)
		}
		if own := ask(out.SNATAddress.String()); own.Verdict != "local" {
			t.Errorf("the node's own: got %+v", own)
		}
		if kept := ask("10.200.0.1"); kept.Verdict != "keep" || kept.CIDR != "10.0.0.0/8" {
			t.Errorf("exempt: got %+v", kept)
		}
	}
	t.Run("without agent", check)
	lab.StartAgent(t, n.Node, n.flags()...)
	t.Run("by the agent", check)
}

func TestKernelPortInUseDoesNotStopTheDatapath(t *testing.T) {
	n := newNode(t)
	var squatter net.Listener
	err := n.Node.Do(func() (err error) {
		squatter, err = net.Listen("tcp", "127.0.0.1:9613")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer squatter.Close()
	a := lab.LaunchAgent(t, n.Node, n.flags()...)
	n.within(5*time.Second, "the rules", n.keeps("10.0.0.0/8"))
	n.within(promptly, "an error line", func() bool { return strings.Count(a.Logs(), "level=ERROR") == 1 })
}
