// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"
)

// podNumber is one of very many pods, remoteNumber one of many remotes.
func (h hosts) podNumber(n int) netip.Addr    { return numbered(h.pod, n) }
func (h hosts) remoteNumber(n int) netip.Addr { return numbered(h.remote, n) }

func numbered(a netip.Addr, n int) netip.Addr {
	octets := a.As16()
	octets[13], octets[14], octets[15] = byte(n>>16)+1, byte(n>>8), byte(n)
	return netip.AddrFrom16(octets).Unmap()
}

// outsidePort lets a packet leave and returns its port or identifier then.
// Quicker than open, for many.
func (d *datapath) outsidePort(p packet) uint16 {
	d.Helper()
	action, out, err := d.exec(egress, p.frame(), d.out)
	if err != nil || action != actionPass {
		d.Fatalf("%v: action %#x, %v", p, action, err)
	}
	at := ethernetLength + p.headerLength()
	if p.isICMP() {
		at += 4
	}
	return binary.BigEndian.Uint16(out[at:])
}

func TestPodsWithOnePortGetTuplesOfTheirOwn(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		for _, p := range []packet{
			tcp(h.pod, 40000, h.remote, 80, "S"), udp(h.pod, 40000, h.remote, 53), h.ping(h.pod, h.remote, 7),
		} {
			t.Run(h.String()+"/"+p.proto.String(), func(t *testing.T) {
				d.forget(t, config{})
				inside := map[tuple]packet{}
				for n := range 20 {
					q := p
					q.src = h.podNumber(n)
					outside := d.open(q)
					if other, ok := inside[outside.tuple()]; ok {
						t.Fatalf("%v and %v leave as %v", q, other, outside)
					}
					inside[outside.tuple()] = q
					d.take("reply", arrives(outside.reply(), translated, q.reply()))
				}
				elsewhere := p.to(h.remoteB, p.dport)
				if p.isICMP() {
					elsewhere = h.ping(h.pod, h.remoteB, 7)
				}
				if got := d.open(elsewhere); got.sport != elsewhere.sport || got.icmpID != elsewhere.icmpID {
					t.Errorf("port or identifier changed towards a remote where it is free: %v", got)
				}
			})
		}
	}
}

// Trap 12: ports stay in their class.
func TestPortClasses(t *testing.T) {
	classes := []struct {
		sport       uint16
		first, last uint16
	}{
		{1, 1, 511},
		{100, 1, 511},
		{511, 1, 511},
		{512, 600, 1023},
		{550, 600, 1023},
		{600, 600, 1023},
		{1023, 600, 1023},
		{1024, 1024, 65535},
		{40000, 1024, 65535},
		{65535, 1024, 65535},
		{0, 1, 511},
	}
	for _, c := range []config{{}, {randomFully: true}} {
		d := borrow(t, c)
		for _, tt := range classes {
			t.Run(fmt.Sprintf("%d, random %v", tt.sport, c.randomFully), func(t *testing.T) {
				for _, h := range families {
					d.forget(t, c)
					ports := map[uint16]bool{}
					for n := range 100 {
						got := d.outsidePort(udp(h.podNumber(n), tt.sport, h.remote, 53))
						ports[got] = true
						kept := n == 0 && !c.randomFully && got == tt.sport
						if !kept && (got < tt.first || got > tt.last) {
							t.Fatalf("%v: port %d, want one from %d to %d", h, got, tt.first, tt.last)
						}
					}
					if len(ports) != 100 || len(d.checkPairs()) != 100 {
						t.Errorf("%v: 100 pods on %d ports", h, len(ports))
					}
				}
			})
		}
	}
}

func TestRandomFullyKeepsNoPort(t *testing.T) {
	d := borrow(t, config{randomFully: true})
	for _, h := range families {
		for name, make := range map[string]func(n int) packet{
			"UDP":  func(n int) packet { return udp(h.pod, 40000, h.remoteNumber(n), 53) },
			"echo": func(n int) packet { return h.ping(h.pod, h.remoteNumber(n), 40000) },
		} {
			kept := 0
			for n := range 64 {
				if d.outsidePort(make(n)) == 40000 {
					kept++
				}
			}
			if kept > 8 {
				t.Errorf("%v %s: %d of 64 kept their port", h, name, kept)
			}
		}
	}
}

func TestPortsNotAllowedAreChanged(t *testing.T) {
	pool := onlyPorts(50000, 50003)
	runTable(t, []row{{name: "changed", trap: 6, config: config{ports: onlyPorts(50000, 50000)}, steps: func(h hosts) []step {
		p, low := udp(h.pod, 40000, h.remote, 53), udp(h.pod, 100, h.remote, 54)
		return []step{
			leaves(p, opened, p.from(h.node, 50000)),
			arrives(p.from(h.node, 50000).reply(), translated, p.reply()),
			leaves(low, opened, low.from(h.node, 50000)),
		}
	}}, {name: "kept of SCTP", trap: 46, config: config{ports: onlyPorts(50000, 50000)}, steps: func(h hosts) []step {
		p := sctp(h.pod, 40000, h.remote, 80)
		return []step{leaves(p, opened, p.from(h.node, 40000))}
	}}, {name: "kept when allowed", trap: 6, config: config{ports: pool}, steps: func(h hosts) []step {
		p := udp(h.pod, 50002, h.remote, 53)
		return []step{leaves(p, opened, p.from(h.node, 50002))}
	}}})
}

// Trap 11: two ports are two ports, the last included.
func TestPortsRunOut(t *testing.T) {
	for _, randomFully := range []bool{false, true} {
		c := config{ports: onlyPorts(40000, 40001), randomFully: randomFully}
		d := borrow(t, c)
		for _, h := range families {
			for _, p := range []packet{udp(h.pod, 40000, h.remote, 53), tcp(h.pod, 40000, h.remote, 80, "S")} {
				t.Run(fmt.Sprintf("%v/%v/random %v", h, p.proto, randomFully), func(t *testing.T) {
					d.forget(t, c)
					d.nodeAddress(h.node, MasqNodeAddressNODE_ADDRESS_LOCAL)
					a, b, third := p, p.from(h.podB, 40000), p.from(h.podNumber(9), 40000)
					first, second := d.open(a), d.open(b)
					if first.sport == second.sport || min(first.sport, second.sport) != 40000 || max(first.sport, second.sport) != 40001 {
						t.Fatalf("ports %d and %d, want 40000 and 40001", first.sport, second.sport)
					}
					d.take("third", leaves(third, portExhausted))
					d.take("again", leaves(third, portExhausted))
					d.take("the first goes on", leaves(a, translated, first))
					d.take("and its replies", arrives(first.reply(), translated, a.reply()))
					elsewhere := third.to(h.remoteB, p.dport)
					d.open(elsewhere)
					d.age(b, 400*time.Second)
					if got := reopened(d, third); got.sport != second.sport {
						t.Errorf("got port %d, want the dead flow's %d", got.sport, second.sport)
					}
				})
			}
		}
	}
}

// reopened lets a packet take the place of a dead flow.
func reopened(d *datapath, p packet) packet {
	d.Helper()
	got := d.run(egress, p.frame())
	if got.verdict != opened {
		d.Fatalf("%v: got %s, want a flow opened", p, verdictName(got.verdict))
	}
	d.checkPairs()
	nat := d.flow(p).nat
	return p.from(nat.Addr(), nat.Port())
}

func TestNoPortsAtAll(t *testing.T) {
	none := &MasqPortPool{}
	none.Allowed[40000>>6] |= 1 << (40000 & 63)
	runTable(t, []row{{name: "dropped", trap: 9, config: config{ports: none}, steps: func(h hosts) []step {
		p := udp(h.pod, 40000, h.remote, 53)
		return []step{
			leaves(udp(h.pod, 40001, h.remote, 53), portExhausted),
			leaves(p, opened, p.from(h.node, 40000)),
			leaves(p.from(h.podB, 40000), portExhausted),
			leaves(h.ping(h.pod, h.remote, 7), opened, h.ping(h.node, h.remote, 7)),
		}
	}}})
}

// Trap 8 and 9: a full table refuses new flows and hurts no old one.
func TestTableFull(t *testing.T) {
	for name, c := range map[string]config{
		"both tables": {flows: 8}, "flows": {flows: 8, reverses: 100}, "ways back": {flows: 100, reverses: 8},
	} {
		d := borrow(t, c)
		for _, h := range families {
			t.Run(name+"/"+h.String(), func(t *testing.T) {
				d.forget(t, c)
				var old []packet
				for port := range uint16(8) {
					p := udp(h.pod, 40000+port, h.remote, 53)
					d.open(p)
					old = append(old, p)
				}
				for port := range uint16(20) {
					d.take("new", leaves(udp(h.podB, 50000+port, h.remote, 53), tableFull))
				}
				d.take("new, unchangeable", leaves(raw(h.pod, h.remote, protoESP), tableFull))
				for _, p := range old {
					q := p.from(h.node, p.sport)
					d.take("old", leaves(p, translated, q))
					d.take("old reply", arrives(q.reply(), translated, p.reply()))
				}
				d.age(old[0], time.Hour)
				d.take("the dead one's pod", leaves(udp(h.podB, 50000, h.remote, 53), tableFull))
				if got := reopened(d, old[0]); got.src != h.node {
					t.Errorf("reopened as %v", got)
				}
			})
		}
	}
}

// Trap 10: of the ports towards one remote none is in vain at 90 % of the
// range, and less than 1 % at the whole of it.
func TestAllocationQuality(t *testing.T) {
	const first, count = 32768, 32768
	d := load(t, config{randomFully: true, ports: onlyPorts(first, first+count-1), flows: count})
	frame := udp(v4.pod, 40000, v4.remote, 53).frame()
	failures := 0
	for n := range count {
		octets := v4.podNumber(n).As4()
		copy(frame[ethernetLength+12:], octets[:])
		action, _, err := d.exec(egress, frame, d.out)
		if err != nil {
			t.Fatal(err)
		}
		if action == actionDrop {
			failures++
		}
		if n == count*9/10 && failures > 0 {
			t.Errorf("%d of %d flows failed at 90 %% of the range", failures, n)
		}
	}
	t.Logf("%d of %d flows failed", failures, count)
	if failures > count/100 {
		t.Errorf("%d of %d flows failed at the whole range, want less than 1 %%", failures, count)
	}
	ports := map[uint16]bool{}
	each(t, d.FlowsV4, func(_ *MasqTupleV4, m *MasqMappingV4) {
		port := htons(m.Flow.NatPort)
		ports[port] = true
	})
	if len(ports) != count-failures {
		t.Errorf("%d flows on %d ports", count-failures, len(ports))
	}
}
