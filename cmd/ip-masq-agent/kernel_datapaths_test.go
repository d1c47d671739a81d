// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/lab"
)

// both tells which datapaths are in the kernel.
func (n *node) both() string {
	n.t.Helper()
	var found []string
	if n.chain() != "" {
		found = append(found, agent.IPTables)
	}
	if _, err := n.Node.Run(n.t.Context(), "ls", defaultPinPath+"/links"); err == nil {
		found = append(found, agent.EBPF)
	}
	return strings.Join(found, " ")
}

func TestKernelSwitchesDatapaths(t *testing.T) {
	n := newNode(t)
	for _, datapath := range []string{agent.IPTables, agent.EBPF, agent.EBPF, agent.IPTables} {
		a := lab.StartAgent(t, n.Node, n.flags("--datapath="+datapath)...)
		n.within(promptly, datapath+" alone", func() bool { return n.both() == datapath })
		status := n.status()
		if status.Datapath != datapath || len(status.Interfaces) == 0 {
			t.Errorf("%s: got %+v", datapath, status)
		}
		if err := a.Stop(); err != nil {
			t.Errorf("%s: %v", datapath, err)
		}
		if got := n.both(); got != datapath {
			t.Errorf("after the end: got %q, want %q to stay", got, datapath)
		}
		if status := n.status(); status.Datapath != datapath {
			t.Errorf("%s, status without agent: %+v", datapath, status)
		}
	}
	a := lab.StartAgent(t, n.Node, n.flags("--datapath=ebpf")...)
	if err := a.Stop(); err != nil {
		t.Fatal(err)
	}
	if got := lab.RunAgent(t, n.Node, "cleanup"); got.Code != exitFine || n.both() != "" {
		t.Errorf("cleanup: got %+v, left %q", got, n.both())
	}
}

// To ebpf, the chains that agents made go, whatever their names, and those that
// others fill are named.
func TestKernelSwitchTakesOldChainsAway(t *testing.T) {
	n := newNode(t)
	const jump = " -m addrtype ! --dst-type LOCAL -j "
	for _, rule := range []string{
		"-N OLD", `-A OLD -m comment --comment "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)" -j MASQUERADE`,
		`-A POSTROUTING -m comment --comment "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom OLD chain"` + jump + "OLD",
		"-N IP-MASQ", `-A IP-MASQ -m comment --comment "ip-masq: outbound traffic is subject to MASQUERADE (must be last in chain)" -j MASQUERADE`,
		`-A POSTROUTING -m comment --comment "ip-masq: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ chain"` + jump + "IP-MASQ",
	} {
		if out, err := n.Node.Command(t.Context(), "bash", "-c", "iptables-nft -t nat "+rule).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	a := lab.StartAgent(t, n.Node, n.flags("--datapath=ebpf")...)
	rules := func() string {
		text, err := n.Node.Run(t.Context(), "iptables-nft-save", "-t", "nat")
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	n.within(promptly, "the old chain gone", func() bool { return !strings.Contains(rules(), "OLD") })
	if got := rules(); strings.Count(got, "IP-MASQ") != 4 {
		t.Errorf("the boot script's chain is not whole:\n%s", got)
	}
	n.within(promptly, "the boot script's chain named", func() bool {
		return strings.Count(a.Logs(), "chain IP-MASQ (ipv4, nft backend)") == 1
	})
}

// Beside a classic agent that comes back, programs that nobody took away go on:
// either list masquerades. cleanup ends both.
func TestKernelProgramsBesideAClassicAgent(t *testing.T) {
	n := newNode(t) // keeps 10.0.0.0/8
	if got := lab.RunAgent(t, n.Node, n.flags("--once", "--datapath=ebpf", "--metrics-bind-address=0")...); got.Code != exitFine {
		t.Fatalf("got %+v", got)
	}
	for _, rule := range []string{
		"-N IP-MASQ-AGENT",
		`-A IP-MASQ-AGENT -d 8.0.0.0/8 -m comment --comment "ip-masq-agent: local traffic is not subject to MASQUERADE" -j RETURN`,
		`-A IP-MASQ-AGENT -m comment --comment "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)" -j MASQUERADE`,
		`-A POSTROUTING -m comment --comment "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ-AGENT chain" -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT`,
	} {
		if out, err := n.Node.Command(t.Context(), "bash", "-c", "iptables-nft -t nat "+rule).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	seen := func(remote netip.Addr) netip.Addr {
		t.Helper()
		conn, err := n.Pods[0].Dial(t.Context(), "tcp", netip.AddrPort{}, n.Outside.Serve(t, "tcp", netip.AddrPortFrom(remote, 0)))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		return conn.Seen.Addr()
	}
	for _, remote := range []netip.Addr{n.Remote.V4, n.Inside.V4} { // only ebpf masquerades the one, only iptables the other
		if got := seen(remote); got != n.Addresses.Node.V4 {
			t.Errorf("%s sees %s", remote, got)
		}
	}
	if got := lab.RunAgent(t, n.Node, "cleanup"); got.Code != exitFine || n.both() != "" {
		t.Errorf("cleanup: got %+v, left %q", got, n.both())
	}
	for _, remote := range []netip.Addr{n.Remote.V4, n.Inside.V4} {
		if got := seen(remote); got != n.Pods[0].V4 {
			t.Errorf("after cleanup %s sees %s", remote, got)
		}
	}
}

// The classic manifest gives NET_ADMIN and NET_RAW.
func TestKernelRights(t *testing.T) {
	n := newNode(t)
	rights := "--bounding-set=-all,+net_admin,+net_raw"
	run := func(args ...string) (string, error) {
		args = append([]string{rights, lab.AgentBinary(t)}, n.flags(args...)...)
		out, err := n.Node.Command(t.Context(), "setpriv", args...).CombinedOutput()
		return string(out), err
	}
	if out, err := run("--once"); err != nil || strings.Contains(out, "level=ERROR") || n.both() != agent.IPTables {
		t.Errorf("iptables: %v\n%s", err, out)
	}
	out, err := run("--once", "--datapath=ebpf")
	if err == nil || !strings.Contains(err.Error(), "exit status 1") || !strings.Contains(out, `msg="datapath cannot run here" datapath=ebpf missing=`) {
		t.Errorf("ebpf: %v\n%s", err, out)
	}
	if got := n.both(); got != agent.IPTables {
		t.Errorf("a datapath that cannot run changed what was there: %q", got)
	}

	rights += ",+bpf"
	out, err = run("--once", "--datapath=ebpf")
	if err != nil || strings.Count(out, "the capability PERFMON is missing") != 1 || n.both() != agent.EBPF {
		t.Errorf("ebpf without PERFMON: %v\n%s", err, out)
	}
	if _, err := n.Pods[0].Run(t.Context(), "ping", "-c1", "-W2", n.Remote.V4.String()); err != nil {
		t.Error("ping through programs that were loaded without PERFMON:", err)
	}
}

func TestKernelTranslationsAreListed(t *testing.T) {
	n := newNode(t)
	lab.StartAgent(t, n.Node, n.flags("--datapath=ebpf")...)
	if _, err := n.Pods[0].Run(t.Context(), "ping", "-c1", "-W2", n.Remote.V4.String()); err != nil {
		t.Fatal(err)
	}
	var flows []api.Translation
	got := lab.RunAgent(t, n.Node, "nat", "list", "-o", "json", "--src", n.Pods[0].V4.String())
	if err := json.Unmarshal([]byte(got.Stdout), &flows); err != nil || len(flows) != 1 {
		t.Fatalf("got %v, %+v", err, got)
	}
	if flow := flows[0]; flow.Proto != "icmp" || flow.Dst != n.Remote.V4 || flow.NATAddr != n.Addresses.Node.V4 || flow.State == "" || flow.SPort == 0 {
		t.Errorf("got %+v", flow)
	}
}

// What an agent left is told without one, from the kernel.
func TestKernelStateWithoutAgent(t *testing.T) {
	n := newNode(t)
	run := func(want int, args ...string) lab.Output {
		t.Helper()
		got := lab.RunAgent(t, n.Node, args...)
		if got.Code != want {
			t.Fatalf("%v: got %+v", args, got)
		}
		return got
	}
	run(exitFine, n.flags("--once", "--datapath=ebpf", "--metrics-bind-address=0")...)
	server := n.Outside.Serve(t, "udp", netip.AddrPortFrom(n.Remote.V4, 0))
	conn, err := n.Pods[0].Dial(t.Context(), "udp", netip.AddrPort{}, server)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()

	status := n.status()
	want := []api.Interface{{Name: "eth0", Attach: "tcx", SNATv4: n.Addresses.Node.V4}}
	if status.Datapath != agent.EBPF || !slices.Equal(status.Interfaces, want) {
		t.Errorf("status %+v, want %+v", status, want)
	}
	if v4 := status.NAT.V4; v4 != (api.Table{Entries: 1, Capacity: 262144}) {
		t.Errorf("table %+v", v4)
	}
	if text := run(exitFine, "status").Stdout; !strings.Contains(text, "\neth0       tcx     203.0.113.10  -\n") {
		t.Errorf("status:\n%s", text)
	}

	var flows []api.Translation
	if err := json.Unmarshal([]byte(run(exitFine, "nat", "list", "-o", "json").Stdout), &flows); err != nil || len(flows) != 1 {
		t.Fatalf("%v, %+v", err, flows)
	}
	source := netip.MustParseAddrPort(conn.LocalAddr().String())
	if f := flows[0]; netip.AddrPortFrom(f.Src, f.SPort) != source || netip.AddrPortFrom(f.NATAddr, f.NATPort) != conn.Seen {
		t.Errorf("got %+v, from %s as %s", f, source, conn.Seen)
	}
	if text := run(exitFine, "nat", "list").Stdout; strings.Count(text, "\n") != 2 || !strings.Contains(text, source.String()) {
		t.Errorf("nat list:\n%s", text)
	}
	explained := run(exitFine, "explain", "--config="+n.config, "--src="+source.Addr().String(), "--dst="+server.Addr().String(),
		"--proto=udp", fmt.Sprintf("--sport=%d", source.Port()), fmt.Sprintf("--dport=%d", server.Port()))
	if !strings.Contains(explained.Stdout, "the flow is translated to "+conn.Seen.String()+" since its first packet") {
		t.Errorf("explain:\n%s", explained.Stdout)
	}

	out, err := n.Node.Command(t.Context(), "setpriv", "--reuid=65534", "--clear-groups", lab.AgentBinary(t), "nat", "list").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "not permitted, it takes root") {
		t.Errorf("without rights: %v, %s", err, out)
	}
}
