// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/gopacket/gopacket/layers"
)

// There and back: a row for each kind of packet that has to survive it whole.
func bothWays(name string, trap int, make func(h hosts) packet) row {
	return row{name: name, trap: trap, steps: func(h hosts) []step {
		p := make(h)
		port := p.sport
		if p.isICMP() {
			port = p.icmpID
		}
		q := p.from(h.node, port)
		return []step{
			leaves(p, opened, q),
			leaves(p, translated, q),
			arrives(q.reply(), translated, p.reply()),
			leaves(p, translated, q),
		}
	}}
}

func TestTranslatedBothWays(t *testing.T) {
	runTable(t, []row{
		bothWays("TCP", 0, func(h hosts) packet { return tcp(h.pod, 40000, h.remote, 80, "S") }),
		bothWays("TCP with data", 0, func(h hosts) packet {
			return tcp(h.pod, 40000, h.remote, 80, "AP").withBody([]byte("odd"))
		}),
		bothWays("TCP in segments longer than a header can say", 28, func(h hosts) packet {
			p := tcp(h.pod, 40000, h.remote, 80, "A").withBody([]byte("64 KiB or more"))
			p.unmeasured = true // BIG TCP
			return p
		}),
		bothWays("TCP from a privileged port", 12, func(h hosts) packet { return tcp(h.pod, 600, h.remote, 80, "S") }),
		bothWays("TCP from a low port", 12, func(h hosts) packet { return tcp(h.pod, 100, h.remote, 80, "S") }),
		bothWays("UDP", 0, func(h hosts) packet { return udp(h.pod, 40000, h.remote, 53) }),
		bothWays("UDP from the last port", 11, func(h hosts) packet { return udp(h.pod, 65535, h.remote, 65535) }),
		bothWays("UDP to port 0", 0, func(h hosts) packet { return udp(h.pod, 40000, h.remote, 0) }),
		bothWays("UDP without data", 0, func(h hosts) packet { return udp(h.pod, 40000, h.remote, 53).withBody(nil) }),
		bothWays("UDP without checksum", 25, func(h hosts) packet {
			p := udp(h.pod, 40000, h.remote, 53)
			p.noChecksum = true
			return p
		}),
		bothWays("SCTP", 46, func(h hosts) packet { return sctp(h.pod, 40000, h.remote, 3868) }),
		bothWays("echo", 20, func(h hosts) packet { return h.ping(h.pod, h.remote, 7) }),
		bothWays("echo with identifier 0", 20, func(h hosts) packet { return h.ping(h.pod, h.remote, 0) }),
		bothWays("echo with identifier 65535", 20, func(h hosts) packet { return h.ping(h.pod, h.remote, 65535) }),
		bothWays("ESP", 45, func(h hosts) packet { return raw(h.pod, h.remote, protoESP) }),
		bothWays("AH", 30, func(h hosts) packet { return raw(h.pod, h.remote, protoAH) }),
		bothWays("GRE", 45, func(h hosts) packet { return raw(h.pod, h.remote, protoGRE) }),
		bothWays("protocol 253", 45, func(h hosts) packet { return raw(h.pod, h.remote, protoTest) }),
		bothWays("protocol 253 without data", 45, func(h hosts) packet {
			return raw(h.pod, h.remote, protoTest).withBody(nil)
		}),
		bothWays("the other family's ICMP", 45, func(h hosts) packet {
			other := map[bool]layers.IPProtocol{false: layers.IPProtocolICMPv6, true: layers.IPProtocolICMPv4}
			return raw(h.pod, h.remote, other[h.v6])
		}),
		bothWays("NOP options", 30, func(h hosts) packet {
			p := tcp(h.pod, 40000, h.remote, 80, "S")
			p.options = []byte{1, 1, 1, 1}
			return p
		}).in(v4),
		bothWays("record route option", 30, func(h hosts) packet {
			p := udp(h.pod, 40000, h.remote, 53)
			p.options = []byte{7, 11, 4, 0, 0, 0, 0, 0, 0, 0, 0, 1}
			return p
		}).in(v4),
		bothWays("all the options that fit", 30, func(h hosts) packet {
			p := h.ping(h.pod, h.remote, 7)
			p.options = []byte{7, 39, 4, 39: 1}
			return p
		}).in(v4),
		bothWays("no next header", 30, func(h hosts) packet {
			return raw(h.pod, h.remote, layers.IPProtocolNoNextHeader)
		}).in(v6),
	})
}

func TestTranslatedBehindExtensionHeaders(t *testing.T) {
	padding := []byte{0, 1, 4, 0, 0, 0, 0}
	hop := extension{layers.IPProtocolIPv6HopByHop, padding}
	options := extension{layers.IPProtocolIPv6Destination, padding}
	long := extension{layers.IPProtocolIPv6Destination, append([]byte{2, 1, 20}, make([]byte, 20)...)}
	routing := extension{layers.IPProtocolIPv6Routing, []byte{0, 4, 0, 0, 0, 0, 0}} // no segment left
	atomic := extension{layers.IPProtocolIPv6Fragment, []byte{0, 0, 0, 0, 0, 0, 9}} // RFC 6946
	eight := []extension{options, options, options, options, options, options, options, options}
	var rows []row
	for i, headers := range [][]extension{
		{hop}, {options}, {routing}, {long}, {hop, routing, options}, {atomic}, {hop, atomic}, eight,
	} {
		for kind, p := range map[string]packet{
			"TCP": tcp(v6.pod, 40000, v6.remote, 80, "S"), "UDP": udp(v6.pod, 40000, v6.remote, 53),
			"echo": v6.ping(v6.pod, v6.remote, 7), "SCTP": sctp(v6.pod, 40000, v6.remote, 3868),
		} {
			p.extensions = headers
			rows = append(rows, bothWays(fmt.Sprintf("%s, chain %d", kind, i), 30, func(hosts) packet { return p }).in(v6))
		}
	}
	runTable(t, rows)
}

// More headers than are walked: nobody knows what is behind them.
func TestTooManyExtensionHeadersAreInvalid(t *testing.T) {
	runTable(t, []row{single("dropped", 30, func(h hosts) step {
		p := udp(h.pod, 40000, h.remote, 53)
		for range MasqLimitLIMIT_IPV6HEADERS + 1 {
			p.extensions = append(p.extensions, extension{layers.IPProtocolIPv6Destination, []byte{0, 1, 4, 0, 0, 0, 0}})
		}
		return leaves(p, dropInvalid)
	}).in(v6)})
}

// Trap 20: identifiers of different questions are different spaces.
func TestQueriesAreToldApartByType(t *testing.T) {
	queries := map[bool][]uint8{false: {8, 13, 15, 17}, true: {128, 139}}
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d := borrow(t, config{})
			for _, kind := range queries[h.v6] {
				p := h.icmp(h.pod, h.remote, kind, 7)
				q := p.from(h.node, 7)
				d.take(fmt.Sprintf("type %d", kind), leaves(p, opened, q))
				d.take(fmt.Sprintf("reply to type %d", kind), arrives(q.reply(), translated, p.reply()))
			}
			second := h.ping(h.podB, h.remote, 7)
			outside := d.open(second)
			if outside.icmpID == 7 {
				t.Error("two pods share an identifier")
			}
			d.take("reply to the second pod", arrives(outside.reply(), translated, second.reply()))
		})
	}
}

// Trap 25: the checksum that comes out as 0 is sent as 0xffff, in the packet
// and in its reply.
func TestUDPChecksumThatComesOutAsZero(t *testing.T) {
	zero := func(p packet) packet { // p with the body that makes its checksum 0
		p.body = []byte{0, 0}
		copy(p.body, p.transport()[6:8])
		return p
	}
	for name, pool := range map[string]*MasqPortPool{"address": nil, "address and port": onlyPorts(50000, 50000)} {
		port := uint16(40000)
		if pool != nil {
			port = 50000
		}
		c := config{ports: pool}
		runTable(t, []row{{name: name, trap: 25, config: c, steps: func(h hosts) []step {
			q := zero(udp(h.node, port, h.remote, 53))
			p := q.from(h.pod, 40000)
			back := zero(p.reply())
			if sum := binary.BigEndian.Uint16(q.frame()[len(q.frame())-4:]); sum != 0xffff {
				t.Fatalf("checksum %#x was not made 0", sum)
			}
			return []step{
				leaves(p, opened, q),
				arrives(back.to(h.node, port), translated, back),
			}
		}}})
	}
}

// Trap 45 and 46: flows that cannot be told apart by a port.
func TestSecondPodWithoutAPortToChange(t *testing.T) {
	var rows []row
	for name, make := range map[string]func(h hosts) packet{
		"ESP":          func(h hosts) packet { return raw(h.pod, h.remote, protoESP) },
		"GRE":          func(h hosts) packet { return raw(h.pod, h.remote, protoGRE) },
		"protocol 253": func(h hosts) packet { return raw(h.pod, h.remote, protoTest) },
		"SCTP":         func(h hosts) packet { return sctp(h.pod, 40000, h.remote, 3868) },
	} {
		for _, randomFully := range []bool{false, true} {
			rows = append(rows, row{
				name: fmt.Sprintf("dropped, the first goes on: %s, random %v", name, randomFully),
				trap: 45, config: config{randomFully: randomFully},
				steps: func(h hosts) []step {
					p := make(h)
					q, second := p.from(h.node, p.sport), p.from(h.podB, p.sport)
					elsewhere := second.to(h.remoteB, p.dport)
					return []step{
						leaves(p, opened, q),
						leaves(second, unsupported),
						leaves(p, translated, q),
						arrives(q.reply(), translated, p.reply()),
						leaves(elsewhere, opened, elsewhere.from(h.node, p.sport)),
					}
				},
			})
		}
	}
	runTable(t, rows)
}
