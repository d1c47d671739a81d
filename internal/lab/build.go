// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Every builder gives a whole IP packet with TTL 64 and right checksums; what
// a test wants wrong or rare it changes in the bytes, see FixChecksums.

// UDP builds a datagram.
func UDP(src, dst netip.AddrPort, payload []byte) []byte {
	b := make([]byte, 8, 8+len(payload))
	binary.BigEndian.PutUint16(b, src.Port())
	binary.BigEndian.PutUint16(b[2:], dst.Port())
	binary.BigEndian.PutUint16(b[4:], uint16(8+len(payload)))
	return IP(src.Addr(), dst.Addr(), unix.IPPROTO_UDP, append(b, payload...))
}

// TCP builds a segment without options.
func TCP(src, dst netip.AddrPort, flags uint8, seq, ack uint32, payload []byte) []byte {
	b := make([]byte, 20, 20+len(payload))
	binary.BigEndian.PutUint16(b, src.Port())
	binary.BigEndian.PutUint16(b[2:], dst.Port())
	binary.BigEndian.PutUint32(b[4:], seq)
	binary.BigEndian.PutUint32(b[8:], ack)
	b[12], b[13] = 5<<4, flags
	binary.BigEndian.PutUint16(b[14:], 65535)
	return IP(src.Addr(), dst.Addr(), unix.IPPROTO_TCP, append(b, payload...))
}

// EchoRequest builds a ping.
func EchoRequest(src, dst netip.Addr, id, seq uint16, payload []byte) []byte {
	kind := uint8(8)
	if src.Is6() {
		kind = 128
	}
	return ICMP(src, dst, kind, 0, uint32(id)<<16|uint32(seq), payload)
}

// EchoReply builds the answer to a ping.
func EchoReply(src, dst netip.Addr, id, seq uint16, payload []byte) []byte {
	kind := uint8(0)
	if src.Is6() {
		kind = 129
	}
	return ICMP(src, dst, kind, 0, uint32(id)<<16|uint32(seq), payload)
}

// ICMP builds an ICMP or ICMPv6 message; rest is the second word of its
// header. For an error, payload is the packet to quote.
func ICMP(src, dst netip.Addr, kind, code uint8, rest uint32, payload []byte) []byte {
	b := make([]byte, 8, 8+len(payload))
	b[0], b[1] = kind, code
	binary.BigEndian.PutUint32(b[4:], rest)
	proto := uint8(unix.IPPROTO_ICMP)
	if src.Is6() {
		proto = unix.IPPROTO_ICMPV6
	}
	return IP(src, dst, proto, append(b, payload...))
}

// IP builds a packet of any protocol. A transport checksum that lies in
// payload is written where the protocol is known and the header is whole.
func IP(src, dst netip.Addr, proto uint8, payload []byte) []byte {
	var b []byte
	if src.Is4() {
		b = make([]byte, 20, 20+len(payload))
		b[0] = 4<<4 | 5
		binary.BigEndian.PutUint16(b[2:], uint16(20+len(payload)))
		b[8], b[9] = 64, proto
		copy(b[12:], src.AsSlice())
		copy(b[16:], dst.AsSlice())
	} else {
		b = make([]byte, 40, 40+len(payload))
		b[0] = 6 << 4
		binary.BigEndian.PutUint16(b[4:], uint16(len(payload)))
		b[6], b[7] = proto, 64
		copy(b[8:], src.AsSlice())
		copy(b[24:], dst.AsSlice())
	}
	b = append(b, payload...)
	if src.Is4() {
		binary.BigEndian.PutUint16(b[10:], ^sum(b[:20], 0))
	}
	_ = FixChecksums(b) // fails for what is malformed on purpose
	return b
}

// Fragment cuts a packet without extension headers into fragments whose
// packets are at most mtu bytes long.
func Fragment(packet []byte, id uint32, mtu int) ([][]byte, error) {
	p, err := Parse(packet)
	if err != nil {
		return nil, err
	}
	if p.Src.Is6() && p.header != 40 {
		return nil, fmt.Errorf("cut a packet with extension headers")
	}
	overhead := p.header
	if p.Src.Is6() {
		overhead += 8
	}
	step := (mtu - overhead) &^ 7
	if step <= 0 {
		return nil, fmt.Errorf("cut into fragments of %d bytes: too small", mtu)
	}
	var fragments [][]byte
	for body, at := p.Raw[p.header:], 0; at < len(body); at += step {
		end := min(at+step, len(body))
		fragments = append(fragments, p.fragment(id, at, end < len(body), body[at:end]))
	}
	return fragments, nil
}

func (p *Packet) fragment(id uint32, at int, more bool, body []byte) []byte {
	b := append([]byte(nil), p.Raw[:p.header]...)
	if p.Src.Is4() {
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)+len(body)))
		binary.BigEndian.PutUint16(b[4:], uint16(id))
		binary.BigEndian.PutUint16(b[6:], uint16(at/8)|flag(more, 0x2000))
		binary.BigEndian.PutUint16(b[10:], 0)
		binary.BigEndian.PutUint16(b[10:], ^sum(b, 0))
		return append(b, body...)
	}
	binary.BigEndian.PutUint16(b[4:], uint16(8+len(body)))
	b[6] = unix.IPPROTO_FRAGMENT
	b = append(b, p.Proto, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(at)|flag(more, 1))
	b = binary.BigEndian.AppendUint32(b, id)
	return append(b, body...)
}

func flag(set bool, bit uint16) uint16 {
	if set {
		return bit
	}
	return 0
}
