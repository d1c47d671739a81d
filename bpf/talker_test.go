// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/gopacket/gopacket/layers"
)

// early are the fragments of a reply, with those that have no ports before the
// one that has.
func early(inside, outside packet) (in, out []packet) {
	in = pieces(outside.reply().withBody(large(2500)), 100, 1000)
	out = pieces(inside.reply().withBody(large(2500)), 100, 1000)
	return []packet{in[2], in[1], in[0]}, []packet{out[2], out[1], out[0]}
}

// Trap 22: a fragment that comes before its ports is for the one pod that can
// be meant.
func TestFragmentsOutOfOrder(t *testing.T) {
	var rows []row
	for name, make := range map[string]func(h hosts) packet{
		"UDP":  func(h hosts) packet { return udp(h.pod, 40000, h.remote, 53) },
		"echo": func(h hosts) packet { return h.ping(h.pod, h.remote, 7) },
		"SCTP": func(h hosts) packet { return sctp(h.pod, 40000, h.remote, 80) },
		"ESP":  func(h hosts) packet { return raw(h.pod, h.remote, protoESP) },
	} {
		rows = append(rows, row{name: "resolved where one pod talks: " + name, trap: 22, steps: func(h hosts) []step {
			p := make(h)
			q := p.from(h.node, max(p.sport, p.icmpID))
			in, out := early(p, q)
			return []step{
				leaves(p, opened, q),
				arrives(in[0], translated, out[0]),
				arrives(in[1], translated, out[1]),
				arrives(in[2], translated, out[2]),
				arrives(in[0], translated, out[0]),
			}
		}})
	}
	runTable(t, append(rows,
		row{name: "dropped where two pods talk", trap: 22, steps: func(h hosts) []step {
			a := udp(h.pod, 40000, h.remote, 53)
			b := udp(h.podB, 40001, h.remote, 54)
			in, out := early(a, a.from(h.node, 40000))
			return []step{
				leaves(a, opened, a.from(h.node, 40000)),
				leaves(b, opened, b.from(h.node, 40001)),
				arrives(in[0], dropFragment),
				arrives(in[2], translated, out[2]),
				arrives(in[0], translated, out[0]), // now its ports are known
			}
		}},
		row{name: "dropped where the node talks too", trap: 22, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53)
			in, _ := early(p, p.from(h.node, 40000))
			return []step{
				leaves(p, opened, p.from(h.node, 40000)),
				arrives(udp(h.remote, 123, h.node, 123), noFlow),
				arrives(in[0], dropFragment),
			}
		}},
		row{name: "left to the node where no pod talks", trap: 22, steps: func(h hosts) []step {
			in, _ := early(udp(h.pod, 40000, h.remote, 53), udp(h.node, 40000, h.remote, 53))
			return []step{arrives(in[0], noFlow)}
		}},
		row{name: "left to the node where a pod talks otherwise", trap: 22, steps: func(h hosts) []step {
			p, q := h.ping(h.pod, h.remote, 7), udp(h.pod, 40000, h.remoteB, 53)
			in, _ := early(udp(h.pod, 40000, h.remote, 53), udp(h.node, 40000, h.remote, 53))
			return []step{
				leaves(p, opened, p.from(h.node, 7)),
				leaves(q, opened, q.from(h.node, 40000)),
				arrives(in[0], noFlow),
			}
		}},
		row{name: "TCP is left to the node", trap: 22, steps: func(h hosts) []step {
			p := tcp(h.pod, 40000, h.remote, 80, "A")
			in, out := early(p, p.from(h.node, 40000))
			return []step{
				leaves(p, opened, p.from(h.node, 40000)),
				arrives(in[0], noFlow),
				arrives(in[2], translated, out[2]),
			}
		}},
		row{name: "another pod's when the first has fallen silent", trap: 22, steps: func(h hosts) []step {
			a := udp(h.pod, 40000, h.remote, 53)
			b := udp(h.podB, 40001, h.remote, 53)
			in, out := early(b, b.from(h.node, 40001))
			return []step{
				leaves(a, opened, a.from(h.node, 40000)),
				do(func(d *datapath) { d.silence(181*time.Second, 0) }),
				leaves(b, opened, b.from(h.node, 40001)),
				arrives(in[0], translated, out[0]),
			}
		}},
		row{name: "left to the node when the pod has fallen silent", trap: 22, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53)
			in, _ := early(p, p.from(h.node, 40000))
			return []step{
				leaves(p, opened, p.from(h.node, 40000)),
				do(func(d *datapath) { d.silence(181*time.Second, 0) }),
				arrives(in[0], noFlow),
			}
		}},
		row{name: "resolved again when the others have fallen silent", trap: 22, steps: func(h hosts) []step {
			a := udp(h.pod, 40000, h.remote, 53)
			b := udp(h.podB, 40001, h.remote, 53)
			in, out := early(a, a.from(h.node, 40000))
			return []step{
				leaves(a, opened, a.from(h.node, 40000)),
				leaves(b, opened, b.from(h.node, 40001)),
				do(func(d *datapath) { d.silence(0, 179*time.Second) }),
				arrives(in[0], dropFragment),
				do(func(d *datapath) { d.silence(0, 2*time.Second) }),
				arrives(in[0], translated, out[0]),
			}
		}},
		row{name: "still another's when it goes on after long silence", trap: 22, steps: func(h hosts) []step {
			a := udp(h.pod, 40000, h.remote, 53)
			b := udp(h.podB, 40001, h.remote, 53)
			in, _ := early(a, a.from(h.node, 40000))
			return []step{
				leaves(a, opened, a.from(h.node, 40000)),
				leaves(b, opened, b.from(h.node, 40001)),
				do(func(d *datapath) {
					d.silence(0, 300*time.Second)
					d.age(b, 2*time.Second)
				}),
				leaves(b, translated, b.from(h.node, 40001)),
				arrives(in[0], dropFragment),
			}
		}},
		row{name: "resolved whatever headers follow the fragment header", trap: 30, only: &v6, steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53).withBody(large(2000))
			p.behind = []extension{{layers.IPProtocolIPv6Destination, []byte{0, 1, 4, 0, 0, 0, 0}}}
			in, out := pieces(p, 100, 1000), pieces(p.from(h.node, 40000), 100, 1000)
			return []step{
				leaves(in[0], opened, out[0]),
				leaves(in[1], translated, out[1]),
				leaves(in[2], translated, out[2]),
			}
		}},
	))
}

// silence makes it long ago that talkers talked, and others than they.
func (d *datapath) silence(talkers, others time.Duration) {
	d.Helper()
	type older struct {
		m          *ebpf.Map
		key, value any
	}
	var all []older
	each(d, d.TalkersV4, func(k *MasqTalkerKeyV4, v *MasqTalkerV4) {
		key, value := *k, *v
		value.Seen, value.OtherSeen = earlier(v.Seen, talkers), earlier(v.OtherSeen, others)
		all = append(all, older{d.TalkersV4, &key, &value})
	})
	each(d, d.TalkersV6, func(k *MasqTalkerKeyV6, v *MasqTalkerV6) {
		key, value := *k, *v
		value.Seen, value.OtherSeen = earlier(v.Seen, talkers), earlier(v.OtherSeen, others)
		all = append(all, older{d.TalkersV6, &key, &value})
	})
	for _, o := range all {
		d.put(o.m, o.key, o.value)
	}
}

// earlier is a time before another; 0 is never.
func earlier(when uint64, by time.Duration) uint64 {
	if when == 0 {
		return 0
	}
	return when - uint64(by)
}
