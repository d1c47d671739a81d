// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/gopacket/gopacket/layers"
)

// single is a table of one step a row.
func single(name string, trap int, f func(h hosts) step) row {
	return row{name: name, trap: trap, steps: func(h hosts) []step { return []step{f(h)} }}
}

func (r row) in(h hosts) row         { r.only = &h; return r }
func (r row) with(c config) row      { r.config = c; return r }
func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func TestExemptKindsAreLeftAlone(t *testing.T) {
	rows := []row{
		single("multicast of a pod", 41, func(h hosts) step { return leaves(udp(h.pod, 5353, h.multicast, 5353), exempt) }),
		single("multicast of a secondary address", 41, func(h hosts) step {
			return leaves(udp(h.secondary, 5353, h.multicast, 5353), exempt)
		}),
		single("multicast that arrives", 41, func(h hosts) step {
			return arrives(udp(h.remote, 5353, h.multicast, 5353), exempt)
		}),
		single("limited broadcast", 41, func(h hosts) step {
			return leaves(udp(h.pod, 9, addr("255.255.255.255"), 9), exempt)
		}).in(v4),
		single("subnet broadcast", 41, func(h hosts) step { return leaves(udp(h.pod, 9, h.broadcast, 9), exempt) }).in(v4),
		single("unspecified source", 42, func(h hosts) step {
			return leaves(udp(addr("0.0.0.0"), 1000, h.remote, 53), exempt)
		}).in(v4),
		single("unspecified source", 43, func(h hosts) step { return leaves(udp(addr("::"), 1000, h.remote, 53), exempt) }).in(v6),
		single("DHCP renewal", 42, func(h hosts) step { return leaves(udp(h.node, 68, h.router, 67), exempt) }).in(v4),
		single("DHCP discovery", 42, func(hosts) step {
			return leaves(udp(addr("0.0.0.0"), 68, addr("255.255.255.255"), 67), exempt)
		}).in(v4),
		single("DHCP ports are no excuse for a pod", 42, func(h hosts) step {
			p := udp(h.pod, 68, h.remote, 67)
			return leaves(p, opened, p.from(h.node, 68))
		}).in(v4),
		single("DHCP is no excuse in IPv6", 0, func(h hosts) step {
			p := udp(h.pod, 68, h.remote, 67)
			return leaves(p, opened, p.from(h.node, 68))
		}).in(v6),
		single("link-local source", 43, func(h hosts) step { return leaves(udp(h.linkOnly, 546, h.remote, 547), exempt) }).in(v6),
		single("link-local destination", 43, func(h hosts) step { return leaves(udp(h.pod, 546, h.linkOnly, 547), exempt) }).in(v6),
		single("end of link-local", 43, func(h hosts) step {
			return leaves(udp(h.pod, 546, addr("febf:ffff::1"), 547), exempt)
		}).in(v6),
		single("link-local that arrives", 43, func(h hosts) step {
			return arrives(udp(h.linkOnly, 546, h.node, 547), exempt)
		}).in(v6),
	}
	for _, kind := range []uint8{130, 131, 132, 133, 134, 135, 136, 137, 143, 151, 152, 153} {
		name := fmt.Sprintf("neighbour or listener message %d", kind)
		rows = append(rows,
			single(name, 43, func(h hosts) step { return leaves(h.icmp(h.pod, h.remote, kind, 0), exempt) }).in(v6),
			single(name+" that arrives", 43, func(h hosts) step {
				return arrives(h.icmp(h.remote, h.node, kind, 0), exempt)
			}).in(v6))
	}
	runTable(t, rows)
}

// Trap 34: what has a label in front is not read as something else.
func TestNotOurFrames(t *testing.T) {
	d := borrow(t, config{})
	frame := udp(v4.pod, 40000, v4.remote, 53).withBody(make([]byte, 40)).frame()
	tests := []struct {
		name    string
		change  func(frame []byte) []byte
		verdict MasqVerdict // UNDECIDED: no counter knows it
	}{
		{"ARP", func(f []byte) []byte { f[12], f[13] = 0x08, 0x06; return f }, 0},
		{"VLAN tag in the frame", func(f []byte) []byte { return slices.Insert(f, 12, 0x81, 0, 0, 100) }, 0},
		{"MPLS label pushed", func(f []byte) []byte { f[12], f[13] = 0x88, 0x47; return f }, 0},
		{"IPv4 that says it is version 5", func(f []byte) []byte { f[14] = 0x55; return f }, notIP},
		{"IPv4 with a header of 16 octets", func(f []byte) []byte { f[14] = 0x44; return f }, notIP},
		{"IPv6 that says it is version 4", func(f []byte) []byte { f[12], f[13] = 0x86, 0xdd; return f }, notIP},
	}
	for _, tt := range tests {
		for direction, name := range []string{"egress", "ingress"} {
			t.Run(tt.name+"/"+name, func(t *testing.T) {
				d.forget(t, config{})
				in := tt.change(slices.Clone(frame))
				got := d.run(MasqDirection(direction), in)
				if got.verdict != tt.verdict || !slices.Equal(got.frame, in) {
					t.Errorf("got %s and %x, want %s and %x",
						verdictName(got.verdict), got.frame, verdictName(tt.verdict), in)
				}
				if len(d.flows())+len(d.inbounds()) > 0 {
					t.Error("a frame that is not ours was noted")
				}
			})
		}
	}
}

// Trap 33: a VLAN that keeps its tag has it in the frames that arrive, and in those
// that leave where the device below does not put it there.
func TestTagsInFrames(t *testing.T) {
	rows := []row{
		{name: "only where frames arrive", trap: 33, config: config{tagged: true}, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53)
			q := p.from(h.node, 40000)
			in, out := q.reply(), p.reply()
			in.tag, out.tag = 0x8100, 0x8100
			return []step{leaves(p, opened, q), arrives(in, translated, out), leaves(p, translated, q)}
		}},
		{name: "of a child with another MAC", trap: 33, config: config{tagged: true}, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53)
			p.tag, p.mac = 0x8100, routerMAC
			return []step{leaves(p, MasqVerdictVERDICT_FOREIGN)}
		}},
	}
	for _, tag := range []uint16{0x8100, 0x88a8} {
		for kind, make := range map[string]func(h hosts) packet{
			"TCP": func(h hosts) packet { return tcp(h.pod, 40000, h.remote, 80, "S") }, "UDP": func(h hosts) packet { return udp(h.pod, 40000, h.remote, 53) },
			"echo": func(h hosts) packet { return h.ping(h.pod, h.remote, 7) }, "ESP": func(h hosts) packet { return raw(h.pod, h.remote, protoESP) },
		} {
			r := bothWays(fmt.Sprintf("%s behind %#x", kind, tag), 33, func(h hosts) packet {
				p := make(h)
				p.tag = tag
				return p
			})
			r.config.tagged = true
			rows = append(rows, r)
		}
	}
	runTable(t, rows)
	frame := udp(v4.pod, 40000, v4.remote, 53).frame()
	for _, d := range []MasqDirection{egress, ingress} {
		b := borrow(t, config{tagged: true})
		if got := b.run(d, slices.Insert(frame, 12, 0x81, 0, 0, 100, 0x81, 0, 0, 101)); got.verdict != 0 {
			t.Errorf("another tag behind it: got %s", verdictName(got.verdict))
		}
	}
}

// The kernel lets no frame run that ends in its IP header, unless the header
// is farther back than it thinks.
func TestFrameEndsInItsIPHeader(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		frame := udp(h.pod, 40000, h.remote, 53).frame()
		for direction := range MasqDirectionDIRECTION_COUNT {
			for missing := range len(frame) - ethernetLength {
				value := MasqUplink{Ifindex: loopbackIndex, L2Len: uint8(ethernetLength + missing + 9)}
				d.put(d.Uplinks, uint32(0), &value)
				if got := d.run(direction, frame); got.verdict != notIP {
					t.Fatalf("%v, direction %d, header at %d: got %s", h, direction, value.L2Len, verdictName(got.verdict))
				}
			}
		}
	}
}

func TestIPv6IsLeftAloneWhenOff(t *testing.T) {
	d := borrow(t, config{noIPv6: true})
	p := udp(v6.pod, 40000, v6.remote, 53)
	for direction := range MasqDirectionDIRECTION_COUNT {
		if got := d.run(direction, p.frame()); got.verdict != 0 || !slices.Equal(got.frame, p.frame()) {
			t.Errorf("direction %d: got %s", direction, verdictName(got.verdict))
		}
	}
}

func TestDestinationDecides(t *testing.T) {
	runTable(t, []row{
		single("kept in the CIDR", 0, func(h hosts) step { return leaves(tcp(h.pod, 40000, h.near, 80, "S"), keepCIDR) }),
		single("kept in the CIDR, whatever it is", 4, func(h hosts) step {
			return leaves(tcp(h.pod, 40000, h.near, 80, "R"), keepCIDR)
		}),
		single("kept in the CIDR from a secondary address", 40, func(h hosts) step {
			return leaves(udp(h.secondary, 40000, h.near, 53), keepCIDR)
		}),
		{name: "opened by an exception in the CIDR, kept beside and inside", steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.near, 53)
			return []step{
				do(func(d *datapath) {
					d.cidr(netip.PrefixFrom(h.near, h.near.BitLen()-8), MasqCidrVerdictCIDR_MASQUERADE)
					d.cidr(host(h.near.Next()), MasqCidrVerdictCIDR_KEEP)
				}),
				leaves(p, opened, p.from(h.node, 40000)),
				leaves(p.to(h.near.Next(), 53), keepCIDR),
				leaves(p.to(h.podB, 53), keepCIDR),
			}
		}},
		{name: "translated as before when a CIDR comes to hold the destination", trap: 1, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53)
			return []step{
				leaves(p, opened, p.from(h.node, 40000)),
				do(func(d *datapath) { d.exempt(host(h.remote)) }),
				leaves(p, translated, p.from(h.node, 40000)),
				arrives(p.from(h.node, 40000).reply(), translated, p.reply()),
				leaves(udp(h.pod, 40001, h.remote, 53), keepCIDR),
			}
		}},
		{name: "kept while the CIDR drains, if it cannot be the first", trap: 1, steps: func(h hosts) []step {
			ack := tcp(h.pod, 40000, h.remote, 80, "A")
			syn := tcp(h.pod, 40001, h.remote, 80, "S")
			datagram := udp(h.pod, 40000, h.remote, 53)
			return []step{
				do(func(d *datapath) { d.draining(host(h.remote), 60) }),
				leaves(ack, keepDraining),
				leaves(ack.withFlags("FA"), keepDraining),
				leaves(ack.withFlags("R"), keepDraining),
				leaves(syn, opened, syn.from(h.node, 40001)),
				leaves(syn.withFlags("A"), translated, syn.withFlags("A").from(h.node, 40001)),
				leaves(datagram, opened, datagram.from(h.node, 40000)),
			}
		}},
		{name: "opened when the CIDR has drained", trap: 1, steps: func(h hosts) []step {
			ack := tcp(h.pod, 40000, h.remote, 80, "A")
			return []step{
				do(func(d *datapath) { d.draining(host(h.remote), -1) }),
				leaves(ack, opened, ack.from(h.node, 40000)),
			}
		}},
	})
}

func TestUplinkDecides(t *testing.T) {
	foreignMAC := [6]uint8{2, 0, 0, 0, 0, 0x77}
	runTable(t, []row{
		single("kept with a foreign source MAC", 35, func(h hosts) step {
			p := udp(h.pod, 40000, h.remote, 53)
			p.mac = foreignMAC
			return leaves(p, foreign)
		}),
		single("noted with any source MAC on the way in", 35, func(h hosts) step {
			p := tcp(h.remote, 40000, h.pod, 80, "S")
			p.mac = foreignMAC
			return arrives(p, inbound)
		}),
		single("dropped without a usable address", 44, func(h hosts) step {
			return leaves(udp(h.pod, 40000, h.remote, 53), noAddress)
		}).with(config{noAddress: true}),
		single("kept in the CIDR without a usable address", 0, func(h hosts) step {
			return leaves(udp(h.pod, 40000, h.near, 53), keepCIDR)
		}).with(config{noAddress: true}),
	})
}

// Each uplink's programs know their own slot.
func TestSlotOfTheUplink(t *testing.T) {
	c := config{slot: 3}
	d := borrow(t, c)
	d.put(d.Uplinks, uint32(0), &MasqUplink{AddrV4: be32(v4.secondary), Flags: uint8(MasqUplinkFlagUPLINK_ONE_V4)})
	for _, h := range families {
		p := udp(h.pod, 40000, h.remote, 53)
		d.take("packet", leaves(p, opened, p.from(h.node, 40000)))
	}
}

// The device may have got another MAC a moment ago: where the kernel lets us,
// what it has now counts as well as what the agent wrote.
func TestMACThatTheDeviceHasNow(t *testing.T) {
	link := device(t)
	for _, ctinfo := range []bool{false, true} {
		c := config{ctinfo: ctinfo}
		d := borrow(t, c)
		d.ifindex = uint32(link.Attrs().Index)
		d.uplink(0, c)
		for _, h := range families {
			p := udp(h.pod, 40000, h.remote, 53)
			d.take("the agent's", leaves(p, opened, p.from(h.node, 40000)))
			p.mac = [6]uint8(link.Attrs().HardwareAddr)
			s := leaves(p, foreign)
			if ctinfo {
				s = leaves(p, translated, p.from(h.node, 40000))
			}
			d.take("the device's", s)
			p.mac = [6]uint8{2, 0, 0, 0, 0, 0x77}
			d.take("a child's", leaves(p, foreign))
		}
	}
}

// The kernel tells a frame's protocol by octets 12 and 13, so where it begins
// with the IP header these have to be in the source address.
func TestNoEthernetHeader(t *testing.T) {
	of4, of6 := v4, v6
	of4.pod, of4.remote = addr("8.0.0.2"), addr("8.0.8.8")
	of6.pod, of6.remote = addr("fdff:1:86dd::2"), addr("2001:db8:86dd::8")
	var rows []row
	for _, h := range []hosts{of4, of6} {
		for _, p := range []packet{
			udp(h.pod, 40000, h.remote, 53), tcp(h.pod, 40000, h.remote, 53, "S"), h.ping(h.pod, h.remote, 40000),
		} {
			p.noHeader = true
			rows = append(rows, row{
				name: "translated both ways: " + p.proto.String(), trap: 32, only: &h, config: config{noHeader: true},
				steps: func(hosts) []step {
					q := p.from(h.node, 40000)
					return []step{leaves(p, opened, q), arrives(q.reply(), translated, p.reply())}
				},
			})
		}
	}
	runTable(t, rows)
}

func TestPacketsThatCannotOpenAFlow(t *testing.T) {
	var strays []func(h hosts, src netip.Addr) packet
	for _, flags := range []string{"R", "RA", "F", "FA", "SA", "", "FPU", "SF", "SR", "P", "SRA"} {
		strays = append(strays, func(h hosts, src netip.Addr) packet { return tcp(src, 40000, h.remote, 80, flags) })
	}
	for _, kind := range []uint8{9, 10, 40, 138, 141, 142, 200} {
		strays = append(strays, func(h hosts, src netip.Addr) packet { return h.icmp(src, h.remote, kind, 7) })
	}
	strays = append(strays,
		func(h hosts, src netip.Addr) packet { return h.pong(src, h.remote, 7) },
		func(h hosts, src netip.Addr) packet {
			return h.icmpError(src, h.remote, h.unreachable, 3, udp(h.remote, 53, src, 40000), -1)
		},
		func(h hosts, src netip.Addr) packet {
			return h.icmpError(src, h.remote, 5, 1, udp(h.remote, 53, src, 40000), -1) // redirect in IPv4
		},
		func(h hosts, src netip.Addr) packet { // cut short: an error about too little
			return h.icmp(src, h.remote, h.exceeded, 0)
		})
	var rows []row
	for i, stray := range strays {
		name := func(what string) string { return fmt.Sprintf("%s, stray %d", what, i) }
		rows = append(rows,
			single(name("dropped"), 4, func(h hosts) step { return leaves(stray(h, h.pod), dropInvalid) }),
			single(name("left alone on demand"), 4, func(h hosts) step {
				return leaves(stray(h, h.pod), passInvalid)
			}).with(config{passInvalid: true}),
			single(name("kept of the node"), 4, func(h hosts) step { return leaves(stray(h, h.node), keepNode) }),
			single(name("kept of a secondary address"), 4, func(h hosts) step {
				return leaves(stray(h, h.secondary), keepNode)
			}),
			single(name("kept in the CIDR"), 4, func(h hosts) step {
				p := stray(h, h.pod)
				p.dst = h.near
				return leaves(p, keepCIDR)
			}))
	}
	for _, flags := range []string{"S", "SEC", "SU", "SP", "A", "AP", "AU", "AE"} {
		rows = append(rows, single("opened with flags "+flags, 4, func(h hosts) step {
			p := tcp(h.pod, 40000, h.remote, 80, flags)
			return leaves(p, opened, p.from(h.node, 40000))
		}))
		strict := config{strictTCP: true}
		rows = append(rows, single("with nf_conntrack_tcp_loose off, flags "+flags, 4, func(h hosts) step {
			p := tcp(h.pod, 40000, h.remote, 80, flags)
			if flags[0] == 'A' {
				return leaves(p, dropInvalid)
			}
			return leaves(p, opened, p.from(h.node, 40000))
		}).with(strict))
	}
	runTable(t, rows)
}

func TestRouterMessagesOfIPv4AreNoQueries(t *testing.T) {
	runTable(t, []row{single("router solicitation dropped", 20, func(h hosts) step {
		return leaves(h.icmp(h.pod, h.remote, uint8(layers.ICMPv4TypeRouterSolicitation), 0), dropInvalid)
	}).in(v4)})
}
