// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"net/netip"
	"testing"
	"time"
)

// exempt is what the agent does when a prefix becomes exempt: it first says that
// there may be flows that are older.
func (d *datapath) exempt(p netip.Prefix) {
	d.Helper()
	d.sticky(p.Addr().Is6(), MasqSticky{Exempt: monotonic()})
	d.cidr(p, MasqCidrVerdictCIDR_KEEP)
}

func (d *datapath) sticky(is6 bool, hints MasqSticky) {
	d.Helper()
	d.put(d.Sticky, familyIndex(is6), &hints)
}

func familyIndex(is6 bool) uint32 {
	if is6 {
		return uint32(MasqFamilyFAMILY_V6)
	}
	return uint32(MasqFamilyFAMILY_V4)
}

// Packets to exempt destinations are looked up among the flows as long as the
// agent says that some may go there, and no longer: most packets go there.
func TestFlowsOlderThanTheExemption(t *testing.T) {
	runTable(t, []row{{name: "translated until the agent knows of none", trap: 1, steps: func(h hosts) []step {
		p := udp(h.pod, 40000, h.remote, 53)
		q := p.from(h.node, 40000)
		return []step{
			leaves(p, opened, q),
			do(func(d *datapath) { d.exempt(host(h.remote)) }),
			leaves(p, translated, q),
			arrives(q.reply(), translated, p.reply()),
			leaves(udp(h.pod, 40001, h.remote, 53), keepCIDR),
			leaves(udp(h.node, 40001, h.near, 53), keepCIDR),
			do(func(d *datapath) { d.sticky(h.v6, MasqSticky{}) }),
			leaves(p, keepCIDR),
		}
	}}, {name: "of the other family do not matter", trap: 1, steps: func(h hosts) []step {
		p := udp(h.pod, 40000, h.remote, 53)
		return []step{
			leaves(p, opened, p.from(h.node, 40000)),
			do(func(d *datapath) {
				d.cidr(host(h.remote), MasqCidrVerdictCIDR_KEEP)
				d.sticky(!h.v6, MasqSticky{Exempt: monotonic()})
			}),
			leaves(p, keepCIDR),
		}
	}}, {name: "errors from an exempt router are about other flows", trap: 15, steps: func(h hosts) []step {
		p := udp(h.pod, 40000, h.remote, 53)
		outside := p.from(h.node, 40000)
		in, out := h.icmpError(h.router, h.node, h.exceeded, 0, outside, -1), h.icmpError(h.router, h.pod, h.exceeded, 0, p, -1)
		return []step{
			do(func(d *datapath) { d.cidr(host(h.router), MasqCidrVerdictCIDR_KEEP) }),
			leaves(p, opened, outside),
			arrives(in, icmpError, out),
			arrives(udp(h.router, 53, h.node, 40000), noFlow),
		}
	}}})
}

// The node's own connections are looked up among the flows when they open. After
// that their sockets keep pods from their ports, so that they pay for no lookup
// while none has been moved.
func TestNodesOwnConnectionsUnderWay(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		d.forget(t, config{})
		p, own := tcp(h.pod, 40000, h.remote, 80, "S"), tcp(h.node, 40000, h.remote, 80, "S")
		d.take("pod", leaves(p, opened, own))
		d.take("not looked up", leaves(own.withFlags("A"), keepNode))
		moved := d.open(own)
		d.take("moved when it opens", leaves(own.withFlags("A"), translated, moved.withFlags("A")))
	}
}

// A flow of the node's own that was moved stays so when what it clashed with is
// gone. The datapath itself notes that there is one, and believes the agent when
// it says that there is none any more.
func TestMovedFlowsOutliveTheClash(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		d.forget(t, config{})
		p, own := udp(h.pod, 40000, h.remote, 53), udp(h.node, 40000, h.remote, 53)
		d.take("pod", leaves(p, opened, own))
		moved := d.open(own)
		d.age(p, time.Minute)
		d.take("when the pod's flow is dead", leaves(own, translated, moved))
		d.sticky(h.v6, MasqSticky{Moved: monotonic()})
		d.take("when the agent has found none", leaves(own, keepNode))
	}
}
