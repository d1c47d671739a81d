// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"context"
	"errors"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"ip-masq-agent/internal/lab"
)

// TestDeviations shows what docs/parity.md says of both datapaths where rules,
// sysctls or devices of others make packets special. Each row leaves the lab as
// it was.
func TestDeviations(t *testing.T) {
	rows := []struct {
		name     string
		only4    bool
		scenario func(b *bench, is6 bool)
	}{
		{name: "port of a flow that was moved before", scenario: movedPort},
		{name: "NOTRACK", scenario: untracked},
		{name: "TCP under way, with nf_conntrack_tcp_loose off", scenario: strictTCP},
		{name: "route by fwmark", scenario: routedByMark},
		{name: "strict rp_filter", only4: true, scenario: strictPaths},
		{name: "macvlan child keeps its source", only4: true, scenario: macvlanChild},
		{name: "frames of a bridge that pass netfilter", only4: true, scenario: bridgedFrames},
	}
	for _, datapath := range []string{iptables, ebpf} {
		t.Run(datapath, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, variant{subject: datapath, conntrack: true})
			for _, r := range rows {
				t.Run(r.name, func(t *testing.T) {
					for _, is6 := range []bool{false, true} {
						if !is6 || !r.only4 {
							t.Run(family(is6), func(t *testing.T) { r.scenario(b.with(t), is6) })
						}
					}
				})
			}
		})
	}
}

// either is what the datapath of the bench should do.
func either[T any](b *bench, inIPTables, inEBPF T) T {
	if b.variant.subject == ebpf {
		return inEBPF
	}
	return inIPTables
}

// checkSource sends a packet of a pod, and compares its source outside.
func (b *bench) checkSource(is6 bool, build builder, want netip.Addr) lab.Packet {
	b.Helper()
	p := b.await(b.send(podA, is6, build))
	if p.Src != want {
		b.Errorf("comes from %s, want %s: %s", p.Src, want, &p)
	}
	return p
}

// movedPort: netfilter gives a pod's flow the port that an earlier one from the
// same socket got elsewhere (find_appropriate_src), we try the own one first.
func movedPort(b *bench, is6 bool) {
	port := b.freshPort()
	seen := func(h host, to place) netip.AddrPort {
		conn, err := b.namespace(h).Dial(b.Context(), udp, netip.AddrPortFrom(b.own(h).Addr(is6), port), netip.AddrPortFrom(to(b.lab).Addr(is6), service))
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { conn.Close() })
		return conn.Seen
	}
	seen(podA, remote)
	moved := seen(podB, remote).Port()
	if moved == port {
		b.Fatalf("both pods come from port %d", port)
	}
	if got, want := seen(podB, narrow).Port(), either(b, moved, port); got != want {
		b.Errorf("to another remote it comes from port %d, want %d", got, want)
	}
}

// untracked: what netfilter does not track it does not translate.
func untracked(b *bench, is6 bool) {
	if err := b.lab.Node.NFT(`table inet untracked {
		chain prerouting {
			type filter hook prerouting priority raw
			udp dport 9 notrack
		}
	}`); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { b.remove("inet untracked") })
	b.checkSource(is6, lab.UDP, either(b, b.own(podA), b.lab.Addresses.Node).Addr(is6))
}

// strictTCP: neither datapath picks up a connection in the middle then.
func strictTCP(b *bench, is6 bool) {
	const knob = "net/netfilter/nf_conntrack_tcp_loose"
	set := func(value string) {
		b.Helper()
		if err := errors.Join(b.lab.Node.Sysctl(knob, value), b.subject.agent.Signal(syscall.SIGHUP)); err != nil {
			b.Fatal(err)
		}
	}
	picksUp := func() bool {
		mark := b.send(podA, is6, segment(lab.ACK))
		b.await(b.send(podA, is6, lab.UDP))
		return len(b.onWire(mark)) > 0
	}
	await := func(want bool) {
		b.Helper()
		for deadline := time.Now().Add(settleTime); picksUp() != want; {
			if time.Now().After(deadline) {
				b.Fatalf("picked up in the middle: %v", !want)
			}
		}
	}
	set("0")
	defer func() {
		set("1")
		await(true)
	}()
	await(false)
	b.checkSource(is6, segment(lab.SYN), b.lab.Addresses.Node.Addr(is6))
}

func (b *bench) remove(table string) {
	if err := b.lab.Node.NFT("delete table " + table); err != nil {
		b.Error(err)
	}
}

// routedByMark sends what has a mark to the gateway in the second subnet.
func routedByMark(b *bench, is6 bool) {
	if err := b.lab.Node.NFT(`table inet marked {
		chain prerouting {
			type filter hook prerouting priority mangle
			udp dport 9 meta mark set 7
		}
	}`); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { b.remove("inet marked") })
	family, gateway := "-4", "198.51.100.1"
	if is6 {
		family, gateway = "-6", "2001:db8:51::1"
	}
	b.ip(family, "route", "add", "default", "via", gateway, "dev", "eth0", "table", "77")
	b.ip(family, "rule", "add", "fwmark", "7", "lookup", "77")
	b.Cleanup(func() {
		b.ip(family, "rule", "del", "fwmark", "7", "lookup", "77")
		b.ip(family, "route", "flush", "table", "77")
	})
	want := b.lab.Subnet2.Addr(is6)
	if is6 { // the destination decides, not the gateway
		want = b.lab.Addresses.Node.Addr(is6)
	}
	b.checkSource(is6, lab.UDP, want)
}

func (b *bench) ip(args ...string) {
	b.Helper()
	// The test's own context is over when it cleans up.
	if _, err := b.lab.Node.Run(context.WithoutCancel(b.Context()), "ip", args...); err != nil {
		b.Fatal(err)
	}
}

// talks opens a connection from a pod, and goes on with it: the outside sees the
// node all the time.
func (b *bench) talks(proto string, is6 bool) {
	b.Helper()
	conn, err := b.namespace(podA).Dial(b.Context(), proto, netip.AddrPort{}, netip.AddrPortFrom(b.lab.Remote.Addr(is6), service))
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	for range 20 {
		if seen, err := conn.Ask(); err != nil || seen != conn.Seen || seen.Addr() != b.lab.Addresses.Node.Addr(is6) {
			b.Fatalf("%s: seen from %s, before from %s; %v", proto, seen, conn.Seen, err)
		}
	}
}

// strictPaths (trap 66): a reply has its pod's address when the node looks where
// it comes from.
func strictPaths(b *bench, is6 bool) {
	const knob = "net/ipv4/conf/all/rp_filter"
	if err := b.lab.Node.Sysctl(knob, "1"); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := b.lab.Node.Sysctl(knob, "0"); err != nil {
			b.Error(err)
		}
	})
	b.talks(tcp, is6)
	b.talks(udp, is6)
}

// macvlanChild: neither datapath sees a child of the uplink as the node's.
func macvlanChild(b *bench, _ bool) {
	uplink, pod := b.lab.Uplinks[0], b.lab.RoutedPods[1]
	child := &netlink.Macvlan{LinkAttrs: netlink.NewLinkAttrs(), Mode: netlink.MACVLAN_MODE_BRIDGE}
	child.Name, child.ParentIndex = "mac0", uplink.Index
	if err := b.lab.Node.Netlink().LinkAdd(child); err != nil {
		b.Fatal(err)
	}
	b.ip("link", "set", "mac0", "netns", pod.Path())
	b.Cleanup(func() {
		if link, err := pod.Netlink().LinkByName("mac0"); err == nil {
			_ = pod.Netlink().LinkDel(link)
		}
	})
	link, err := pod.Netlink().LinkByName("mac0")
	if err != nil {
		b.Fatal(err)
	}
	if err := pod.Netlink().LinkSetUp(link); err != nil {
		b.Fatal(err)
	}
	sender, err := pod.Namespace.Link("mac0")
	if err != nil {
		b.Fatal(err)
	}
	sender.Next = uplink.Next
	mark := []byte("of a macvlan child")
	if err := sender.Send(lab.UDP(netip.AddrPortFrom(pod.V4, 9), netip.AddrPortFrom(b.lab.Remote.V4, 9), mark)); err != nil {
		b.Fatal(err)
	}
	if p := b.await(mark); p.Src != pod.V4 {
		b.Errorf("comes from %s, want %s", p.Src, pod.V4)
	}
}

// bridgedFrames: with bridge-nf-call-iptables frames from pod to pod pass
// POSTROUTING, and are masqueraded where the list does not cover the pods.
func bridgedFrames(b *bench, is6 bool) {
	const knob = "net/bridge/bridge-nf-call-iptables"
	if err := b.lab.Node.Sysctl(knob, "1"); err != nil {
		b.Fatal(err)
	}
	uncovered := usualSettings()
	uncovered.NonMasqueradeCIDRs = []string{b.prefixOf(b.lab.Inside.V4)}
	uncovered.MasqueradeCIDRs = nil
	b.subject.configure(b.T, uncovered)
	b.Cleanup(func() {
		b.subject.configure(b.T, usualSettings())
		if err := b.lab.Node.Sysctl(knob, "0"); err != nil {
			b.Error(err)
		}
	})
	b.awaitSource(b.lab.Inside2.V4, b.lab.Addresses.Node.V4)
	conn, err := b.namespace(podA).Dial(b.Context(), udp, netip.AddrPort{}, netip.AddrPortFrom(b.own(podB).V4, service))
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	if want := either(b, b.lab.PodGate, b.own(podA)).Addr(is6); conn.Seen.Addr() != want {
		b.Errorf("the other pod sees %s, want %s", conn.Seen, want)
	}
}
