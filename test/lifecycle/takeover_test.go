// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"ip-masq-agent/internal/lab"
)

// While the programs drain, flows whose address goes begin anew behind another,
// as under the rules, and do not leave with the pod's.
func TestAddressGoesWhileDraining(t *testing.T) {
	n := newNode(t, lab.Options{})
	n.write("nonMasqueradeCIDRs: [10.0.0.0/8]\nresyncInterval: 1s")
	a := n.switchTo(nil, "ebpf")
	other := n.dial("udp", n.serve("udp", n.ViaSubnet2.V4))
	if other.Seen.Addr() != n.Subnet2.V4 {
		t.Fatalf("seen from %s", other.Seen)
	}
	stays := n.dial("tcp", n.serve("tcp", n.Remote.V4))
	n.forget()
	n.switchTo(a, "iptables")
	n.goesOn(other)
	n.ip("addr del " + n.Subnet2.V4.String() + "/24 dev eth0")
	n.within(promptly, "another address", func() bool {
		seen, err := other.Ask()
		return err == nil && seen.Addr() == n.Addresses.Node.V4
	})
	n.goesOn(stays)
	n.noLeak()
	if drain := n.status().Drain; drain.Entries != 1 {
		t.Errorf("drain %+v", drain)
	}
}

// Off means that no IPv6 flow begins. Open ones go on.
func TestIPv6OffEndsNothing(t *testing.T) {
	n := newNode(t, lab.Options{})
	a := n.switchTo(nil, "ebpf", "--enable-ipv6")
	server := n.serve("tcp", n.Remote.V6)
	open := n.dial("tcp", server)
	if lab.IsPod(open.Seen.Addr()) {
		t.Fatalf("seen from %s", open.Seen)
	}
	a = n.switchTo(a, "ebpf")
	n.goesOn(open)
	if later := n.dial("tcp", server); !lab.IsPod(later.Seen.Addr()) {
		t.Errorf("seen from %s though IPv6 is off", later.Seen)
	}
	n.translates("tcp", n.serve("tcp", n.Remote.V4))
	n.switchTo(a, "ebpf", "--enable-ipv6")
	n.goesOn(open)
	n.translates("tcp", server)
}

// limited starts an agent in the iptables datapath with the classic agent's rights.
func (n *node) limited() *lab.Output {
	n.t.Helper()
	args := append([]string{"--bounding-set=-all,+net_admin,+net_raw", lab.AgentBinary(n.t)},
		n.flags("iptables", "--once", "--metrics-bind-address=0")...)
	said, err := n.Node.Command(n.t.Context(), "setpriv", args...).CombinedOutput()
	if _, ran := errors.AsType[*exec.ExitError](err); err != nil && !ran {
		n.t.Fatal(err)
	}
	out := &lab.Output{Stdout: string(said)}
	if err != nil {
		out.Code = 1
	}
	return out
}

// The classic agent's rights are enough to drain where maps can be opened
// without CAP_BPF (6.1).
func TestDrainWithTheClassicRights(t *testing.T) {
	n := newNode(t, lab.Options{})
	n.drainTimeouts()
	n.once("ebpf")
	open := n.dial("tcp", n.serve("tcp", n.Remote.V4))
	n.forget()
	if out := n.limited(); out.Code != 0 || strings.Contains(out.Stdout, "level=WARN") {
		t.Fatalf("%+v", out)
	}
	n.goesOn(open)
	n.noLeak()
	if drain := n.status().Drain; !drain.Active || drain.Entries != 1 {
		t.Errorf("drain %+v", drain)
	}
	_ = open.Close()
	n.within(30*time.Second, "an empty pin directory", func() bool {
		n.limited()
		_, err := n.Node.Run(t.Context(), "ls", pinPath)
		return err != nil
	})
}

// Without the right to open them the programs stay. They harm nobody, and the
// agent says so.
func TestProgramsStayWithoutRights(t *testing.T) {
	n := newNode(t, lab.Options{})
	n.once("ebpf")
	n.run("chown", "-R", "1", pinPath)
	out := n.limited()
	if out.Code != 0 || strings.Count(out.Stdout, "the programs of the ebpf datapath stay") != 1 || strings.Contains(out.Stdout, "level=ERROR") {
		t.Fatalf("%+v", out)
	}
	n.forget()
	for _, network := range []string{"tcp", "udp"} {
		n.translates(network, n.serve(network, n.Remote.V4))
	}
	n.noLeak()
	n.run("chown", "-R", "0", pinPath)
	n.cleanup()
}

// A classic agent's chain of whatever name gives way, and what netfilter
// translates by it goes on.
func TestTakeoverFromAClassicAgent(t *testing.T) {
	n := newNode(t, lab.Options{})
	n.write("nonMasqueradeCIDRs: [10.0.0.0/8]\nresyncInterval: 1s")
	n.drainTimeouts()
	const jump = `-A POSTROUTING -m comment --comment "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom OLD chain" -m addrtype ! --dst-type LOCAL -j OLD`
	for _, rule := range []string{
		"-N OLD", `-A OLD -m comment --comment "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)" -j MASQUERADE`, jump,
	} {
		n.run("bash", "-c", "iptables-nft -t nat "+rule)
	}
	open := n.dial("tcp", n.serve("tcp", n.Remote.V4))
	n.forget()
	a := n.switchTo(nil, "ebpf")
	n.within(promptly, "no jump", func() bool { return !strings.Contains(n.rules(), "-A POSTROUTING") })
	for range 3 {
		n.goesOn(open)
		n.translates("tcp", n.serve("tcp", n.Remote2.V4))
	}
	n.noLeak()
	_ = open.Close()
	n.within(30*time.Second, "no chain", func() bool { return !strings.Contains(n.rules(), "OLD") })
	n.within(promptly, "the log", func() bool { return strings.Contains(a.Logs(), "the other datapath has drained") })
}

// A chain of the agent's name that somebody else filled is named, and keeps no
// turn from succeeding.
func TestForeignChainOfOurName(t *testing.T) {
	n := newNode(t, lab.Options{})
	n.write("nonMasqueradeCIDRs: [10.0.0.0/8]\nresyncInterval: 1s")
	for _, rule := range []string{
		"-N IP-MASQ", `-A IP-MASQ -m comment --comment "ip-masq: outbound traffic is subject to MASQUERADE (must be last in chain)" -j MASQUERADE`,
		`-A POSTROUTING -m comment --comment "ip-masq: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ chain" -m addrtype ! --dst-type LOCAL -j IP-MASQ`,
	} {
		n.run("bash", "-c", "iptables-nft -t nat "+rule)
	}
	before := n.rules()
	a := n.switchTo(nil, "ebpf", "--masq-chain=IP-MASQ")
	named := func(text string) bool { return strings.Contains(text, "chain IP-MASQ (ipv4, nft backend)") }
	n.within(promptly, "the chain named", func() bool { return slices.ContainsFunc(n.status().Warnings, named) })
	if n.metric(a, "sync_errors_total") != 0 || strings.Contains(a.Logs(), "level=ERROR") {
		t.Error("turns fail")
	}
	if strings.Count(a.Logs(), "chain IP-MASQ (ipv4, nft backend)") != 1 {
		t.Error("not named once in the log")
	}
	if after := n.rules(); withoutCounters(after) != withoutCounters(before) {
		t.Errorf("changed:\n%s", after)
	}
}

// A classic agent that goes on beside ours puts back what we removed. It is named
// and not fought, until it ends.
func TestClassicAgentThatRuns(t *testing.T) {
	n := newNode(t, lab.Options{})
	n.write("nonMasqueradeCIDRs: [10.0.0.0/8]\nresyncInterval: 1s")
	rules := []string{
		"-N IP-MASQ-AGENT", `-A IP-MASQ-AGENT -m comment --comment "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)" -j MASQUERADE`,
		`-A POSTROUTING -m comment --comment "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ-AGENT chain" -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT`,
	}
	sync := func() {
		t.Helper()
		for _, rule := range rules {
			n.run("bash", "-c", "iptables-nft -t nat "+rule)
		}
	}
	sync()
	a := n.switchTo(nil, "ebpf")
	gone := func() bool { return !strings.Contains(n.rules(), "IP-MASQ-AGENT") }
	n.within(promptly, "no chain", gone)
	sync()
	named := func(text string) bool {
		return strings.Contains(text, "chain IP-MASQ-AGENT (ipv4, nft backend) of another agent")
	}
	isNamed := func() bool { return slices.ContainsFunc(n.status().Warnings, named) }
	n.within(30*time.Second, "the chain named", isNamed)
	if gone() {
		t.Error("it has been removed again")
	}
	n.run("bash", "-c", "iptables-nft -t nat -F POSTROUTING; iptables-nft -t nat -F IP-MASQ-AGENT; iptables-nft -t nat -X IP-MASQ-AGENT")
	n.within(30*time.Second, "it forgotten", func() bool { return !isNamed() })
	if log := a.Logs(); strings.Count(log, "IP-MASQ-AGENT (ipv4, nft backend) of another agent") != 1 || n.metric(a, "sync_errors_total") != 0 {
		t.Errorf("log:\n%s", log)
	}
}

func withoutCounters(rules string) string {
	var kept []string
	for line := range strings.Lines(rules) {
		if !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, ":") {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "")
}
