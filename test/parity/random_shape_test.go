// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/lab"
)

// tcpStage is how far a TCP conversation is.
type tcpStage int

const (
	tcpFresh tcpStage = iota
	tcpAsked
	tcpAnswered
	tcpOpen
	tcpEnding
)

// shape decides what the packet looks like.
func (g *generator) shape(s *sent) {
	back := s.kind == kindAnswer
	switch s.of.proto {
	case "tcp":
		g.segment(s, back)
	case "udp":
		s.build = lab.UDP
		s.pieces = s.from != sendNode && g.IntN(5) == 0
	case "icmp":
		s.build = echo
		if back {
			s.build = echoReply
		}
		s.pieces = s.from != sendNode && g.IntN(8) == 0
	case "sctp":
		s.build = sctpInit
	case "GRE":
		s.build = gre
	case "ESP":
		s.build = protocol(unix.IPPROTO_ESP)
	default:
		s.build = protocol(253)
	}
	switch {
	case s.pieces:
		g.disorder(s)
	case g.IntN(6) == 0:
		g.dress(s)
	}
}

// disorder has pieces come in another order, or lie over each other.
func (g *generator) disorder(s *sent) {
	switch g.IntN(4) {
	case 0, 1:
		s.order = g.Perm(pieceCount)
	case 2:
		s.laps = s.known && g.IntN(4) == 0 // both drop it: it must not be what opens a conversation
	}
}

// dress gives the packet what is legal and rare.
func (g *generator) dress(s *sent) {
	plain := s.build
	is6 := s.source.Addr().Is6()
	switch n := g.IntN(4); {
	case is6 && n < 3:
		s.text = "with extension headers"
		chains := [][]uint8{{unix.IPPROTO_DSTOPTS}, {unix.IPPROTO_HOPOPTS, unix.IPPROTO_DSTOPTS}, {unix.IPPROTO_ROUTING}}
		s.build = func(from, to netip.AddrPort, mark []byte) []byte {
			return withExtensions(plain(from, to, mark), chains[n]...)
		}
	case !is6 && n < 2:
		s.text = "with options"
		s.build = func(from, to netip.AddrPort, mark []byte) []byte { return withOptions(plain(from, to, mark)) }
	case !is6 && s.of.proto == "udp":
		s.text, s.build = "without checksum", zeroChecksum
	}
}

// segment is mostly what comes next in a connection, and sometimes anything.
func (g *generator) segment(s *sent, back bool) {
	c, side, other := s.of, 0, 1
	if back {
		side, other = 1, 0
	}
	s.flags = c.usual(g, back)
	if g.IntN(5) == 0 {
		s.flags = g.anyFlags()
	}
	if s.flags&lab.SYN != 0 && c.tcp != tcpOpen {
		c.next[side] = g.Uint32()
	}
	seq, ack := c.next[side], uint32(0)
	if s.flags&lab.ACK != 0 {
		ack = c.next[other]
	}
	if g.IntN(12) == 0 {
		seq, s.text = g.Uint32(), "at a random place"
	} else {
		c.advance(s.flags, side)
	}
	c.ended = c.ended || s.flags&ending != 0
	s.build = func(from, to netip.AddrPort, mark []byte) []byte {
		return lab.TCP(from, to, s.flags, seq, ack, mark[:segmentSize])
	}
}

const (
	ending      = lab.FIN | lab.RST
	segmentSize = 80
)

// advance counts what the segment takes of the sequence.
func (c *conversation) advance(flags uint8, side int) {
	c.next[side] += segmentSize
	for _, bit := range []uint8{lab.SYN, lab.FIN} {
		if flags&bit != 0 {
			c.next[side]++
		}
	}
	switch {
	case flags&ending != 0:
		c.tcp = tcpEnding
	case flags&(lab.SYN|lab.ACK) == lab.SYN:
		c.tcp = tcpAsked
	case flags&lab.SYN != 0 && c.tcp == tcpAsked:
		c.tcp = tcpAnswered
	case c.tcp != tcpEnding:
		c.tcp = tcpOpen
	}
}

// usual are the flags that the stage expects.
func (c *conversation) usual(g *generator, back bool) uint8 {
	data := []uint8{lab.ACK, lab.ACK | lab.PSH, lab.ACK, lab.ACK | lab.PSH, lab.FIN | lab.ACK, lab.RST | lab.ACK}
	switch {
	case c.tcp == tcpFresh, c.tcp == tcpAsked && !back:
		return lab.SYN
	case c.tcp == tcpAsked, c.tcp == tcpAnswered && back:
		return lab.SYN | lab.ACK
	case c.tcp == tcpAnswered:
		return lab.ACK
	case c.tcp == tcpEnding:
		data = []uint8{lab.FIN | lab.ACK, lab.FIN | lab.ACK, lab.ACK, lab.SYN, lab.SYN, lab.RST}
	}
	return data[g.IntN(len(data))]
}

// anyFlags are mostly those that occur.
func (g *generator) anyFlags() uint8 {
	usual := []uint8{lab.SYN, lab.SYN, lab.ACK, lab.ACK | lab.PSH, lab.FIN | lab.ACK, lab.RST, lab.SYN | lab.ACK}
	if n := g.IntN(len(usual) + 1); n < len(usual) {
		return usual[n]
	}
	return uint8(g.IntN(32))
}

// errorAbout builds an error whose last argument is what it quotes, with the
// mark behind it.
func (g *generator) errorAbout(s *sent, is6 bool) builder {
	kinds := [][2]uint8{{3, 1}, {3, 3}, {3, 4}, {11, 0}, {12, 0}}
	if is6 {
		kinds = [][2]uint8{{1, 3}, {1, 4}, {2, 0}, {3, 0}, {4, 0}}
	}
	kind, rest := kinds[g.IntN(len(kinds))], uint32(0)
	if kind == [2]uint8{3, 4} || kind == [2]uint8{2, 0} {
		rest = 1400
	}
	s.text = fmt.Sprintf("type %d code %d", kind[0], kind[1])
	return func(from, to netip.AddrPort, quote []byte) []byte {
		return lab.ICMP(from.Addr(), to.Addr(), kind[0], kind[1], rest, quote)
	}
}

// quote is the beginning of a packet as an error has it: to the end of its
// transport header.
func quote(p *lab.Packet, mark []byte) []byte {
	return append(slices.Clone(p.Raw[:len(p.Raw)-len(p.Payload)]), mark...)
}

func echo(from, to netip.AddrPort, mark []byte) []byte {
	return lab.EchoRequest(from.Addr(), to.Addr(), from.Port(), 1, mark)
}

func echoReply(from, to netip.AddrPort, mark []byte) []byte {
	return lab.EchoReply(from.Addr(), to.Addr(), to.Port(), 1, mark)
}

func icmpOf(kind uint8) builder {
	return func(from, to netip.AddrPort, mark []byte) []byte {
		return lab.ICMP(from.Addr(), to.Addr(), kind, 0, uint32(from.Port()), mark)
	}
}

// gre is the plain kind, RFC 2784.
func gre(from, to netip.AddrPort, mark []byte) []byte {
	return lab.IP(from.Addr(), to.Addr(), unix.IPPROTO_GRE, append([]byte{0, 0, 8, 0}, mark...))
}

// withOptions makes room for four no-operation options in an IPv4 header.
func withOptions(plain []byte) []byte {
	packet := slices.Concat(plain[:20], []byte{1, 1, 1, 1}, plain[20:])
	packet[0] = 4<<4 | 6
	binary.BigEndian.PutUint16(packet[2:], uint16(len(packet)))
	_ = lab.FixChecksums(packet)
	return packet
}

// withExtensions puts empty headers of eight bytes before the transport's.
func withExtensions(plain []byte, chain ...uint8) []byte {
	packet := bytes.Clone(plain)
	for _, kind := range slices.Backward(chain) {
		header := []byte{packet[6], 0, 1, 4, 0, 0, 0, 0} // PadN
		if kind == unix.IPPROTO_ROUTING {
			header = []byte{packet[6], 0, 253, 0, 0, 0, 0, 0} // RFC 4727, all segments done
		}
		packet = slices.Concat(packet[:40], header, packet[40:])
		packet[6] = kind
		binary.BigEndian.PutUint16(packet[4:], uint16(len(packet)-40))
	}
	return packet
}

// stamp numbers a packet in its network header, where netfilter's opinion is
// asked by it: the identification, or the end of the flow label.
func stamp(packet []byte, number int) {
	at, n := 2, uint16(number)
	if packet[0]>>4 == 4 {
		at = 4
		// RFC 1624: the old value is zero.
		check := uint32(^binary.BigEndian.Uint16(packet[10:])) + uint32(n)
		binary.BigEndian.PutUint16(packet[10:], ^uint16(check>>16+check&0xffff))
	}
	binary.BigEndian.PutUint16(packet[at:], n)
}
