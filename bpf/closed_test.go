// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"testing"
	"time"
)

// shut has the uplink open no flows of a family any more.
func (d *datapath) shut(flags MasqUplinkFlag) {
	d.Helper()
	var value MasqUplink
	if err := d.Uplinks.Lookup(uint32(0), &value); err != nil {
		d.Fatalf("read uplink: %v", err)
	}
	value.Flags |= uint8(flags)
	d.put(d.Uplinks, uint32(0), &value)
}

func shut(flags MasqUplinkFlag) step { return do(func(d *datapath) { d.shut(flags) }) }

const shutBoth = MasqUplinkFlagUPLINK_CLOSED_V4 | MasqUplinkFlagUPLINK_CLOSED_V6

func TestClosedUplinkServesWhatIsThere(t *testing.T) {
	runTable(t, []row{{name: "flows go on in both directions", steps: func(h hosts) []step {
		p := tcp(h.pod, 40000, h.remote, 80, "S")
		q := p.from(h.node, 40000)
		return []step{
			leaves(p, opened, q), shut(shutBoth),
			arrives(q.reply().withFlags("SA"), translated, p.reply().withFlags("SA")),
			leaves(p.withFlags("A"), translated, q.withFlags("A")),
		}
	}}, {name: "what opens one is left alone, and so are strays", steps: func(h hosts) []step {
		return []step{
			shut(shutBoth),
			leaves(tcp(h.pod, 40000, h.remote, 80, "S"), closed),
			leaves(udp(h.pod, 40000, h.remote, 53), closed),
			leaves(h.ping(h.pod, h.remote, 7), closed),
			leaves(raw(h.pod, h.remote, protoESP), closed),
			leaves(tcp(h.pod, 40000, h.remote, 80, "RA"), closed),
			leaves(udp(h.node, 40000, h.remote, 53), closed),
		}
	}}, {name: "a tuple that the node has no flow for takes none", steps: func(h hosts) []step {
		return []step{shut(shutBoth), leaves(h.ping(h.node, h.remote, 7), closed)}
	}}})
}

// conntrack knows such a flow as one that netfilter does not translate: left
// alone it would leave with the pod's address. The next packet does not profit.
func TestClosedUplinkBeginsAnewWhatHasEnded(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		d.forget(t, config{})
		p := udp(h.pod, 40000, h.remote, 53)
		d.open(p)
		d.shut(shutBoth)
		d.age(p, 32*time.Second)
		got := d.run(egress, p.frame())
		if want := p.from(h.node, 40000).frame(); got.verdict != opened || !bytes.Equal(got.frame, want) {
			t.Errorf("%v: %s, %s", p, verdictName(got.verdict), difference(got.frame, want))
		}
		d.take("another", leaves(udp(h.pod, 40001, h.remote, 53), closed))
		d.take("the same", leaves(p, translated, p.from(h.node, 40000)))
	}
}

// What netfilter gives a pod may be what a flow has.
func TestClosedUplinkMovesWhatClashes(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		for _, p := range []packet{
			udp(h.pod, 40000, h.remote, 53), tcp(h.pod, 40000, h.remote, 80, "S"), h.ping(h.pod, h.remote, 7),
		} {
			d.forget(t, config{})
			outside := d.open(p)
			d.shut(shutBoth)
			own := p.from(outside.src, max(outside.sport, outside.icmpID))
			moved := d.open(own)
			if moved.sport == own.sport && moved.icmpID == own.icmpID {
				t.Fatalf("%v left unmoved", own)
			}
			d.take("again", leaves(own, translated, moved))
			d.take("its reply", arrives(moved.reply(), translated, own.reply()))
			d.take("the pod's reply", arrives(outside.reply(), translated, p.reply()))
		}
	}
}

// Either family may be closed.
func TestClosedFamilyIsNotTheOther(t *testing.T) {
	for _, h := range families {
		d := borrow(t, config{})
		p := udp(h.pod, 40000, h.remote, 53)
		other, own := MasqUplinkFlagUPLINK_CLOSED_V6, MasqUplinkFlagUPLINK_CLOSED_V4
		if h.v6 {
			other, own = own, other
		}
		d.shut(other)
		d.take("open", leaves(p, opened, p.from(h.node, 40000)))
		d.shut(own)
		d.take("closed", leaves(udp(h.pod, 40001, h.remote, 53), closed))
	}
}
