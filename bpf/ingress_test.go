// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"
)

func TestRepliesToConnectionsFromOutsideAreKept(t *testing.T) {
	runTable(t, []row{
		{name: "TCP", trap: 2, steps: func(h hosts) []step {
			syn := tcp(h.remote, 50000, h.pod, 80, "S")
			return []step{
				arrives(syn, inbound),
				leaves(syn.reply(), keepReply),
				arrives(syn.withFlags("A"), noFlow),
				leaves(syn.reply().withFlags("AP"), keepReply),
				leaves(syn.reply().withFlags("FA"), keepReply),
				leaves(syn.reply().withFlags("R"), keepReply),
			}
		}},
		{name: "TCP with ECN", trap: 2, steps: func(h hosts) []step {
			syn := tcp(h.remote, 50000, h.pod, 80, "SEC")
			return []step{arrives(syn, inbound), leaves(syn.reply().withFlags("SAE"), keepReply)}
		}},
		{name: "UDP", trap: 2, steps: func(h hosts) []step {
			p := udp(h.remote, 50000, h.pod, 53)
			return []step{arrives(p, inbound), leaves(p.reply(), keepReply), arrives(p, inbound)}
		}},
		{name: "echo", trap: 2, steps: func(h hosts) []step {
			p := h.ping(h.remote, h.pod, 7)
			return []step{arrives(p, inbound), leaves(p.reply(), keepReply), leaves(h.pong(h.pod, h.remote, 9), dropInvalid)}
		}},
		{name: "SCTP", trap: 2, steps: func(h hosts) []step {
			p := sctp(h.remote, 50000, h.pod, 3868)
			return []step{arrives(p, inbound), leaves(p.reply(), keepReply)}
		}},
		{name: "ESP", trap: 2, steps: func(h hosts) []step {
			p := raw(h.remote, h.pod, protoESP)
			return []step{arrives(p, inbound), leaves(p.reply(), keepReply)}
		}},
		{name: "through another pod no more than of the one asked", trap: 2, steps: func(h hosts) []step {
			syn := tcp(h.remote, 50000, h.pod, 80, "S")
			return []step{
				arrives(syn, inbound),
				leaves(syn.reply().from(h.podB, 80), dropInvalid),
				leaves(syn.reply().from(h.pod, 81), dropInvalid),
				leaves(syn.reply().to(h.remote, 50001), dropInvalid),
			}
		}},
	})
}

func TestWhatDoesNotOpenAConnectionFromOutside(t *testing.T) {
	var rows []row
	for _, flags := range []string{"FA", "F", "A", "R", "RA", "SA", "", "AP"} {
		rows = append(rows, row{
			name: "a stray " + flags + " excuses nothing", trap: 3, steps: func(h hosts) []step {
				stray, syn := tcp(h.remote, 80, h.pod, 40000, flags), tcp(h.pod, 40000, h.remote, 80, "S")
				return []step{arrives(stray, noFlow), leaves(syn, opened, syn.from(h.node, 40000))}
			},
		})
	}
	rows = append(rows,
		row{name: "an outgoing SYN is no reply, noted or not", trap: 3, steps: func(h hosts) []step {
			syn := tcp(h.pod, 40000, h.remote, 80, "S")
			outside := syn.from(h.node, 40000)
			return []step{
				arrives(tcp(h.remote, 80, h.pod, 40000, "S"), inbound),
				leaves(syn, opened, outside),
				leaves(syn.withFlags("A"), translated, outside.withFlags("A")),
				arrives(outside.reply(), translated, syn.reply()),
			}
		}},
		row{name: "an outgoing ping is no reply, noted or not", trap: 20, steps: func(h hosts) []step {
			id := uint16(h.echo) // makes the tuple its own mirror
			p := h.ping(h.pod, h.remote, id)
			return []step{
				arrives(h.ping(h.remote, h.pod, id), inbound),
				leaves(h.pong(h.pod, h.remote, id), keepReply),
				leaves(p, opened, p.from(h.node, id)),
				arrives(p.from(h.node, id).reply(), translated, p.reply()),
			}
		}},
		single("from a destination that keeps pods' addresses", 0, func(h hosts) step {
			return arrives(tcp(h.near, 50000, h.pod, 80, "S"), noFlow)
		}),
		single("a datagram to the subnet's broadcast", 41, func(h hosts) step {
			return arrives(udp(h.remote, 50000, h.broadcast, 9), noFlow)
		}).in(v4),
		single("an unsolicited echo reply", 20, func(h hosts) step { return arrives(h.pong(h.remote, h.node, 7), noFlow) }),
		single("an error about nothing we know", 15, func(h hosts) step {
			return arrives(h.icmpError(h.router, h.node, h.unreachable, 1, udp(h.node, 40000, h.remote, 53), -1), noFlow)
		}),
		single("a query of unknown kind", 20, func(h hosts) step { return arrives(h.icmp(h.remote, h.pod, 200, 7), noFlow) }))
	runTable(t, rows)
}

func TestWhoseReplyItIs(t *testing.T) {
	runTable(t, []row{
		{name: "only the whole tuple matches", trap: 7, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53)
			q := p.from(h.node, 40000)
			return []step{
				leaves(p, opened, q),
				arrives(q.reply().from(h.remoteB, 53), noFlow),
				arrives(q.reply().from(h.remote, 54), noFlow),
				arrives(q.reply().to(h.secondary, 40000), inbound),
				arrives(tcp(h.remote, 53, h.node, 40000, "A"), noFlow),
				arrives(q.reply(), translated, p.reply()),
			}
		}},
		{name: "a ping from outside is no reply to a ping", trap: 20, steps: func(h hosts) []step {
			p := h.ping(h.pod, h.remote, 7)
			return []step{
				leaves(p, opened, p.from(h.node, 7)),
				arrives(h.ping(h.remote, h.secondary, 7), inbound),
				arrives(h.pong(h.remote, h.node, 8), noFlow),
				arrives(h.pong(h.remote, h.node, 7), translated, h.pong(h.remote, h.pod, 7)),
			}
		}},
		{name: "one that comes after the flow's death is nobody's", trap: 49, steps: func(h hosts) []step {
			p := tcp(h.pod, 40000, h.remote, 80, "S")
			return []step{
				leaves(p, opened, p.from(h.node, 40000)),
				do(func(d *datapath) { d.age(p, 122*time.Second) }),
				arrives(p.from(h.node, 40000).reply(), noFlow),
			}
		}},
		{name: "a pod's flow wins over a note", trap: 3, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53)
			q := p.from(h.node, 40000)
			return []step{
				leaves(p, opened, q),
				arrives(p.reply(), inbound),
				leaves(p, translated, q),
			}
		}},
	})
}

func TestNotesHaveTheirTime(t *testing.T) {
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d := borrow(t, config{})
			syn, datagram := tcp(h.remote, 50000, h.pod, 80, "S"), udp(h.remote, 50000, h.pod, 53)
			answer, synAck := datagram.reply(), syn.reply()
			d.take("SYN", arrives(syn, inbound))
			d.take("datagram", arrives(datagram, inbound))
			d.ageNote(answer, 119*time.Second)
			d.take("late answer", leaves(answer, keepReply))
			if idle := d.noteIdle(answer); idle > time.Minute {
				t.Errorf("an answer leaves the note %v old", idle)
			}
			d.ageNote(answer, 100*time.Second)
			d.take("another datagram", arrives(datagram, inbound))
			if idle := d.noteIdle(answer); idle > time.Minute {
				t.Errorf("a datagram leaves the note %v old", idle)
			}
			d.ageNote(answer, 121*time.Second)
			d.take("too late", leaves(answer, opened, answer.from(h.node, 53)))
			d.ageNote(synAck, 100*time.Hour)
			d.take("after days", leaves(synAck, keepReply))
			d.ageNote(synAck, 121*time.Hour)
			d.take("too late", leaves(synAck, dropInvalid))
		})
	}
}

func (d *datapath) notes(p packet) *ebpf.Map {
	if p.src.Is6() {
		return d.InboundV6
	}
	return d.InboundV4
}

// ageNote makes the note that a packet answers so old, noteIdle is how old.
func (d *datapath) ageNote(p packet, by time.Duration) {
	d.Helper()
	d.put(d.notes(p), p.tuple().key(), &MasqInbound{LastSeen: monotonic() - uint64(by)})
}

func (d *datapath) noteIdle(p packet) time.Duration {
	d.Helper()
	var note MasqInbound
	if err := d.notes(p).Lookup(p.tuple().key(), &note); err != nil {
		d.Fatalf("note that %v answers: %v", p, err)
	}
	return time.Duration(monotonic() - note.LastSeen)
}

// Trap 36: the reply may come back another way.
func TestReplyOnAnotherDevice(t *testing.T) {
	link := device(t)
	d := borrow(t, config{})
	for _, h := range families {
		p := udp(h.pod, 40000, h.remote, 53)
		d.ifindex = loopbackIndex
		q := d.open(p)
		d.ifindex = uint32(link.Attrs().Index)
		d.take("reply", arrives(q.reply(), translated, p.reply()))
		if got := d.flow(p).ifindex; got != loopbackIndex {
			t.Errorf("%v: the reply moved the flow to device %d", h, got)
		}
	}
}
