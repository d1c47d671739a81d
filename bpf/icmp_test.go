// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"
)

// quotable are the kinds of packets that errors are about.
func quotable(h hosts) map[string]packet {
	unsummed := udp(h.pod, 40000, h.remote, 54)
	unsummed.noChecksum = true
	return map[string]packet{
		"TCP":                  tcp(h.pod, 40000, h.remote, 80, "S").withBody([]byte("fast open")),
		"UDP":                  udp(h.pod, 40000, h.remote, 53),
		"UDP without checksum": unsummed,
		"echo":                 h.ping(h.pod, h.remote, 7),
		"SCTP":                 sctp(h.pod, 40000, h.remote, 3868),
	}
}

// changes are the ways in which the translation changes a packet: each opens
// a flow like that of p, and says what went in and came out.
var changes = map[string]func(d *datapath, h hosts, p packet) (inside, outside packet){
	"address": func(d *datapath, _ hosts, p packet) (packet, packet) { return p, d.open(p) },
	"port": func(d *datapath, _ hosts, p packet) (packet, packet) {
		own := d.open(p)
		return own, d.open(own)
	},
	"address and port": func(d *datapath, h hosts, p packet) (packet, packet) {
		d.open(p)
		second := p
		second.src = h.podB
		return second, d.open(second)
	},
}

// Traps 17 and 68: every sum over what a translation changes, in the packets and
// where errors quote them, whole or cut after 8 octets, from either side. ICMPv6's
// is over addresses and identifiers both.
func TestChecksumsOfPacketsAndQuotes(t *testing.T) {
	for _, way := range ways {
		c := config{ctinfo: way.inPlace}
		for _, h := range families {
			for kind, p := range quotable(h) {
				for change, open := range changes {
					if kind == "SCTP" && change != "address" {
						continue // its port never changes
					}
					t.Run(fmt.Sprintf("%v/%s/%s/%s", h, kind, change, way.name), func(t *testing.T) {
						d := borrow(t, c)
						d.summed = way.summed
						inside, outside := open(d, h, p)
						d.checkSums(h, inside, outside)
					})
				}
			}
		}
	}
}

// checkSums takes what answers a flow's packet, and errors about both.
func (d *datapath) checkSums(h hosts, inside, outside packet) {
	d.Helper()
	d.take("plain reply", arrives(outside.reply(), translated, inside.reply()))
	for _, quote := range []int{8, 16, 17, 18, 19, 20, -1} {
		in := h.icmpError(h.router, outside.src, h.exceeded, 0, outside, quote)
		out := h.icmpError(h.router, inside.src, h.exceeded, 0, inside, quote)
		d.take(fmt.Sprintf("error from outside, quote of %d", quote), arrives(in, icmpError, halved(in, out, quote)))
		in = h.icmpError(inside.src, h.remote, h.unreachable, 3, inside.reply(), quote)
		out = h.icmpError(outside.src, h.remote, h.unreachable, 3, outside.reply(), quote)
		d.take(fmt.Sprintf("error from inside, quote of %d", quote), leaves(in, icmpError, halved(in, out, quote)))
	}
}

// Checksums are changed by what changes under them, so what was damaged on its
// way does not become right: who gets it still sees that.
func TestWrongChecksumsStayWrong(t *testing.T) {
	var rows []row
	for name, damage := range map[string]func(p *packet){
		"the packet's": func(p *packet) { p.wrong = true },
		"its header's": func(p *packet) { p.wrongHeader = true },
	} {
		for kind, make := range map[string]func(h hosts) packet{
			"TCP": func(h hosts) packet { return tcp(h.pod, 40000, h.remote, 80, "S").withBody([]byte("fast open")) },
			"UDP": func(h hosts) packet { return udp(h.pod, 40000, h.remote, 53) },
		} {
			rows = append(rows, row{name: name + ", " + kind, trap: 17, config: config{ports: onlyPorts(50000, 50000)}, steps: func(h hosts) []step {
				p := make(h)
				if damage(&p); h.v6 {
					p.wrongHeader = false // IPv6 has none
				}
				outside := p.from(h.node, 50000)
				in, out := h.icmpError(h.router, h.node, h.exceeded, 0, outside, -1), h.icmpError(h.router, h.pod, h.exceeded, 0, p, -1)
				steps := []step{leaves(p, opened, outside), arrives(outside.reply(), translated, p.reply()), arrives(in, icmpError, out)}
				in, out = h.icmpError(h.pod, h.remote, h.unreachable, 3, p.reply(), -1), h.icmpError(h.node, h.remote, h.unreachable, 3, outside.reply(), -1)
				return append(steps, leaves(in, icmpError, out))
			}})
		}
	}
	rows = append(rows, row{name: "an error's", trap: 17, steps: func(h hosts) []step {
		p := udp(h.pod, 40000, h.remote, 53)
		outside := p.from(h.node, 40000)
		in, out := h.icmpError(h.router, h.node, h.exceeded, 0, outside, -1), h.icmpError(h.router, h.pod, h.exceeded, 0, p, -1)
		in.wrong, out.wrong = true, true
		return []step{leaves(p, opened, outside), arrives(in, icmpError, out)}
	}})
	runTable(t, rows)
}

// halved is out, but for half a checksum at the end of its quote: that stays as
// it was in the error that came in.
func halved(in, out packet, quote int) packet {
	at := len(out.body) - 1
	protocol := layers.IPProtocol(out.body[9])
	if out.src.Is6() {
		protocol = layers.IPProtocol(out.body[6])
	}
	if protocol == layers.IPProtocolTCP && quote == 17 || protocol == layers.IPProtocolUDP && quote == 7 {
		out.body[at] = in.body[at]
	}
	return out
}

// Trap 16: a quote of any length is translated as far as it goes, or left
// alone when it does not tell the flow.
func TestQuotesOfEveryLength(t *testing.T) {
	d := borrow(t, config{})
	enough := map[string]int{"TCP": 4, "UDP": 4, "UDP without checksum": 4, "echo": 8, "SCTP": 4}
	for _, h := range families {
		for kind, p := range quotable(h) {
			t.Run(h.String()+"/"+kind, func(t *testing.T) {
				d.forget(t, config{})
				outside := d.open(p)
				p.noHeader = true
				for quote := range len(p.frame()) - p.headerLength() {
					in := h.icmpError(h.router, h.node, h.exceeded, 0, outside, quote)
					s := arrives(in, icmpError, halved(in, h.icmpError(h.router, h.pod, h.exceeded, 0, p, quote), quote))
					if quote < enough[kind] {
						s = arrives(in, noFlow)
					}
					d.take(fmt.Sprintf("quote of %d", quote), s)
				}
				whole := h.icmpError(h.router, h.node, h.exceeded, 0, outside, 0)
				for length := range len(whole.body) {
					d.take(fmt.Sprintf("header of %d", length), arrives(whole.withBody(whole.body[:length]), noFlow))
				}
			})
		}
	}
}

func TestKindsOfErrors(t *testing.T) {
	kinds := map[bool][][2]uint8{
		false: {{3, 0}, {3, 1}, {3, 3}, {3, 4}, {3, 13}, {4, 0}, {11, 0}, {11, 1}, {12, 0}},
		true:  {{1, 0}, {1, 3}, {1, 4}, {2, 0}, {3, 0}, {3, 1}, {4, 0}, {4, 1}},
	}
	d := borrow(t, config{})
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d.forget(t, config{})
			p := tcp(h.pod, 40000, h.remote, 80, "A")
			outside := d.open(p)
			for _, kind := range kinds[h.v6] {
				about := func(from, to packet, q packet) (packet, packet) {
					a := h.icmpError(from.src, from.dst, kind[0], kind[1], q, 28)
					b := h.icmpError(to.src, to.dst, kind[0], kind[1], q, 28)
					a.mtu, b.mtu = 1400, 1400
					return a, b
				}
				in, out := about(packet{src: h.router, dst: h.node}, packet{src: h.router, dst: h.pod}, outside)
				out.body = h.icmpError(h.router, h.pod, kind[0], kind[1], p, 28).body
				d.take(fmt.Sprintf("type %v from outside", kind), arrives(in, icmpError, out))
				in, out = about(packet{src: h.pod, dst: h.remote}, packet{src: h.node, dst: h.remote}, p.reply())
				out.body = h.icmpError(h.node, h.remote, kind[0], kind[1], outside.reply(), 28).body
				d.take(fmt.Sprintf("type %v from the pod", kind), leaves(in, icmpError, out))
			}
		})
	}
}

func TestErrorsAndFlows(t *testing.T) {
	runTable(t, []row{
		{name: "one that the node emits about a translated reply", trap: 15, steps: func(h hosts) []step {
			p := tcp(h.pod, 40000, h.remote, 80, "A")
			outside := p.from(h.node, 40000)
			return []step{
				leaves(p, opened, outside),
				leaves(h.icmpError(h.node, h.remote, h.exceeded, 0, p.reply(), 8), icmpError,
					h.icmpError(h.node, h.remote, h.exceeded, 0, outside.reply(), 8)),
				leaves(h.icmpError(h.secondary, h.remote, h.exceeded, 0, p.reply(), 8), icmpError,
					h.icmpError(h.node, h.remote, h.exceeded, 0, outside.reply(), 8)),
			}
		}},
		{name: "translated towards a CIDR that came to hold the destination", trap: 19, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53)
			outside := p.from(h.node, 40000)
			return []step{
				leaves(p, opened, outside),
				do(func(d *datapath) { d.exempt(host(h.remote)) }),
				leaves(h.icmpError(h.pod, h.remote, h.unreachable, 3, p.reply(), 8), icmpError,
					h.icmpError(h.node, h.remote, h.unreachable, 3, outside.reply(), 8)),
			}
		}},
		{name: "dropped when it redirects a translated flow", trap: 15, only: &v4, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53)
			outside := p.from(h.node, 40000)
			return []step{
				leaves(p, opened, outside),
				arrives(h.icmpError(h.router, h.node, 5, 1, outside, 8), unsupported),
				arrives(h.icmpError(h.router, h.node, 5, 1, udp(h.node, 40001, h.remote, 53), 8), noFlow),
			}
		}},
		{name: "left alone about a later fragment", trap: 18, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53).withBody(large(1600))
			outside, reply := p.from(h.node, 40000), p.reply().withBody(large(1602)[2:])
			later := fragment{id: 9, offset: 185 * 8} // begins as the flow's header does
			return []step{
				leaves(p, opened, outside),
				arrives(h.icmpError(h.router, h.node, h.exceeded, 1, outside.withFrag(later), -1), noFlow),
				leaves(h.icmpError(h.pod, h.remote, h.exceeded, 1, reply.withFrag(later), -1), dropInvalid),
				leaves(h.icmpError(h.node, h.remote, h.exceeded, 1, reply.withFrag(later), -1), keepNode),
			}
		}},
		{name: "translated about a first fragment", trap: 18, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53).withBody(make([]byte, 400))
			outside := p.from(h.node, 40000)
			first := fragment{id: 9, length: 200}
			return []step{
				leaves(p, opened, outside),
				arrives(h.icmpError(h.router, h.node, h.exceeded, 1, outside.withFrag(first), -1), icmpError,
					h.icmpError(h.router, h.pod, h.exceeded, 1, p.withFrag(first), -1)),
			}
		}},
		{name: "left alone about an error", trap: 16, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53)
			outside := p.from(h.node, 40000)
			inner := h.icmpError(h.node, h.remote, h.exceeded, 0, outside, 8)
			return []step{
				leaves(p, opened, outside),
				arrives(h.icmpError(h.router, h.node, h.unreachable, 1, inner, -1), noFlow),
			}
		}},
		{name: "kept about a connection from outside", trap: 19, steps: func(h hosts) []step {
			p := udp(h.remote, 50000, h.pod, 53)
			return []step{
				leaves(h.icmpError(h.pod, h.remote, h.unreachable, 3, p, 8), dropInvalid),
				arrives(p, inbound),
				leaves(h.icmpError(h.pod, h.remote, h.unreachable, 3, p, 8), keepReply),
				leaves(h.icmpError(h.podB, h.remote, h.unreachable, 3, p.to(h.podB, 53), 8), dropInvalid),
			}
		}},
		{name: "kept about a ping from outside that mirrors one of the pod's", trap: 20, steps: func(h hosts) []step {
			id := uint16(h.echo) // makes the tuple its own mirror
			p, q := h.ping(h.pod, h.remote, id), h.ping(h.remote, h.pod, id)
			return []step{
				leaves(p, opened, p.from(h.node, id)),
				arrives(q, inbound),
				leaves(h.icmpError(h.pod, h.remote, h.exceeded, 1, q, -1), keepReply),
				arrives(h.icmpError(h.router, h.node, h.exceeded, 0, h.pong(h.node, h.remote, id), -1), noFlow),
			}
		}},
		{name: "kept about a connection to a secondary address", trap: 19, steps: func(h hosts) []step {
			p := tcp(h.remote, 50000, h.secondary, 80, "S")
			return []step{
				arrives(p, inbound),
				leaves(h.icmpError(h.secondary, h.remote, h.unreachable, 3, p, 8), keepReply),
			}
		}},
		{name: "of nobody when the flow is dead", trap: 49, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53)
			outside := p.from(h.node, 40000)
			return []step{
				leaves(p, opened, outside),
				do(func(d *datapath) { d.age(p, 32*time.Second) }),
				arrives(h.icmpError(h.router, h.node, h.exceeded, 0, outside, 8), noFlow),
				leaves(h.icmpError(h.pod, h.remote, h.unreachable, 3, p.reply(), 8), dropInvalid),
			}
		}},
	})
}

func TestQuoteWithHeadersInBetween(t *testing.T) {
	runTable(t, []row{
		{name: "IPv4 options", trap: 30, only: &v4, steps: func(h hosts) []step {
			p := tcp(h.pod, 40000, h.remote, 80, "S")
			p.options = []byte{7, 11, 4, 0, 0, 0, 0, 0, 0, 0, 0, 1}
			return quoteBothWays(h, p)
		}},
		{name: "IPv6 extension headers", trap: 30, only: &v6, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53)
			p.extensions = []extension{{layers.IPProtocolIPv6Destination, []byte{0, 1, 4, 0, 0, 0, 0}}}
			return quoteBothWays(h, p)
		}},
		{name: "ESP", trap: 45, steps: func(h hosts) []step { return quoteBothWays(h, raw(h.pod, h.remote, protoESP)) }},
		{name: "something behind the quote", trap: 17, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53) // RFC 4884: padded, then extensions
			steps := quoteBothWays(h, p)
			for i := range steps {
				behind := append(make([]byte, 60), 0x20, 0, 0xdf, 0xff, 0, 8, 1, 1, 0, 1, 1, 1)
				if steps[i].in.icmpType != 0 {
					steps[i].in.body = slices.Concat(steps[i].in.body, behind)
					steps[i].out.body = slices.Concat(steps[i].out.body, behind)
				}
			}
			return steps
		}},
	})
}

// quoteBothWays opens a flow and lets errors about it come from both sides.
func quoteBothWays(h hosts, p packet) []step {
	outside := p.from(h.node, p.sport)
	return []step{
		leaves(p, opened, outside),
		arrives(h.icmpError(h.router, h.node, h.exceeded, 0, outside, -1), icmpError,
			h.icmpError(h.router, h.pod, h.exceeded, 0, p, -1)),
		leaves(h.icmpError(h.pod, h.remote, h.exceeded, 1, p.reply(), -1), icmpError,
			h.icmpError(h.node, h.remote, h.exceeded, 1, outside.reply(), -1)),
	}
}

// c6: an error neither refreshes a flow nor ends it, nor counts as a reply.
func TestErrorsLeaveTheFlowAsItIs(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		p := tcp(h.pod, 40000, h.remote, 80, "S")
		outside := d.open(p)
		d.age(p, 90*time.Second)
		before := d.flow(p)
		d.take("from outside", arrives(h.icmpError(h.router, h.node, h.unreachable, 1, outside, 8), icmpError,
			h.icmpError(h.router, h.pod, h.unreachable, 1, p, 8)))
		d.take("from the pod", leaves(h.icmpError(h.pod, h.remote, h.unreachable, 3, p.reply(), 8), icmpError,
			h.icmpError(h.node, h.remote, h.unreachable, 3, outside.reply(), 8)))
		if after := d.flow(p); after != before {
			t.Errorf("%v: flow was %+v, is %+v", h, before, after)
		}
	}
}

// Trap 25, in a quote: the checksum that comes out as 0 is written 0xffff.
func TestQuotedUDPChecksumThatComesOutAsZero(t *testing.T) {
	runTable(t, []row{{name: "from outside", trap: 25, steps: func(h hosts) []step {
		p := udp(h.pod, 40000, h.remote, 53).withBody([]byte{0, 0})
		copy(p.body, p.transport()[6:8])
		if sum := p.transport()[6:8]; sum[0]&sum[1] != 0xff {
			t.Fatalf("checksum %x was not made 0", sum)
		}
		return quoteBothWays(h, p)
	}}})
}
