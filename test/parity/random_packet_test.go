// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"

	"ip-masq-agent/internal/lab"
)

// Who sends.
const (
	sendPodA = iota
	sendPodB
	sendNode
	sendOutside
)

// sent is one random packet. What it answers differs between the labs, so it
// is built in each.
type sent struct {
	number int
	from   int
	proto  string
	about  *sent // what it answers or quotes
	known  bool  // there have been packets with these addresses and ports
	source netip.AddrPort
	to     netip.AddrPort
	flags  uint8
	text   string
	pieces bool
	build  func(source, to netip.AddrPort, mark []byte) []byte
}

func (s *sent) mark() []byte { return fmt.Appendf(nil, "#%08d.", s.number) }

func (s *sent) String() string {
	text := fmt.Sprintf("packet %d: %s %s from %d, %s > %s, known %t", s.number, s.proto, s.text, s.from, s.source, s.to, s.known)
	if s.about != nil {
		text += "\n    about " + s.about.String()
	}
	return text
}

// generator makes packets, the same for both labs.
type generator struct {
	*rand.Rand
	lab  *lab.Lab
	made []*sent
	used map[string]bool
}

func (g *generator) next(twins [2]*twin) {
	if len(g.made)%epoch == 0 {
		g.used = make(map[string]bool)
	}
	s := g.answer(twins)
	if s == nil {
		s = g.fresh()
	}
	s.number = len(g.made)
	g.made = append(g.made, s)
}

// fresh is a packet that answers none.
func (g *generator) fresh() *sent {
	is6 := g.IntN(2) == 0
	s := &sent{from: g.IntN(4)}
	base := uint16(10000 + len(g.made)/epoch*16%20000)
	port := func(first uint16) uint16 { return base + first + uint16(g.IntN(3)) }
	remotes := []place{remote, narrow, toggled, inside, exception, viaSubnet2}
	if !is6 {
		remotes = append(remotes, linkLocal)
	}
	far := netip.AddrPortFrom(remotes[g.IntN(len(remotes))](g.lab).Addr(is6), port(0))
	own := []place{addrPodA, addrPodB, node}
	if s.from == sendOutside {
		// Ports of their own: a pod that is a client and a server with the same
		// ports at the same time is nobody's case.
		s.source, s.to = far, netip.AddrPortFrom(own[g.IntN(3)](g.lab).Addr(is6), port(8))
	} else {
		s.source, s.to = netip.AddrPortFrom(own[s.from](g.lab).Addr(is6), port(0)), far
	}
	g.shape(s, is6)
	// The port of a flow that has none is its identity all the same.
	key := fmt.Sprint(s.proto, s.source, s.to)
	s.known, g.used[key] = g.used[key], true
	if s.known && s.proto == "tcp" && s.flags&ending != 0 {
		s.tcp(lab.ACK)
	}
	return s
}

// ending are the flags that only segments of unknown connections have here:
// netfilter gives the port of one that has ended to others, and the eBPF
// datapath keeps it for as long as the flow may come back.
const ending = lab.FIN | lab.RST

func (s *sent) tcp(flags uint8) {
	s.flags, s.text, s.build = flags, fmt.Sprintf("flags %#x", flags), segment(flags)
}

// shape decides the protocol.
func (g *generator) shape(s *sent, is6 bool) {
	switch n := g.IntN(20); {
	case n < 6:
		s.proto = "tcp"
		s.tcp(g.flags())
		if s.from == sendNode {
			// The rest of the node's own is INVALID to netfilter, and then passes
			// as it is, also where a pod's flow has the port.
			s.tcp(lab.SYN)
		}
	case n < 12:
		s.proto, s.build = "udp", lab.UDP
		s.pieces = s.from < sendNode && g.IntN(4) == 0
	case n < 14:
		s.proto, s.text, s.build = "icmp", "echo", echo
	case n == 14:
		s.proto, s.text, s.build = "icmp-other", "reply", strayReply
		if s.from == sendOutside {
			// Known difference: a guessed identifier may be a flow's in one lab
			// alone, for which one each flow got is not compared.
			s.build = unguessedReply
		}
	case n == 15:
		kinds := []uint8{42, 43, 99}
		if is6 {
			kinds = []uint8{150, 200, 201}
		}
		kind := kinds[g.IntN(3)]
		s.proto, s.text, s.build = "icmp-other", fmt.Sprintf("type %d", kind), icmpOf(kind)
	case n == 16:
		s.proto, s.text, s.build = "icmp-other", "error about an unknown flow", strayError
	case n == 17 && s.from != sendNode:
		s.proto, s.build = "sctp", sctpInit
	case s.from != sendNode:
		number := []uint8{253, 50}[g.IntN(2)]
		s.proto, s.build = fmt.Sprint("protocol ", number), protocol(number)
	default:
		s.proto, s.build = "udp", lab.UDP
	}
}

// flags are mostly those that occur.
func (g *generator) flags() uint8 {
	usual := []uint8{lab.SYN, lab.SYN, lab.ACK, lab.ACK | lab.PSH, lab.FIN | lab.ACK, lab.RST, lab.SYN | lab.ACK}
	if n := g.IntN(len(usual) + 1); n < len(usual) {
		return usual[n]
	}
	return uint8(g.IntN(32))
}

// answer is an answer to, or an error about, what came out of both labs in an
// earlier burst; nil where there is none.
func (g *generator) answer(twins [2]*twin) *sent {
	recent := min(len(g.made)%epoch, len(g.made))
	if recent < burst || g.IntN(2) == 0 {
		return nil
	}
	about := g.made[len(g.made)-1-g.IntN(recent)]
	if about.from == sendOutside || about.about != nil || twins[0].out[about.number] == nil || twins[1].out[about.number] == nil {
		return nil
	}
	s := &sent{from: sendOutside, about: about, known: true, proto: about.proto, text: "answer"}
	// Known difference: eight bytes of SCTP are not enough for netfilter.
	if (about.proto == "udp" || about.proto == "icmp" || about.proto == "tcp") && g.IntN(4) == 0 {
		s.proto, s.text = "icmp-other", "error"
		return s
	}
	switch about.proto {
	case "tcp":
		s.tcp(g.flags() &^ ending)
	case "icmp":
		s.build = strayReply
	case "udp":
		s.build = lab.UDP
	default:
		return nil
	}
	return s
}

// bytes are the packet as it is sent in one lab.
func (s *sent) bytes(w *twin) ([][]byte, error) {
	if s.about == nil {
		packet := s.build(s.source, s.to, bytes.Repeat(s.mark(), 8))
		if s.pieces {
			return lab.Fragment(packet, uint32(s.number), len(packet)-20)
		}
		return [][]byte{packet}, nil
	}
	seen := w.out[s.about.number]
	if s.build != nil {
		source, to := seen.Destination(), seen.Source()
		if s.proto == "icmp" { // the identifier is the pod's
			return [][]byte{s.build(netip.AddrPortFrom(source.Addr(), seen.ID), to, s.mark())}, nil
		}
		return [][]byte{s.build(source, to, s.mark())}, nil
	}
	kind, code, length := uint8(3), uint8(1), 28
	if seen.Src.Is6() {
		kind, code, length = 1, 3, 48
	}
	if s.about.proto == "tcp" { // whole, or the mark would be taken for its length
		length += 12
	}
	quote := append(bytes.Clone(seen.Raw[:length]), s.mark()...)
	return [][]byte{lab.ICMP(seen.Dst, seen.Src, kind, code, 0, quote)}, nil
}

func echo(from, to netip.AddrPort, mark []byte) []byte {
	return lab.EchoRequest(from.Addr(), to.Addr(), from.Port(), 1, mark)
}

// unguessedReply has an identifier that no flow of a pod has.
func unguessedReply(from, to netip.AddrPort, mark []byte) []byte {
	return lab.EchoReply(from.Addr(), to.Addr(), to.Port(), 1, mark)
}

func icmpOf(kind uint8) builder {
	return func(from, to netip.AddrPort, mark []byte) []byte {
		return lab.ICMP(from.Addr(), to.Addr(), kind, 0, uint32(from.Port()), mark)
	}
}
