// SPDX-License-Identifier: Apache-2.0

package parity

import (
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

// kind is what a packet is to its conversation.
type kind string

const (
	kindForward  kind = "forward" // from who opened the conversation
	kindAnswer   kind = "answer"  // from the other side
	kindError    kind = "error"   // from outside, about a forward packet that left
	kindPodError kind = "pod's error"
	kindGuess    kind = "guess" // from outside, to the node, at a port that may be a flow's
	kindAlone    kind = "alone" // of no conversation
)

// conversation is what packets with the same protocol and ends share.
type conversation struct {
	proto     string
	from      int // who opened it
	near, far netip.AddrPort
	packets   int
	burst     int // of the last forward packet
	answered  int // burst of the last answer
	tcp       tcpStage
	next      [2]uint32 // TCP: the next byte of near and of far
	ended     bool      // a segment had FIN or RST
	spent     bool      // goes on no more
}

func (c *conversation) String() string {
	return fmt.Sprintf("%s %s > %s from %d, packet %d, TCP %d", c.proto, c.near, c.far, c.from, c.packets, c.tcp)
}

// sent is one random packet. What it answers may differ between the labs, so
// it is built in each.
type sent struct {
	number int
	from   int
	kind   kind
	of     *conversation
	known  bool // the conversation had packets before
	meets  bool // has no ports, and both sides have opened a conversation
	flags  uint8
	text   string
	pieces bool
	order  []int // in which the pieces are sent; nil: their own
	laps   bool  // another piece lies over two of them
	source netip.AddrPort
	to     netip.AddrPort
	build  builder
}

func (s *sent) String() string {
	return fmt.Sprintf("packet %d, %s from %d, %s flags %#x, pieces %t %v %t, known %t, of %s",
		s.number, s.kind, s.from, s.text, s.flags, s.pieces, s.order, s.laps, s.known, s.of)
}

func (s *sent) mark() []byte { return fmt.Appendf(nil, "#%08d.", s.number) }

// generator makes packets, the same for both labs.
type generator struct {
	*rand.Rand
	lab   *lab.Lab
	made  []*sent
	byKey map[string]*conversation
	all   []*conversation // of this epoch, in the order in which they began
	// openers of conversations without ports, by protocol and addresses: 1 is the
	// node's side, 2 is outside.
	openers map[string]int
}

// going are how many of the latest conversations go on, so that many get far.
const going = 60

func (g *generator) next(twins [2]*twin) {
	if len(g.made)%epoch == 0 {
		g.byKey, g.all = make(map[string]*conversation), nil
	}
	s := g.more(twins)
	if s == nil {
		s = g.fresh()
	}
	s.number = len(g.made)
	s.known = s.of.packets > 0
	g.noteMeeting(s)
	s.of.packets++
	g.made = append(g.made, s)
}

// noteMeeting: without ports, what the node's side opens and what is opened to
// it can be told apart by nothing but who came first.
func (g *generator) noteMeeting(s *sent) {
	c := s.of
	if c.near.Port() != 0 || c.far.Port() != 0 || (s.kind != kindForward && s.kind != kindAnswer) {
		return
	}
	inside, remote, opener := c.near, c.far, 1
	if c.from == sendOutside {
		inside, remote, opener = c.far, c.near, 2
	}
	key := fmt.Sprint(c.proto, inside, remote)
	g.openers[key] |= opener
	s.meets = g.openers[key] == 3
}

// burst is the number of the burst that is being made.
func (g *generator) burst() int { return len(g.made)/burst + 1 }

// more is another packet of a conversation; nil where none goes on.
func (g *generator) more(twins [2]*twin) *sent {
	if len(g.all) == 0 || g.IntN(4) == 0 {
		return nil
	}
	c := g.all[len(g.all)-1-g.IntN(min(going, len(g.all)))]
	if c.spent {
		return nil
	}
	// What may change the flow in this burst is not yet seen, but an answer
	// needs to know it.
	quiet := c.burst < g.burst() && c.answered < g.burst()
	switch n := g.IntN(10); {
	case n < 4 && quiet:
		return g.answer(c, twins)
	case n == 4 && quiet && c.from != sendOutside:
		return g.aboutForward(c, twins)
	case n == 5 && quiet:
		return g.aboutAnswer(c, twins)
	}
	if c.answered == g.burst() {
		return nil
	}
	return g.forward(c)
}

// known: both labs have seen the conversation leave.
func known(c *conversation, twins [2]*twin) bool {
	return twins[0].outer[c].IsValid() && twins[1].outer[c].IsValid()
}

func (g *generator) forward(c *conversation) *sent {
	s := &sent{from: c.from, kind: kindForward, of: c, source: c.near, to: c.far}
	c.burst = g.burst()
	g.shape(s)
	return s
}

// answer of what cannot be answered is nil.
func (g *generator) answer(c *conversation, twins [2]*twin) *sent {
	s := &sent{kind: kindAnswer, of: c, source: c.far, to: c.near}
	switch {
	case c.from != sendOutside && known(c, twins):
		s.from = sendOutside
	case c.from == sendOutside && c.packets > 0:
		s.from = g.owner(c.far.Addr())
	default:
		return nil
	}
	g.shape(s)
	c.answered = g.burst()
	// A server that connects from its own port to the client's: nobody's case.
	c.spent = s.from != sendOutside && s.flags&(lab.SYN|lab.ACK) == lab.SYN
	return s
}

// owner is who has an address of the node's side.
func (g *generator) owner(addr netip.Addr) int {
	for i, pod := range g.lab.Pods {
		if addr == pod.Addr(addr.Is6()) {
			return sendPodA + i
		}
	}
	return sendNode
}

// quotable are the protocols that netfilter knows by what an error must quote:
// eight bytes of SCTP are not enough for it.
func quotable(c *conversation) bool {
	return c.proto == "tcp" || c.proto == "udp" || c.proto == "icmp"
}

func (g *generator) aboutForward(c *conversation, twins [2]*twin) *sent {
	if !quotable(c) || !known(c, twins) {
		return nil
	}
	s := &sent{from: sendOutside, kind: kindError, of: c, source: c.far, to: c.near}
	if g.IntN(3) == 0 { // a router on the way
		s.source = netip.AddrPortFrom(toggled(g.lab).Addr(c.far.Addr().Is6()), 0)
	}
	s.build = g.errorAbout(s, c.far.Addr().Is6())
	return s
}

// aboutAnswer is a pod's error about what came to it.
func (g *generator) aboutAnswer(c *conversation, twins [2]*twin) *sent {
	from := c.from
	if from == sendOutside {
		from = g.owner(c.far.Addr())
	}
	if !quotable(c) || from == sendNode || twins[0].arrived[c] == nil || twins[1].arrived[c] == nil {
		return nil
	}
	s := &sent{from: from, kind: kindPodError, of: c, source: c.near, to: c.far}
	if c.from == sendOutside {
		s.source, s.to = c.far, c.near
	}
	s.build = g.errorAbout(s, c.far.Addr().Is6())
	return s
}

// fresh opens a conversation, or is a packet for which nothing prepares.
func (g *generator) fresh() *sent {
	is6 := g.IntN(2) == 0
	from := g.IntN(4)
	near, far := g.ends(from, is6)
	if n := g.IntN(16); n == 0 {
		return g.alone(from, near, far)
	} else if n < 3 {
		return g.guess(is6)
	}
	c := &conversation{proto: g.proto(), from: from, near: near, far: far}
	switch c.proto {
	case "tcp", "udp", "sctp":
	case "icmp":
		c.far = netip.AddrPortFrom(far.Addr(), 0)
	default:
		c.near, c.far = netip.AddrPortFrom(near.Addr(), 0), netip.AddrPortFrom(far.Addr(), 0)
	}
	if c = g.conversation(c); c.spent {
		return g.guess(is6)
	}
	return g.forward(c)
}

// conversation gives the one that has these ends.
func (g *generator) conversation(c *conversation) *conversation {
	key := fmt.Sprint(c.proto, c.near, c.far)
	if g.byKey[key] == nil {
		g.byKey[key] = c
		g.all = append(g.all, c)
	}
	return g.byKey[key]
}

// ends are few, so that conversations meet.
func (g *generator) ends(from int, is6 bool) (near, far netip.AddrPort) {
	base := uint16(10000 + len(g.made)/epoch*16%20000)
	port := func(first uint16) uint16 { return base + first + uint16(g.IntN(3)) }
	remotes := []place{remote, narrow, toggled, inside, exception, viaSubnet2}
	if !is6 {
		remotes = append(remotes, linkLocal)
	}
	outer := netip.AddrPortFrom(remotes[g.IntN(len(remotes))](g.lab).Addr(is6), port(0))
	if from == sendOutside {
		// Ports of their own: a pod that is a client and a server with the same
		// ports at the same time is nobody's case.
		own := []place{addrPodA, addrPodB, node}
		return outer, netip.AddrPortFrom(own[g.IntN(3)](g.lab).Addr(is6), port(8))
	}
	own := []place{addrPodA, addrPodB, node}[from]
	if from == sendNode {
		own = []place{node, node, secondary, subnet2}[g.IntN(4)]
	}
	return netip.AddrPortFrom(own(g.lab).Addr(is6), port(0)), outer
}

func (g *generator) proto() string {
	all := []string{"tcp", "tcp", "tcp", "tcp", "tcp", "tcp", "tcp", "udp", "udp", "udp", "udp", "udp", "icmp", "icmp", "icmp", "sctp"}
	if n := g.IntN(len(all) + 1); n < len(all) {
		return all[n]
	}
	return []string{"protocol 253", "ESP", "GRE"}[g.IntN(3)]
}

// guess is sent to the node at a port that some flow may have.
func (g *generator) guess(is6 bool) *sent {
	near, far := g.ends(g.IntN(sendOutside), is6)
	proto := []string{"tcp", "udp", "icmp"}[g.IntN(3)]
	to := netip.AddrPortFrom([]place{node, subnet2}[g.IntN(2)](g.lab).Addr(is6), near.Port())
	c := &conversation{proto: proto, from: sendOutside, near: far, far: to}
	if proto == "icmp" {
		c.near = netip.AddrPortFrom(far.Addr(), 0)
	}
	s := &sent{from: sendOutside, kind: kindGuess, of: c, source: c.near, to: to}
	switch proto {
	case "tcp":
		s.flags = g.anyFlags()
		s.build = segment(s.flags)
	case "udp":
		s.build = lab.UDP
	default:
		s.build = echoReply
	}
	return s
}

// alone is a packet of a kind that opens no conversation.
func (g *generator) alone(from int, near, far netip.AddrPort) *sent {
	c := &conversation{proto: "icmp-other", from: from, near: near, far: far}
	s := &sent{from: from, kind: kindAlone, of: c, source: near, to: far}
	kinds := []uint8{42, 43, 99}
	if near.Addr().Is6() {
		kinds = []uint8{150, 200, 201}
	}
	switch n := g.IntN(6); {
	case n < 3:
		s.text, s.build = fmt.Sprintf("type %d", kinds[n]), icmpOf(kinds[n])
	case n == 3 && from != sendOutside:
		s.text, s.build = "echo reply", strayReply
	default:
		s.text, s.build = "error about an unknown flow", strayError
	}
	return s
}
