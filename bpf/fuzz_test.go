// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"testing"

	"github.com/gopacket/gopacket/layers"
)

// samples are packets of every kind, as they leave or as they come in.
func samples(h hosts, direction MasqDirection) []packet {
	p, q := udp(h.pod, 40000, h.remote, 53), udp(h.node, 40000, h.remote, 53)
	leaving := []packet{
		p, p.withBody(nil), p.from(h.node, 40000), p.to(h.near, 53), p.from(h.secondary, 40000), p.to(h.multicast, 53),
		tcp(h.pod, 40000, h.remote, 80, "S"), tcp(h.pod, 40000, h.remote, 80, "A"), tcp(h.pod, 40000, h.remote, 80, "FA"),
		h.ping(h.pod, h.remote, 7), h.pong(h.pod, h.remote, 7), sctp(h.pod, 40000, h.remote, 80), raw(h.pod, h.remote, protoESP),
		h.icmpError(h.pod, h.remote, h.unreachable, 3, p.reply(), -1), h.icmpError(h.pod, h.remote, h.unreachable, 3, p.reply(), 8),
		p.withFrag(fragment{id: 1, length: 8}), p.withFrag(fragment{id: 1, offset: 8}),
	}
	coming := []packet{
		q.reply(), tcp(h.remote, 80, h.node, 40000, "SA"), tcp(h.remote, 50000, h.pod, 80, "S"), h.pong(h.remote, h.node, 7),
		h.ping(h.remote, h.pod, 7), sctp(h.remote, 80, h.node, 40000), raw(h.remote, h.node, protoESP),
		h.icmpError(h.router, h.node, h.exceeded, 0, q, -1), h.icmpError(h.router, h.node, h.exceeded, 0, q, 8),
		h.icmpError(h.router, h.node, h.unreachable, 1, h.ping(h.node, h.remote, 7), -1),
		q.reply().withFrag(fragment{id: 1, length: 8}), q.reply().withFrag(fragment{id: 1, offset: 8}),
	}
	all := [...][]packet{leaving, coming}[direction]
	for _, p := range slices.Clone(all) {
		if h.v6 {
			p.extensions = []extension{{layers.IPProtocolIPv6HopByHop, []byte{0, 1, 4, 0, 0, 0, 0}}}
		} else {
			p.options = []byte{7, 7, 4, 0, 0, 0, 0, 1}
		}
		all = append(all, p)
	}
	return all
}

// prepare leaves only the flows that samples are of.
func (d *datapath) prepare(t testing.TB) {
	t.Helper()
	d.TB = t
	d.endFlows()
	for _, h := range families {
		for _, p := range []packet{
			udp(h.pod, 40000, h.remote, 53), tcp(h.pod, 40000, h.remote, 80, "S"), h.ping(h.pod, h.remote, 7),
			sctp(h.pod, 40000, h.remote, 80), raw(h.pod, h.remote, protoESP),
		} {
			if action, _, err := d.exec(egress, p.frame(), d.out); err != nil || action != actionPass {
				t.Fatalf("open %v: action %#x, %v", p, action, err)
			}
		}
	}
	d.counts()
}

// Coverage is of this test, not of the datapath: run these with
// -fuzzminimizetime 1x.
func FuzzEgress(f *testing.F)  { fuzz(f, egress) }
func FuzzIngress(f *testing.F) { fuzz(f, ingress) }

// fuzz takes packets from the IP header on.
func fuzz(f *testing.F, direction MasqDirection) {
	for _, h := range families {
		for _, p := range samples(h, direction) {
			p.noHeader = true
			f.Add(p.frame())
		}
	}
	d := load(f, config{})
	f.Fuzz(func(t *testing.T, ip []byte) {
		if len(ip) == 0 || len(ip) > 2000 {
			t.Skip("no packet of a size that runs")
		}
		d.prepare(t)
		d.holdProperties(direction, ip)
	})
}

// Packets of every kind with some octets changed, and often cut.
func TestMutatedPackets(t *testing.T) {
	rounds := 40
	if os.Getenv("LONG_TESTS") != "" {
		rounds = 500
	}
	d := borrow(t, config{})
	random := rand.New(rand.NewPCG(1, 2))
	for direction := range MasqDirectionDIRECTION_COUNT {
		for _, h := range families {
			for i, p := range samples(h, direction) {
				p.noHeader = true
				whole := p.frame()
				for round := range rounds {
					if round%10 == 0 {
						d.prepare(t)
					}
					ip := slices.Clone(whole)
					for range random.IntN(4) {
						ip[random.IntN(len(ip))] = byte(random.Uint32())
					}
					if random.IntN(3) == 0 {
						ip = ip[:1+random.IntN(len(ip))]
					}
					d.holdProperties(direction, ip)
					if t.Failed() {
						t.Fatalf("direction %d, %v, sample %d, round %d", direction, h, i, round)
					}
				}
			}
		}
	}
}

// holdProperties sends any octets through a program, and holds what is true of
// all packets.
func (d *datapath) holdProperties(direction MasqDirection, ip []byte) {
	d.Helper()
	kind := layers.EthernetTypeIPv4
	if ip[0]>>4 == 6 {
		kind = layers.EthernetTypeIPv6
	}
	frame := slices.Concat(routerMAC[:], uplinkMAC[:], binary.BigEndian.AppendUint16(nil, uint16(kind)), ip)
	flows := len(d.flows())
	got, ok := d.try(direction, frame)
	if !ok {
		return
	}
	out := got.frame[ethernetLength:]
	changed := got.verdict == opened || got.verdict == translated || got.verdict == icmpError
	if !changed && got.verdict < MasqVerdictVERDICT_DROP_FIRST && !bytes.Equal(got.frame, frame) {
		d.Errorf("%s changed %x to %x", verdictName(got.verdict), ip, out)
	}
	if changed && whole(ip) && !whole(out) {
		d.Errorf("%s broke a checksum: %x became %x", verdictName(got.verdict), ip, out)
	}
	if got.verdict == opened || got.verdict == nodeOpened {
		flows++
	}
	// A flow may also end: a RST does not, but another uplink's would.
	if after := len(d.checkPairs()); after != flows {
		d.Errorf("%s left %d flows, want %d: %x", verdictName(got.verdict), after, flows, ip)
	}
	if direction == egress {
		d.holdNoLeak(got.verdict, ip, out, changed)
	} else if changed && !v4.inside.Contains(addresses(out).dst) && !v6.inside.Contains(addresses(out).dst) {
		d.Errorf("%s leads to no pod: %x", verdictName(got.verdict), out)
	}
}

// holdNoLeak holds that no pod's address leaves but to where it may.
func (d *datapath) holdNoLeak(verdict MasqVerdict, ip, out []byte, changed bool) {
	d.Helper()
	at, h := addresses(out), v4
	if out[0]>>4 == 6 {
		h = v6
	}
	switch {
	case changed:
		if at.src != h.node {
			d.Errorf("%s gave the source %v: %x became %x", verdictName(verdict), at.src, ip, out)
		}
	case verdict >= MasqVerdictVERDICT_DROP_FIRST, verdict == notIP, !h.inside.Contains(at.src):
	case verdict == keepCIDR:
		if !h.inside.Contains(at.dst) {
			d.Errorf("%v leaves to %v outside the CIDR: %x", at.src, at.dst, ip)
		}
	case verdict == exempt:
		discovery := h.v6 && bytes.ContainsAny(ip[6:7], "\x3a\x00\x2b\x2c\x3c")
		if !discovery && !at.dst.IsMulticast() && !at.dst.IsLinkLocalUnicast() && at.dst != addr("255.255.255.255") &&
			at.dst != h.broadcast {
			d.Errorf("%v leaves to %v as exempt: %x", at.src, at.dst, ip)
		}
	default:
		d.Errorf("%s lets %v leave to %v: %x", verdictName(verdict), at.src, at.dst, ip)
	}
}

func addresses(ip []byte) packet {
	if ip[0]>>4 == 6 {
		return packet{src: netip.AddrFrom16([16]byte(ip[8:24])), dst: netip.AddrFrom16([16]byte(ip[24:40]))}
	}
	return packet{src: netip.AddrFrom4([4]byte(ip[12:16])), dst: netip.AddrFrom4([4]byte(ip[16:20]))}
}

// whole tells whether a packet has all its octets and the checksums of the IP
// header and of TCP, UDP or ICMP hold. False of packets for which it cannot be
// told: fragments, other protocols, a length that does not fit.
func whole(ip []byte) bool {
	header, next, end := 40, layers.IPProtocol(0), 0
	if ip[0]>>4 == 6 {
		next, end = layers.IPProtocol(ip[6]), 40+int(binary.BigEndian.Uint16(ip[4:]))
		for next == layers.IPProtocolIPv6HopByHop && header+8 <= len(ip) {
			next = layers.IPProtocol(ip[header])
			header += 8 * (1 + int(ip[header+1]))
		}
	} else {
		header, next, end = 4*int(ip[0]&15), layers.IPProtocol(ip[9]), int(binary.BigEndian.Uint16(ip[2:]))
		if header < 20 || header > len(ip) || sum(ip[:header]) != 0xffff || binary.BigEndian.Uint16(ip[6:])&0x3fff != 0 {
			return false
		}
	}
	least := map[layers.IPProtocol]int{
		layers.IPProtocolTCP: 20, layers.IPProtocolUDP: 8, layers.IPProtocolICMPv4: 8, layers.IPProtocolICMPv6: 8,
	}[next]
	if least == 0 || end > len(ip) || header+least > end {
		return false
	}
	transport := ip[header:end]
	if next == layers.IPProtocolICMPv4 {
		return ip[0]>>4 == 4 && sum(transport) == 0xffff
	}
	if next == layers.IPProtocolUDP && transport[6]|transport[7] == 0 {
		return true
	}
	at := addresses(ip)
	pseudo := binary.BigEndian.AppendUint32(nil, uint32(len(transport)))
	pseudo = append(pseudo, 0, 0, 0, uint8(next))
	return sum(at.src.AsSlice(), at.dst.AsSlice(), pseudo, transport) == 0xffff
}

// sum is the Internet checksum before it is inverted. Only the last part may
// have an odd length.
func sum(parts ...[]byte) uint32 {
	var total uint32
	for _, part := range parts {
		for i, octet := range part {
			total += uint32(octet) << (8 * (1 - i&1))
		}
	}
	for total > 0xffff {
		total = total&0xffff + total>>16
	}
	return total
}
