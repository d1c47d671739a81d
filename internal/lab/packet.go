// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// TCP flags.
const (
	FIN = 1 << iota
	SYN
	RST
	PSH
	ACK
)

// Packet is an IP packet, decoded. What does not apply is zero.
type Packet struct {
	At       time.Time
	Outgoing bool // as the captured interface sees it
	Partial  bool // the transport checksum was left to the device

	Src, Dst     netip.Addr
	Proto        uint8 // unix.IPPROTO_*, after IPv6 extension headers
	TTL          uint8
	FragmentID   uint32
	FragmentAt   int // offset in bytes
	More         bool
	SPort, DPort uint16 // TCP, UDP, UDP-Lite and SCTP; only in first fragments

	Flags    uint8 // TCP
	Seq, Ack uint32

	Type, Code uint8   // ICMP and ICMPv6
	ID         uint16  // echo request and reply, and the other ICMPv4 queries
	MTU        uint32  // packet too big, fragmentation needed
	Inner      *Packet // what an ICMP error quotes; transport fields as far as it goes

	Payload []byte // after the transport header; of ICMP errors the quote

	// Raw is the packet from the IP header on. Captures keep little more than
	// the headers of long TCP segments.
	Raw []byte
	// Length is that of the packet on the wire.
	Length int

	header    int  // length of the headers before the transport header
	body      int  // of a fragment: length of the headers that each one has
	truncated bool // Raw ends before the packet does
}

// Parse decodes an IP packet. The Packet refers to b.
func Parse(b []byte) (Packet, error) { return parse(b, false) }

// parse decodes a packet; a quoted one may end anywhere after the IP header.
func parse(b []byte, quoted bool) (Packet, error) {
	if len(b) == 0 {
		return Packet{}, errors.New("empty packet")
	}
	var (
		p   Packet
		err error
	)
	switch b[0] >> 4 {
	case 4:
		p, err = parseIPv4(b)
	case 6:
		p, err = parseIPv6(b)
	default:
		err = fmt.Errorf("IP version %d", b[0]>>4)
	}
	if err != nil {
		return p, err
	}
	switch {
	case p.Length < len(b):
		b = b[:p.Length] // Ethernet padding
	case p.Length > len(b) && !quoted:
		return p, fmt.Errorf("packet of %d bytes ends after %d", p.Length, len(b))
	case p.Length > len(b):
		p.truncated = true
	}
	p.Raw = b
	return p, p.parseTransport(quoted)
}

func parseIPv4(b []byte) (Packet, error) {
	if len(b) < 20 || len(b) < int(b[0]&0xf)*4 || b[0]&0xf < 5 {
		return Packet{}, errors.New("short IPv4 header")
	}
	fragment := binary.BigEndian.Uint16(b[6:])
	return Packet{
		Src:        netip.AddrFrom4([4]byte(b[12:])),
		Dst:        netip.AddrFrom4([4]byte(b[16:])),
		Proto:      b[9],
		TTL:        b[8],
		FragmentID: uint32(binary.BigEndian.Uint16(b[4:])),
		FragmentAt: int(fragment&0x1fff) * 8,
		More:       fragment&0x2000 != 0,
		Length:     int(binary.BigEndian.Uint16(b[2:])),
		header:     int(b[0]&0xf) * 4,
		body:       int(b[0]&0xf) * 4,
	}, nil
}

func parseIPv6(b []byte) (Packet, error) {
	if len(b) < 40 {
		return Packet{}, errors.New("short IPv6 header")
	}
	p := Packet{
		Src:    netip.AddrFrom16([16]byte(b[8:])),
		Dst:    netip.AddrFrom16([16]byte(b[24:])),
		Proto:  b[6],
		TTL:    b[7],
		Length: 40 + int(binary.BigEndian.Uint16(b[4:])),
		header: 40,
	}
	for p.FragmentAt == 0 && len(b) >= p.header+8 {
		next := b[p.header:]
		switch p.Proto {
		case unix.IPPROTO_HOPOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_DSTOPTS:
			p.header += 8 + int(next[1])*8
		case unix.IPPROTO_AH:
			p.header += 8 + int(next[1])*4
		case unix.IPPROTO_FRAGMENT:
			at := binary.BigEndian.Uint16(next[2:])
			p.FragmentAt, p.More = int(at&^7), at&1 != 0
			p.FragmentID = binary.BigEndian.Uint32(next[4:])
			p.header += 8
			p.body = p.header
		default:
			return p, nil
		}
		p.Proto = next[0]
	}
	return p, nil
}

func (p *Packet) parseTransport(quoted bool) error {
	if p.FragmentAt != 0 {
		p.Payload = p.Raw[min(p.header, len(p.Raw)):]
		return nil
	}
	need := map[uint8]int{
		unix.IPPROTO_TCP: 20, unix.IPPROTO_UDP: 8, unix.IPPROTO_UDPLITE: 8, unix.IPPROTO_SCTP: 12,
		unix.IPPROTO_ICMP: 8, unix.IPPROTO_ICMPV6: 8,
	}[p.Proto]
	if quoted {
		need = min(need, 8) // what RFC 792 promises
	}
	if len(p.Raw) < p.header+need {
		return fmt.Errorf("short transport header of protocol %d", p.Proto)
	}
	b := p.Raw[p.header:]
	p.Payload = b
	switch p.Proto {
	case unix.IPPROTO_TCP:
		p.parseTCP(b)
	case unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE, unix.IPPROTO_SCTP:
		p.SPort, p.DPort = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
		p.Payload = b[min(need, len(b)):]
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		return p.parseICMP(b)
	}
	return nil
}

func (p *Packet) parseTCP(b []byte) {
	p.SPort, p.DPort = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	p.Seq = binary.BigEndian.Uint32(b[4:])
	p.Payload = nil
	if len(b) < 20 {
		return
	}
	p.Ack, p.Flags = binary.BigEndian.Uint32(b[8:]), b[13]
	p.Payload = b[min(int(b[12]>>4)*4, len(b)):]
}

func (p *Packet) parseICMP(b []byte) error {
	p.Type, p.Code, p.Payload = b[0], b[1], b[8:]
	if p.isICMPQuery() {
		p.ID = binary.BigEndian.Uint16(b[4:])
		return nil
	}
	if !p.IsICMPError() {
		return nil
	}
	switch {
	case p.Proto == unix.IPPROTO_ICMPV6 && p.Type == 2:
		p.MTU = binary.BigEndian.Uint32(b[4:])
	case p.Proto == unix.IPPROTO_ICMP && p.Type == 3 && p.Code == 4:
		p.MTU = uint32(binary.BigEndian.Uint16(b[6:]))
	}
	inner, err := parse(p.Payload, true)
	if err != nil {
		return fmt.Errorf("quoted packet: %w", err)
	}
	p.Inner = &inner
	return nil
}

func (p *Packet) isICMPQuery() bool {
	if p.Proto == unix.IPPROTO_ICMPV6 {
		return p.Type == 128 || p.Type == 129
	}
	return p.Type == 0 || p.Type == 8 || p.Type >= 13 && p.Type <= 18
}

// IsICMPError reports whether p is an ICMP message that quotes a packet.
func (p *Packet) IsICMPError() bool {
	switch p.Proto {
	case unix.IPPROTO_ICMPV6:
		return p.Type >= 1 && p.Type <= 4
	case unix.IPPROTO_ICMP:
		return p.Type == 3 || p.Type == 4 || p.Type == 5 || p.Type == 11 || p.Type == 12
	}
	return false
}

// IsFragment reports whether p is part of a larger packet.
func (p *Packet) IsFragment() bool { return p.More || p.FragmentAt != 0 }

// Source is the source with its port, or the ICMP identifier in its place.
func (p *Packet) Source() netip.AddrPort { return netip.AddrPortFrom(p.Src, max(p.SPort, p.ID)) }

// Destination is the destination with its port, or the ICMP identifier in its
// place.
func (p *Packet) Destination() netip.AddrPort { return netip.AddrPortFrom(p.Dst, max(p.DPort, p.ID)) }

// String is one line in the manner of tcpdump.
func (p *Packet) String() string {
	var s strings.Builder
	arrow := "in "
	if p.Outgoing {
		arrow = "out"
	}
	fmt.Fprintf(&s, "%s %s > %s proto %d", arrow, p.Source(), p.Destination(), p.Proto)
	switch p.Proto {
	case unix.IPPROTO_TCP:
		fmt.Fprintf(&s, " flags %s seq %d ack %d", tcpFlags(p.Flags), p.Seq, p.Ack)
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		fmt.Fprintf(&s, " type %d code %d", p.Type, p.Code)
	}
	if p.IsFragment() {
		fmt.Fprintf(&s, " fragment %#x at %d more %t", p.FragmentID, p.FragmentAt, p.More)
	}
	fmt.Fprintf(&s, " length %d ttl %d", p.Length, p.TTL)
	if p.Inner != nil {
		fmt.Fprintf(&s, " quoting [%s]", strings.TrimPrefix(p.Inner.String(), "in "))
	}
	return s.String()
}

func tcpFlags(flags uint8) string {
	var s strings.Builder
	for i, letter := range "FSRP." {
		if flags&(1<<i) != 0 {
			s.WriteRune(letter)
		}
	}
	if s.Len() == 0 {
		return "none"
	}
	return s.String()
}
