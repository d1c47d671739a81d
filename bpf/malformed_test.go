// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/gopacket/gopacket/layers"
)

// A packet that ends in its headers opens no flow, is of none, and is noted
// nowhere; one that ends behind them is what its headers say.
func TestPacketsCutAnywhere(t *testing.T) {
	options := extension{layers.IPProtocolIPv6Destination, []byte{0, 1, 4, 0, 0, 0, 0}}
	whole := map[layers.IPProtocol]int{layers.IPProtocolTCP: 20, layers.IPProtocolUDP: 8, layers.IPProtocolSCTP: 12}
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
				need, ok := whole[p.proto]
				if !ok {
					need = 8
				}
				need += ethernetLength + p.headerLength()
				for length := range len(p.frame()) {
					d.forget(t, config{})
					cut(d, p, length, length >= need)
				}
				d.forget(t, config{})
				outside := d.open(p)
				for length := range need {
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

func TestHeadersThatLie(t *testing.T) {
	d := borrow(t, config{})
	tests := []struct {
		name    string
		p       func(h hosts) packet
		at      int // in the transport header
		value   byte
		verdict MasqVerdict
	}{
		{"TCP header of 16 octets", func(h hosts) packet { return tcp(h.pod, 40000, h.remote, 80, "S") }, 12, 0x40, dropInvalid},
		{"TCP header past the end", func(h hosts) packet { return tcp(h.pod, 40000, h.remote, 80, "S") }, 12, 0xf0, dropInvalid},
		{"TCP header to the end", func(h hosts) packet {
			return tcp(h.pod, 40000, h.remote, 80, "S").withBody(make([]byte, 40))
		}, 12, 0xf0, opened},
	}
	for _, tt := range tests {
		for _, h := range families {
			t.Run(tt.name+"/"+h.String(), func(t *testing.T) {
				d.forget(t, config{})
				p := tt.p(h)
				frame := p.frame()
				frame[ethernetLength+p.headerLength()+tt.at] = tt.value
				got := d.run(egress, frame)
				if got.verdict != tt.verdict || (len(d.checkPairs()) == 1) != (tt.verdict == opened) {
					t.Errorf("got %s, want %s", verdictName(got.verdict), verdictName(tt.verdict))
				}
			})
		}
	}
}
