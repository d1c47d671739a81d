// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/gopacket/gopacket/layers"
)

// pieces cuts a packet into fragments of at most size octets.
func pieces(p packet, id uint32, size int) []packet {
	whole, _ := chain(p.transport(), p.proto, p.behind)
	var all []packet
	for offset := 0; offset < len(whole); offset += size {
		f := fragment{id: id, offset: offset, length: size}
		if offset+size >= len(whole) {
			f.length = 0
		}
		all = append(all, p.withFrag(f))
	}
	return all
}

// large is a body the octets of which look like ports everywhere.
func large(size int) []byte {
	body := make([]byte, size)
	for i := range body {
		body[i] = []byte{0x9c, 0x40, 0, 53}[i%4]
	}
	return body
}

// Trap 21: later fragments get what the first one got, and their payload is
// nobody's port.
func TestFragmentsInOrder(t *testing.T) {
	size := 3000
	var rows []row
	for name, make := range map[string]func(h hosts) packet{
		"UDP":  func(h hosts) packet { return udp(h.pod, 40000, h.remote, 53).withBody(large(size)) },
		"echo": func(h hosts) packet { return h.ping(h.pod, h.remote, 7).withBody(large(size)) },
		"TCP":  func(h hosts) packet { return tcp(h.pod, 40000, h.remote, 80, "A").withBody(large(size)) },
		"SCTP": func(h hosts) packet {
			return sctp(h.pod, 40000, h.remote, 80).withBody(append(chunk(4, size)[:4], large(size-4)...))
		},
		"ESP": func(h hosts) packet { return raw(h.pod, h.remote, protoESP).withBody(large(size)) },
	} {
		rows = append(rows, row{name: "translated both ways: " + name, trap: 21, steps: func(h hosts) []step {
			p := make(h)
			port := max(p.sport, p.icmpID)
			q := p.from(h.node, port)
			var steps []step
			for round := range uint32(2) {
				outside := pieces(q, 100+round, 1000)
				for i, piece := range pieces(p, 100+round, 1000) {
					verdict := translated
					if i == 0 && round == 0 {
						verdict = opened
					}
					steps = append(steps, leaves(piece, verdict, outside[i]))
				}
				back := pieces(p.reply(), 200+round, 1000)
				for i, piece := range pieces(q.reply(), 200+round, 1000) {
					steps = append(steps, arrives(piece, translated, back[i]))
				}
			}
			return steps
		}})
	}
	rows = append(rows,
		row{name: "of a connection from outside, kept", trap: 2, steps: func(h hosts) []step {
			p := h.ping(h.remote, h.pod, 7).withBody(large(size))
			var steps []step
			for _, piece := range pieces(p, 100, 1000) {
				steps = append(steps, arrives(piece, inbound))
			}
			for _, piece := range pieces(p.reply(), 100, 1000) {
				steps = append(steps, leaves(piece, keepReply))
			}
			return steps
		}},
		row{name: "of the node's own, kept", trap: 21, steps: func(h hosts) []step {
			var steps []step
			for _, piece := range pieces(udp(h.node, 40000, h.remote, 53).withBody(large(size)), 100, 1000) {
				steps = append(steps, leaves(piece, keepNode))
			}
			return steps
		}})
	runTable(t, rows)
}

// Trap 21: what is left for the last fragment may be less than two ports.
func TestLastFragmentsOfFewOctets(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		for kind, p := range map[string]packet{
			"UDP": udp(h.pod, 40000, h.remote, 53), "TCP": tcp(h.pod, 40000, h.remote, 80, "A"),
			"echo": h.ping(h.pod, h.remote, 40000), "UDP-Lite": summed(h.pod, h.remote, protoUDPLite),
		} {
			for last := 1; last <= 8; last++ {
				t.Run(fmt.Sprintf("%v/%s/%d", h, kind, last), func(t *testing.T) {
					d.forget(t, config{})
					p := p.withBody(slices.Concat(p.body, large(200)))
					p = p.withBody(p.body[:len(p.body)-(len(p.transport())-last)%64])
					in, out := pieces(p, 100, 64), pieces(p.from(h.node, 40000), 100, 64)
					if got := len(p.transport()) - in[len(in)-1].fragment.offset; got != last {
						t.Fatalf("%d octets in the last fragment", got)
					}
					for i := range in {
						verdict := translated
						if i == 0 {
							verdict = opened
						}
						d.take(fmt.Sprintf("fragment %d", i), leaves(in[i], verdict, out[i]))
					}
					in, out = pieces(p.from(h.node, 40000).reply(), 101, 64), pieces(p.reply(), 101, 64)
					for i := range in {
						d.take(fmt.Sprintf("fragment %d of the answer", i), arrives(in[i], translated, out[i]))
					}
				})
			}
		}
	}
}

// However many packets come in parts, memory is bounded, and who sends whole
// ones is not touched.
func TestFloodOfFragments(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d.forget(t, config{})
			p := udp(h.pod, 40000, h.remote, 53).withBody(large(200))
			outside := d.open(p)
			capacity := int(d.FragmentsV4.MaxEntries())
			for id := range uint32(4 * capacity) {
				first := p.reply()
				first.sport = 1 // of no flow
				if got := d.run(ingress, first.withFrag(fragment{id: id, length: 64}).frame()); got.verdict == translated {
					t.Fatalf("fragment %d was translated", id)
				}
			}
			entries := 0
			each(d, d.FragmentsV4, func(*MasqFragmentKeyV4, *MasqFragment) { entries++ })
			each(d, d.FragmentsV6, func(*MasqFragmentKeyV6, *MasqFragment) { entries++ })
			if entries == 0 || entries > capacity {
				t.Errorf("%d packets are remembered, capacity %d", entries, capacity)
			}
			d.take("whole packet", leaves(p, translated, outside))
			d.take("whole answer", arrives(outside.reply(), translated, p.reply()))
		})
	}
}

func TestFragmentsOfTwoPodsAreToldApart(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d.forget(t, config{})
			a := udp(h.pod, 40000, h.remote, 53).withBody(large(2000))
			b := a.from(h.podB, 40000)
			d.open(a)
			outside := d.open(b)
			// The same identifier, mixed.
			for i, piece := range pieces(a, 100, 1000) {
				d.take(fmt.Sprintf("first pod, piece %d", i), leaves(piece, translated, pieces(a.from(h.node, 40000), 100, 1000)[i]))
				d.take(fmt.Sprintf("second pod, piece %d", i),
					leaves(pieces(b, 100, 1000)[i], translated, pieces(outside, 100, 1000)[i]))
			}
		})
	}
}

func TestFragmentsThatComeAlone(t *testing.T) {
	later := fragment{id: 100, offset: 1000}
	runTable(t, []row{
		{name: "dropped of a pod, flow or not", trap: 21, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53).withBody(large(2000))
			return []step{
				leaves(p.withFrag(later), dropFragment),
				leaves(p, opened, p.from(h.node, 40000)),
				leaves(p.withFrag(later), dropFragment),
			}
		}},
		{name: "dropped on demand too", trap: 21, config: config{passInvalid: true}, steps: func(h hosts) []step {
			return []step{leaves(udp(h.pod, 40000, h.remote, 53).withBody(large(2000)).withFrag(later), dropFragment)}
		}},
		single("kept in the CIDR", 21, func(h hosts) step {
			return leaves(udp(h.pod, 40000, h.near, 53).withBody(large(2000)).withFrag(later), keepCIDR)
		}),
		single("kept of the node", 21, func(h hosts) step {
			return leaves(udp(h.node, 40000, h.remote, 53).withBody(large(2000)).withFrag(later), keepNode)
		}),
		{name: "no help from another packet", trap: 23, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53).withBody(large(2000))
			first := p.withFrag(fragment{id: 100, length: 1000})
			other := later
			other.id = 101
			elsewhere := p.to(h.remoteB, 53).withFrag(later)
			another := raw(h.pod, h.remote, protoTest).withBody(large(2000)).withFrag(later)
			return []step{
				leaves(first, opened, first.from(h.node, 40000)),
				leaves(p.withFrag(other), dropFragment),
				leaves(elsewhere, dropFragment),
				leaves(another, dropFragment),
				leaves(p.withFrag(later).from(h.podB, 0), dropFragment),
				leaves(p.withFrag(later), translated, p.from(h.node, 40000).withFrag(later)),
			}
		}},
		{name: "no help from the other direction", trap: 23, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53).withBody(large(2000))
			return []step{
				arrives(p.withFrag(fragment{id: 100, length: 1000}), noFlow),
				leaves(p.withFrag(later), dropFragment),
			}
		}},
		{name: "no first fragment that is cut short opens a flow", trap: 21, steps: func(h hosts) []step {
			p := tcp(h.pod, 40000, h.remote, 80, "S").withBody(large(2000))
			return []step{
				leaves(p.withFrag(fragment{id: 100, length: 16}), dropInvalid),
				leaves(p.withFrag(fragment{id: 100, offset: 16}), dropFragment),
			}
		}},
	})
}

// Trap 23: identifiers come again, so ports are not remembered for long.
func TestPortsOfFragmentsAreForgotten(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d.forget(t, config{})
			p := udp(h.pod, 40000, h.remote, 53).withBody(large(2000))
			both := pieces(p, 100, 1000)
			d.take("first", leaves(both[0], opened, pieces(p.from(h.node, 40000), 100, 1000)[0]))
			ageFragments(d, 29*time.Second)
			d.take("in time", leaves(both[1], translated, pieces(p.from(h.node, 40000), 100, 1000)[1]))
			ageFragments(d, 2*time.Second)
			d.take("too late", leaves(both[1], dropFragment))
		})
	}
}

func ageFragments(d *datapath, by time.Duration) {
	d.Helper()
	older := func(m *ebpf.Map, key any, value MasqFragment) {
		value.Seen -= uint64(by)
		d.put(m, key, &value)
	}
	each(d, d.FragmentsV4, func(k *MasqFragmentKeyV4, f *MasqFragment) { older(d.FragmentsV4, k, *f) })
	each(d, d.FragmentsV6, func(k *MasqFragmentKeyV6, f *MasqFragment) { older(d.FragmentsV6, k, *f) })
}

func TestFragmentsWithHeadersInBetween(t *testing.T) {
	at6 := udp(v6.pod, 40000, v6.remote, 53).withBody(large(2000))
	at6.extensions = []extension{{layers.IPProtocolIPv6HopByHop, []byte{0, 1, 4, 0, 0, 0, 0}}}
	at4 := udp(v4.pod, 40000, v4.remote, 53).withBody(large(2000))
	at4.options = []byte{1, 1, 1, 1}
	runTable(t, []row{{name: "translated", trap: 30, steps: func(h hosts) []step {
		p := at4
		if h.v6 {
			p = at6
		}
		in, out := pieces(p, 100, 1000), pieces(p.from(h.node, 40000), 100, 1000)
		return []step{
			leaves(in[0], opened, out[0]),
			leaves(in[1], translated, out[1]),
			leaves(in[2], translated, out[2]),
		}
	}}})
}
