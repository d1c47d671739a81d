// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"ip-masq-agent/internal/lab"
)

// asHeld is the outcome of a guess: who holds the tuple got it, but for one whose
// connection has ended, who may hold it no more.
const asHeld = "as held"

// gone is the outcome of what neither left the node nor came to a pod.
const gone = "gone"

// sight is a packet where it was seen: in a pod, or on the wire.
type sight struct {
	capture int
	packet  *lab.Packet
}

const onWire = 2

// account keeps the books of one lab: what a conversation may be answered by.
func (w *twin) account(s *sent) {
	if holder := w.holderOf(s); holder != nil && s.flags&ending != 0 {
		holder.ended = true
	}
	if s.kind == kindAnswer && s.from == sendOutside && w.fresh(s) {
		w.release(s.of) // the answer was taken for a new connection
	}
	if s.kind == kindAnswer && s.from < sendNode {
		w.turn(s)
	}
	for _, seen := range w.sees[s.number] {
		switch {
		case seen.packet.IsFragment() && seen.packet.FragmentAt != 0:
		case seen.capture == onWire && s.kind == kindForward && !w.nodesStray(s):
			w.left[s.of] = seen.packet
		case seen.capture != onWire && (s.kind == kindAnswer || s.kind == kindForward && s.from == sendOutside):
			w.arrived[s.of] = seen.packet
		}
	}
}

// turn: where the connection that was opened from outside is over, what the pod
// still sends opens one in the other direction.
func (w *twin) turn(s *sent) {
	s.of.spent = s.of.spent || w.opinion.fresh[uint16(s.number)]
	for _, seen := range w.sees[s.number] {
		if outer := seen.packet.Source(); outer.Addr() != s.source.Addr() {
			w.holder[tupleOf(s.of.proto, outer, s.to)] = &conversation{
				proto: s.of.proto, from: s.from, near: s.source, far: s.to, ended: true,
			}
		}
	}
}

// outcome tells what became of a packet in terms that both labs share.
func (w *twin) outcome(s *sent) string {
	if s.kind == kindGuess || s.kind == kindForward && s.from == sendOutside && s.to.Port() != 0 && !lab.IsPod(s.to.Addr()) {
		return w.outcomeOfGuess(s)
	}
	var texts []string
	for _, seen := range w.sees[s.number] {
		text := w.describe(seen, s)
		if !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
	}
	if len(texts) == 0 {
		return gone
	}
	return strings.Join(texts, ", then ")
}

// describe leaves out the port of what became a flow of its own: each lab draws
// its own, and checkPort and turn keep the books.
func (w *twin) describe(seen sight, s *sent) string {
	p := seen.packet
	switch {
	case seen.capture != onWire && p.FragmentAt != 0:
		return fmt.Sprintf("pod %d gets %s > %s", seen.capture, p.Src, p.Dst)
	case seen.capture != onWire && p.Inner != nil:
		return fmt.Sprintf("pod %d gets %s > %s quoting %s > %s", seen.capture, p.Src, p.Dst, p.Inner.Source(), p.Inner.Destination())
	case seen.capture != onWire:
		return fmt.Sprintf("pod %d gets %s > %s", seen.capture, p.Source(), p.Destination())
	case s.kind == kindForward && s.from != sendOutside && p.FragmentAt == 0:
		return fmt.Sprintf("leaves from %s to %s", p.Src, p.Dst) + w.checkPort(s, p)
	case p.Inner != nil && w.quotesOwn(s, p):
		return fmt.Sprintf("leaves from %s to %s quoting what its flow got", p.Src, p.Dst)
	case p.Inner != nil:
		return fmt.Sprintf("leaves from %s to %s quoting %s > %s", p.Src, p.Dst, p.Inner.Source(), p.Inner.Destination())
	case s.kind == kindAnswer && p.Src == s.source.Addr():
		return fmt.Sprintf("leaves from %s to %s", p.Source(), p.Destination())
	}
	return fmt.Sprintf("leaves from %s to %s", p.Src, p.Dst)
}

// checkPort says what is wrong with the tuple of a conversation: it must stay,
// and be that conversation's alone.
func (w *twin) checkPort(s *sent, p *lab.Packet) string {
	c := s.of
	if w.nodesStray(s) {
		return ""
	}
	tuple := tupleOf(c.proto, p.Source(), c.far)
	if w.fresh(s) { // netfilter has begun a new entry
		w.release(c)
	}
	if was, ok := w.outer[c]; ok && was != p.Source() {
		return fmt.Sprintf("; fault: port moved from %s to %s", was, p.Source())
	}
	if holder := w.holder[tuple]; holder != nil && holder != c {
		// The node has no sockets here, but connections that conntrack knows.
		nodes := !w.judge && holder.from == sendNode
		if !holder.ended || !w.fresh(s) && !nodes {
			return fmt.Sprintf("; fault: port of %s is that of %s", p.Source(), holder)
		}
		w.release(holder)
	}
	w.outer[c], w.holder[tuple] = p.Source(), c
	return ""
}

// quotesOwn reports whether an error quotes what came in for a flow of its
// sender's.
func (w *twin) quotesOwn(s *sent, p *lab.Packet) bool {
	quoted := p.Inner
	if s.kind != kindAlone {
		return quoted.Destination() == w.outer[s.of] || quoted.Destination() == s.source && p.Src == s.source.Addr()
	}
	holder := w.holder[tupleOf("udp", quoted.Destination(), quoted.Source())]
	return holder != nil && holder.near == s.source
}

// hasEnded reports whether there was a FIN or RST in the conversation whose
// tuple a packet has.
func (w *twin) hasEnded(s *sent) bool {
	if holder := w.holderOf(s); holder != nil {
		return holder.ended
	}
	return s.kind == kindAnswer && s.from == sendOutside && s.of.ended
}

// holderOf is the conversation that has the tuple of a packet between the node's
// own address and outside, nil if there is none.
func (w *twin) holderOf(s *sent) *conversation {
	switch {
	case s.from == sendOutside && (s.kind == kindGuess || s.kind == kindForward):
		return w.holder[tupleOf(s.of.proto, s.to, s.source)]
	case s.from == sendNode && s.kind == kindAnswer:
		return w.holder[tupleOf(s.of.proto, s.source, s.to)]
	}
	return nil
}

func (w *twin) release(c *conversation) {
	outer, ok := w.outer[c]
	if !ok {
		return
	}
	delete(w.outer, c)
	if tuple := tupleOf(c.proto, outer, c.far); w.holder[tuple] == c {
		delete(w.holder, tuple)
	}
}

// fresh reports whether the lab's netfilter translates, and opened a connection
// for the packet.
func (w *twin) fresh(s *sent) bool { return w.judge && w.opinion.fresh[uint16(s.number)] }

// invalid reports whether netfilter calls the packet INVALID.
func (w *twin) invalid(s *sent) bool { return w.opinion.invalid[uint16(s.number)] }

// nodesStray: what belongs to no connection of the node's passes as it is, and
// gets no tuple.
func (w *twin) nodesStray(s *sent) bool {
	return s.from == sendNode && w.invalid(s) && slices.ContainsFunc(w.sees[s.number], func(seen sight) bool {
		return seen.packet.Source() == s.source
	})
}

func tupleOf(proto string, outer, far netip.AddrPort) string { return fmt.Sprint(proto, outer, far) }

// outcomeOfGuess: who has the tuple in this lab gets it, or nobody does.
func (w *twin) outcomeOfGuess(s *sent) string {
	holder := w.holderOf(s)
	seen := w.sees[s.number]
	switch {
	case len(seen) == 0 && (holder == nil || holder.from == sendNode || holder.ended):
		return asHeld
	case holder == nil || len(seen) == 0:
		return fmt.Sprintf("fault: held by %v, %d times seen", holder, len(seen))
	}
	for _, one := range seen {
		if one.capture != holder.from || one.packet.Destination() != holder.near {
			return fmt.Sprintf("fault: held by %v, seen as %s", holder, one.packet)
		}
	}
	return asHeld
}
