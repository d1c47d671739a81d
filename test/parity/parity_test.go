// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"encoding/json"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"

	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/lab"
)

// variants: upstream's rules are a check of the table and run once.
func variants() []variant {
	all := []variant{{subject: upstream, conntrack: true, offloads: true}}
	for _, offloads := range []bool{true, false} {
		for _, randomFully := range []bool{true, false} {
			all = append(all,
				variant{subject: iptables, conntrack: true, offloads: offloads, randomFully: randomFully},
				variant{subject: ebpf, conntrack: true, offloads: offloads, randomFully: randomFully},
				variant{subject: ebpf, conntrack: false, offloads: offloads, randomFully: randomFully},
			)
		}
	}
	return append(all,
		variant{subject: ebpf, conntrack: true, offloads: true, fastPath: true},
		variant{subject: ebpf, offloads: true, randomFully: true, fastPath: true},
	)
}

func TestParity(t *testing.T) {
	for _, v := range variants() {
		t.Run(v.String(), func(t *testing.T) {
			t.Parallel()
			b := newBench(t, v)
			for _, r := range table() {
				b.run(t, r)
			}
			b.checkNoLeak()
			b.checkTracking()
			b.checkFastPath()
			for _, r := range changes() {
				b.run(t, r)
			}
		})
	}
}

func newBench(t *testing.T, v variant) *bench {
	t.Helper()
	l := lab.New(t, lab.Options{Conntrack: v.conntrack, NoOffloads: !v.offloads, SecondUplink: true})
	b := &bench{T: t, lab: l, variant: v, port: new(atomic.Uint32)}
	b.port.Store(20000)
	if err := l.NarrowRoute(l.Remote2, 1300); err != nil {
		t.Fatal(err)
	}
	b.serve()
	if withConntrack(v) {
		b.forward()
	}
	for _, wire := range l.Wires {
		b.wires = append(b.wires, lab.NewCapture(t, wire))
	}
	for _, is6 := range []bool{false, true} {
		b.openEarlier(is6)
	}
	b.subject = startSubject(t, l, v, usualSettings())
	return b
}

// serve has every host serve at each of its addresses.
func (b *bench) serve() {
	b.Helper()
	for _, addr := range []netip.Addr{b.lab.Addresses.Node.V4, b.lab.Addresses.Node.V6} {
		b.lab.Node.Serve(b, tcp, netip.AddrPortFrom(addr, boundPort))
		b.lab.Node.Serve(b, udp, netip.AddrPortFrom(addr, boundPort))
	}
	at := map[host][]place{
		outside:  {remote, narrow, toggled, viaSubnet2, viaUplink2, inside, inside2, exception, linkLocal},
		podA:     {addrPodA},
		podB:     {addrPodB},
		routedA:  {addrRouted},
		hostNode: {node, secondary, bridge},
	}
	for h, places := range at {
		for _, p := range places {
			for _, is6 := range []bool{false, true} {
				addr := p(b.lab).Addr(is6)
				if !addr.IsValid() {
					continue
				}
				b.namespace(h).Serve(b, tcp, netip.AddrPortFrom(addr, service))
				b.namespace(h).Serve(b, udp, netip.AddrPortFrom(addr, service))
			}
		}
	}
}

// forward makes services of the kinds that a node has: podA's behind a
// NodePort and behind an address that is nobody's, and one outside the cluster
// behind an address that pods use.
func (b *bench) forward() {
	b.Helper()
	for _, is6 := range []bool{false, true} {
		for at, to := range map[netip.AddrPort]netip.Addr{
			netip.AddrPortFrom(node(b.lab).Addr(is6), nodePort):     b.own(podA).Addr(is6),
			netip.AddrPortFrom(vip(b.lab).Addr(is6), nodePort):      b.own(podA).Addr(is6),
			netip.AddrPortFrom(clusterIP(b.lab).Addr(is6), service): b.lab.Remote.Addr(is6),
		} {
			for _, proto := range []string{tcp, udp} {
				if err := b.lab.Forward(proto, at, netip.AddrPortFrom(to, service)); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
}

// run runs one row in all its protocols and families.
func (b *bench) run(t *testing.T, r row) {
	if r.only != nil && !r.only(b.variant) {
		return
	}
	protos := r.protos
	if protos == nil && r.scenario == nil {
		protos = []string{tcp, udp, icmp}
	}
	t.Run(r.name, func(t *testing.T) {
		if r.deviation != "" {
			t.Logf("listed deviation: %s", r.deviation)
		}
		for _, is6 := range []bool{false, true} {
			if is6 && r.only4 || !is6 && r.only6 {
				continue
			}
			if r.scenario != nil {
				t.Run(family(is6), func(t *testing.T) { r.scenario(b.with(t), is6) })
			}
			for _, proto := range protos {
				t.Run(proto+family(is6), func(t *testing.T) { b.with(t).check(proto, is6, r.flows) })
			}
		}
	})
}

func family(is6 bool) string {
	if is6 {
		return "v6"
	}
	return "v4"
}

// checkTracking: whoever does not need conntrack must not turn it on, for it
// costs every packet of the node.
func (b *bench) checkTracking() {
	b.Helper()
	n, err := b.lab.TrackedConnections()
	if err != nil {
		b.Fatal(err)
	}
	if n > 0 != withConntrack(b.variant) {
		b.Errorf("the node tracks %d connections", n)
	}
}

// checkFastPath: where there is one, what the table sends took it.
func (b *bench) checkFastPath() {
	b.Helper()
	if !b.variant.fastPath {
		return
	}
	var status api.Status
	out := lab.RunAgent(b, b.lab.Node, "status", "-o", "json")
	if err := json.Unmarshal([]byte(out.Stdout), &status); err != nil {
		b.Fatalf("%v: %s", err, out.Stderr)
	}
	if !status.FastPath.Enabled || status.FastPath.Packets < 100 {
		b.Errorf("fast path: %+v, want more packets on it", status.FastPath)
	}
	b.Logf("fast path: %+v", status.FastPath)
}

// checkNoLeak: pods' addresses are for exempt destinations and for clients
// that came from outside.
func (b *bench) checkNoLeak() {
	b.Helper()
	exempt := prefixes(b.T, append(slices.Clone(usualSettings().NonMasqueradeCIDRs), "169.254.0.0/16")...)
	for _, addr := range []netip.Addr{b.lab.Client.V4, b.lab.Client.V6} {
		exempt = append(exempt, netip.PrefixFrom(addr, addr.BitLen()))
	}
	for _, wire := range b.wires {
		wire.NoPodAddress(b.T, exempt...)
		leaks := wire.Select(func(p *lab.Packet) bool {
			exceptions := prefixes(b.T, usualSettings().MasqueradeCIDRs...)
			return lab.IsPod(p.Src) && slices.ContainsFunc(exceptions, func(e netip.Prefix) bool { return e.Contains(p.Dst) })
		})
		if len(leaks) > 0 {
			b.Errorf("%d packets with a pod's address to exceptions, first %s", len(leaks), &leaks[0])
		}
	}
}
