// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/gopacket/gopacket/layers"
)

const (
	protoDCCP     = layers.IPProtocol(33)
	protoOSPF     = layers.IPProtocolOSPF
	protoPIM      = layers.IPProtocol(103)
	protoMobility = layers.IPProtocol(135)
	protoUDPLite  = layers.IPProtocolUDPLite
	protoHIP      = layers.IPProtocol(139)
)

// summedAt are the protocols that gopacket makes no checksums for, with the
// place of the checksum in their header.
var summedAt = map[layers.IPProtocol]int{
	protoUDPLite: 6, protoDCCP: 6, protoHIP: 4, protoMobility: 4, protoOSPF: 12, protoPIM: 2,
}

// hasPorts are those of them that begin with two ports.
func hasPorts(proto layers.IPProtocol) bool { return proto == protoUDPLite || proto == protoDCCP }

// summed is a packet of such a protocol.
func summed(src, dst netip.Addr, proto layers.IPProtocol) packet {
	p := packet{src: src, dst: dst, proto: proto, body: []byte("0123456789abcdefghi")}
	switch proto {
	case protoUDPLite:
		p.sport, p.dport = 40000, 5004
		copy(p.body[4:], []byte{0, 10}) // its header and two octets more
	case protoDCCP:
		p.sport, p.dport = 40000, 5004
		p.body[4] = 4 // octets times four of header
	}
	return p
}

// sum is the transport of such a packet with its ports and checksum in it.
func (p packet) sum(at int) []byte {
	b := slices.Clone(p.body)
	if hasPorts(p.proto) {
		binary.BigEndian.PutUint16(b, p.sport)
		binary.BigEndian.PutUint16(b[2:], p.dport)
	}
	binary.BigEndian.PutUint16(b[at:], 0)
	covered := b
	if p.proto == protoUDPLite {
		covered = b[:binary.BigEndian.Uint16(b[4:])]
	}
	value := ^onesSum(p.src.AsSlice(), p.dst.AsSlice(), []byte{0, uint8(p.proto)}, binary.BigEndian.AppendUint16(nil, uint16(len(b))), covered)
	if value == 0 && p.proto == protoUDPLite {
		value = 0xffff
	}
	binary.BigEndian.PutUint16(b[at:], value)
	return b
}

// onesSum is the sum of RFC 1071 over parts that begin at even places.
func onesSum(parts ...[]byte) uint16 {
	var sum uint32
	for _, part := range parts {
		for i, octet := range part {
			sum += uint32(octet) << (8 * (1 - i%2))
		}
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

// Whatever has a checksum over the addresses gets it right, in the packet and
// where an error quotes it.
func TestChecksumsOverAddresses(t *testing.T) {
	only6 := []layers.IPProtocol{protoMobility, protoOSPF, protoPIM}
	var rows []row
	for proto := range summedAt {
		if slices.Contains(only6, proto) {
			rows = append(rows, summedBothWays(proto).in(v6))
		} else {
			rows = append(rows, summedBothWays(proto))
		}
	}
	runTable(t, rows)
}

func summedBothWays(proto layers.IPProtocol) row {
	return row{name: fmt.Sprintf("translated both ways, protocol %d", proto), trap: 17, steps: func(h hosts) []step {
		p := summed(h.pod, h.remote, proto)
		q := p.from(h.node, p.sport)
		steps := []step{leaves(p, opened, q), arrives(q.reply(), translated, p.reply())}
		for _, quote := range []int{8, 16, -1} {
			steps = append(steps,
				arrives(h.icmpError(h.router, h.node, h.exceeded, 0, q, quote), icmpError,
					h.icmpError(h.router, h.pod, h.exceeded, 0, p, quote)),
				leaves(h.icmpError(h.pod, h.remote, h.unreachable, 1, p.reply(), quote), icmpError,
					h.icmpError(h.node, h.remote, h.unreachable, 1, q.reply(), quote)))
		}
		return steps
	}}
}

// UDP-Lite and DCCP have ports: two pods have room for one remote.
func TestPortsOfUDPLiteAndDCCP(t *testing.T) {
	d := borrow(t, config{})
	for _, proto := range []layers.IPProtocol{protoUDPLite, protoDCCP} {
		for _, h := range families {
			t.Run(fmt.Sprintf("%d/%v", proto, h), func(t *testing.T) {
				d.forget(t, config{})
				p := summed(h.pod, h.remote, proto)
				if first := d.open(p); first.sport != p.sport {
					t.Errorf("port %d became %d", p.sport, first.sport)
				}
				second := p.from(h.podB, p.sport)
				outside := d.open(second)
				if outside.sport == p.sport {
					t.Error("two pods share a port")
				}
				d.take("reply to the second", arrives(outside.reply(), translated, second.reply()))
				d.take("error about the second", arrives(h.icmpError(h.router, h.node, h.exceeded, 0, outside, 8), icmpError,
					h.icmpError(h.router, h.podB, h.exceeded, 0, second, 8)))
			})
		}
	}
}

// A header that ends before its checksum opens nothing: it could not be
// corrected.
func TestChecksumsThatAreNotThere(t *testing.T) {
	runTable(t, []row{
		single("HIP", 45, func(h hosts) step { return leaves(short(summed(h.pod, h.remote, protoHIP), 5), dropInvalid) }),
		single("OSPF", 45, func(h hosts) step {
			return leaves(short(summed(h.pod, h.remote, protoOSPF), 13), dropInvalid)
		}).in(v6),
	})
}

func short(p packet, length int) packet {
	p.unsummed = true
	return p.withBody(p.body[:length])
}

// chunk is an SCTP chunk of a type, whole and padded.
func chunk(kind uint8, length int) []byte {
	b := make([]byte, (length+3)&^3)
	b[0], b[2], b[3] = kind, byte(length>>8), byte(length)
	return b
}

const (
	sctpData     = 0
	sctpInit     = 1
	sctpInitAck  = 2
	sctpAbort    = 6
	shutdownAck  = 8
	sctpComplete = 14
)

// Which chunks open an association in conntrack's eyes: INIT without a tag,
// and what asks or answers about one that was there before.
func TestChunksThatOpenAnAssociation(t *testing.T) {
	var rows []row
	for kind := range uint8(17) {
		verdict := dropInvalid
		if slices.Contains([]uint8{sctpInit, 4, 5, shutdownAck}, kind) {
			verdict = opened
		}
		rows = append(rows, chunks(fmt.Sprintf("chunk of type %d", kind), 0, chunk(kind, 20), verdict))
	}
	zero := chunk(4, 20)
	zero[3] = 0
	rows = append(rows,
		chunks("INIT with a tag", 7, chunk(sctpInit, 20), dropInvalid),
		chunks("INIT that is too short", 0, chunk(sctpInit, 19), opened), // its padding is there
		chunks("INIT without its end", 0, chunk(sctpInit, 16), dropInvalid),
		chunks("INIT that is not alone", 0, append(chunk(sctpInit, 20), chunk(sctpData, 20)...), dropInvalid),
		chunks("INIT behind another", 0, append(chunk(4, 8), chunk(sctpInit, 20)...), dropInvalid),
		chunks("HEARTBEAT with data", 7, append(chunk(4, 8), chunk(sctpData, 20)...), dropInvalid),
		chunks("chunk without length", 0, zero, dropInvalid),
		chunks("no chunk", 0, nil, dropInvalid),
		chunks("half a chunk header", 0, []byte{sctpInit, 0}, dropInvalid))
	runTable(t, rows)
}

func chunks(name string, tag uint32, body []byte, verdict MasqVerdict) row {
	return single(name, 4, func(h hosts) step {
		p := tagged(sctp(h.pod, 40000, h.remote, 3868).withBody(body), tag)
		if verdict != opened {
			return leaves(p, verdict)
		}
		return leaves(p, verdict, p.from(h.node, 40000))
	})
}

func tagged(p packet, tag uint32) packet { p.seq = tag; return p }

// Only what opens an association from outside is noted as one: a stray chunk
// must not let the pod's own association out untranslated.
func TestStrayChunksFromOutsideAreNotNoted(t *testing.T) {
	runTable(t, []row{
		{name: "INIT is, and its answer kept", trap: 2, steps: func(h hosts) []step {
			p := sctp(h.remote, 50000, h.pod, 3868)
			return []step{
				arrives(p, inbound),
				leaves(p.reply().withBody(chunk(sctpInitAck, 20)), keepReply),
				leaves(p.reply().withBody(chunk(sctpData, 20)), keepReply),
			}
		}},
		{name: "others are not", trap: 3, steps: func(h hosts) []step {
			p := sctp(h.pod, 40000, h.remote, 3868)
			var steps []step
			for _, kind := range []uint8{sctpData, sctpInitAck, sctpAbort, sctpComplete} {
				steps = append(steps, arrives(p.reply().withBody(chunk(kind, 20)), noFlow))
			}
			return append(steps, leaves(p, opened, p.from(h.node, 40000)))
		}},
		{name: "what is under way passes a flow that is there", trap: 46, steps: func(h hosts) []step {
			p := sctp(h.pod, 40000, h.remote, 3868)
			data := p.withBody(chunk(sctpData, 20))
			return []step{
				leaves(data, dropInvalid),
				leaves(p, opened, p.from(h.node, 40000)),
				leaves(data, translated, data.from(h.node, 40000)),
				arrives(data.from(h.node, 40000).reply(), translated, data.reply()),
			}
		}},
	})
}
