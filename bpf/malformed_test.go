// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"cmp"
	"fmt"
	"testing"

	"github.com/gopacket/gopacket/layers"
)

// A packet that ends in its headers opens no flow, is of none, and is noted
// nowhere; one that ends behind them is what its headers say.
func TestPacketsCutAnywhere(t *testing.T) {
	options := extension{layers.IPProtocolIPv6Destination, []byte{0, 1, 4, 0, 0, 0, 0}}
	opens := map[layers.IPProtocol]int{layers.IPProtocolTCP: 20, layers.IPProtocolSCTP: 12 + 20}
	belongs := map[layers.IPProtocol]int{layers.IPProtocolTCP: 20, layers.IPProtocolSCTP: 12 + 4}
	d := borrow(t, config{})
	for _, h := range families {
		behind := udp(h.pod, 40000, h.remote, 53)
		if h.v6 {
			behind.extensions = []extension{options, options}
		} else {
			behind.options = []byte{1, 1, 1, 1}
		}
		for i, p := range []packet{
			tcp(h.pod, 40000, h.remote, 80, "S"), udp(h.pod, 40000, h.remote, 53), h.ping(h.pod, h.remote, 7),
			sctp(h.pod, 40000, h.remote, 80), behind,
		} {
			t.Run(fmt.Sprintf("%v/%v/%d", h, p.proto, i), func(t *testing.T) {
				header := ethernetLength + p.headerLength()
				fewest := cmp.Or(opens[p.proto], 8) + header
				needed := cmp.Or(belongs[p.proto], 8) + header
				if p.proto == layers.IPProtocolUDP { // it names its length
					fewest, needed = len(p.frame()), len(p.frame())
				}
				for length := range len(p.frame()) {
					d.forget(t, config{})
					cut(d, p, length, length >= fewest)
				}
				d.forget(t, config{})
				outside := d.open(p)
				for length := range needed {
					frame := p.frame()[:length]
					if got, ok := d.try(egress, frame); ok && got.verdict != dropInvalid && got.verdict != notIP {
						t.Errorf("%d octets of a flow's packet: %s", length, verdictName(got.verdict))
					}
					frame = outside.reply().frame()[:length]
					got, ok := d.try(ingress, frame)
					if ok && (got.verdict == translated || !bytes.Equal(got.frame, frame)) {
						t.Errorf("%d octets of a reply: %s", length, verdictName(got.verdict))
					}
				}
			})
		}
	}
}

// cut sends the beginning of a packet and of one that comes in.
func cut(d *datapath, p packet, length int, whole bool) {
	d.Helper()
	got, ok := d.try(egress, p.frame()[:length])
	want := dropInvalid
	if whole {
		want = opened
	}
	if ok && got.verdict != want && got.verdict != notIP {
		d.Errorf("%d octets: got %s, want %s", length, verdictName(got.verdict), verdictName(want))
	}
	if flows := len(d.checkPairs()); ok && (flows == 1) != whole {
		d.Errorf("%d octets: %d flows", length, flows)
	}
	from := p
	from.src, from.dst = p.dst, p.src
	got, ok = d.try(ingress, from.frame()[:length])
	if ok && (got.verdict == inbound) != whole {
		d.Errorf("%d octets from outside: %s", length, verdictName(got.verdict))
	}
}

// A length or a place in the header that cannot be true, as conntrack judges
// it: the packet opens nothing, and is of no flow either.
func TestHeadersThatLie(t *testing.T) {
	syn := func(h hosts) packet { return tcp(h.pod, 40000, h.remote, 80, "S") }
	datagram := func(h hosts) packet { return udp(h.pod, 40000, h.remote, 53) }
	lite := func(h hosts) packet { return summed(h.pod, h.remote, protoUDPLite) }
	dccp := func(h hosts) packet { return summed(h.pod, h.remote, protoDCCP) }
	tests := []struct {
		name  string
		p     func(h hosts) packet
		at    int // in the transport header
		value []byte
		fine  bool
	}{
		{"TCP header of 16 octets", syn, 12, []byte{0x40}, false},
		{"TCP header past the end", syn, 12, []byte{0xf0}, false},
		{"TCP header to the end", func(h hosts) packet { return syn(h).withBody(make([]byte, 40)) }, 12, []byte{0xf0}, true},
		{"UDP of no octets", datagram, 4, []byte{0, 0}, false},
		{"UDP of 7 octets", datagram, 4, []byte{0, 7}, false},
		{"UDP of its header", datagram, 4, []byte{0, 8}, true},
		{"UDP of an octet too many", datagram, 4, []byte{0, 17}, false},
		{"UDP of very many", datagram, 4, []byte{0xff, 0xff}, false},
		{"UDP-Lite with all covered", lite, 4, []byte{0, 0}, true},
		{"UDP-Lite with 7 octets covered", lite, 4, []byte{0, 7}, false},
		{"UDP-Lite with its header covered", lite, 4, []byte{0, 8}, true},
		{"UDP-Lite with more covered than there is", lite, 4, []byte{0, 255}, false},
		{"UDP-Lite without checksum", lite, 6, []byte{0, 0}, false},
		{"DCCP header of 8 octets", dccp, 4, []byte{2}, false},
		{"DCCP header past the end", dccp, 4, []byte{255}, false},
	}
	d := borrow(t, config{})
	for _, tt := range tests {
		for _, h := range families {
			t.Run(tt.name+"/"+h.String(), func(t *testing.T) {
				lie := func(p packet) []byte {
					frame := p.frame()
					copy(frame[ethernetLength+p.headerLength()+tt.at:], tt.value)
					return frame
				}
				d.forget(t, config{})
				p := tt.p(h)
				got := d.run(egress, lie(p))
				if (got.verdict == opened) != tt.fine || (got.verdict == dropInvalid) == tt.fine {
					t.Errorf("first packet: got %s", verdictName(got.verdict))
				}
				if flows := len(d.checkPairs()); (flows == 1) != tt.fine {
					t.Errorf("%d flows", flows)
				}
				d.forget(t, config{})
				outside := d.open(p)
				if got := d.run(egress, lie(p)); (got.verdict == translated) != tt.fine {
					t.Errorf("of a flow: got %s", verdictName(got.verdict))
				}
				if got := d.run(ingress, lie(outside.reply())); (got.verdict == translated) != tt.fine {
					t.Errorf("reply: got %s", verdictName(got.verdict))
				}
			})
		}
	}
}

// A first fragment of a datagram names the length of the whole.
func TestFirstFragmentNamesTheWholeLength(t *testing.T) {
	runTable(t, []row{
		single("opened", 21, func(h hosts) step {
			p := udp(h.pod, 40000, h.remote, 53).withBody(large(1000)).withFrag(fragment{id: 1, length: 8})
			return leaves(p, opened, p.from(h.node, 40000))
		}),
		single("dropped if that is less than its header", 21, func(h hosts) step {
			p := raw(h.pod, h.remote, layers.IPProtocolUDP).withBody([]byte{0x9c, 0x40, 0, 53, 0, 7, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0})
			p.unsummed = true
			return leaves(p.withFrag(fragment{id: 1, length: 8}), dropInvalid)
		}),
	})
}
