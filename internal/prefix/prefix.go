// SPDX-License-Identifier: Apache-2.0

// Package prefix decides by longest prefix what happens to the source of a
// packet for a destination. Both datapaths, explain and the tests take their
// decisions from here.
package prefix

import (
	"cmp"
	"net/netip"
	"slices"
)

// Verdict says what happens to the source address of a packet.
type Verdict uint8

const (
	// Masquerade rewrites the source to an address of the node. It is the zero
	// value because it is also what happens where no prefix matches.
	Masquerade Verdict = iota
	// Keep leaves the source as it is.
	Keep
)

// String is "masquerade" or "keep".
func (v Verdict) String() string {
	if v == Keep {
		return "keep"
	}
	return "masquerade"
}

// Entry is a destination prefix and what is done for it.
type Entry struct {
	Prefix  netip.Prefix
	Verdict Verdict
}

// Lists is what a policy is made of, each in the user's order with duplicates
// kept. The prefixes are valid, masked and not IPv4-mapped IPv6.
type Lists struct {
	// LinkLocal keeps its source whatever the other lists say.
	LinkLocal []netip.Prefix
	// NonMasquerade keeps its source.
	NonMasquerade []netip.Prefix
	// Masquerade holds the exceptions inside NonMasquerade. A prefix that is
	// in both keeps its source.
	Masquerade []netip.Prefix
}

func (l Lists) clone() Lists {
	return Lists{
		LinkLocal:     slices.Clone(l.LinkLocal),
		NonMasquerade: slices.Clone(l.NonMasquerade),
		Masquerade:    slices.Clone(l.Masquerade),
	}
}

// entries are the prefixes with the verdict that their list gives them, in
// first-match order as far as prefixes of equal length go.
func (l Lists) entries() []Entry {
	all := make([]Entry, 0, len(l.LinkLocal)+len(l.NonMasquerade)+len(l.Masquerade))
	for _, p := range l.LinkLocal {
		all = append(all, Entry{p, Keep})
	}
	for _, p := range l.NonMasquerade {
		all = append(all, Entry{p, Keep})
	}
	for _, p := range l.Masquerade {
		all = append(all, Entry{p, Masquerade})
	}
	return all
}

// Policy is an immutable set of prefixes with their verdicts. It is safe for
// concurrent use.
type Policy struct {
	lists    Lists
	verdicts map[netip.Prefix]Verdict // effective, as Entries has them
	bits4    []int                    // the prefix lengths in use, longest first
	bits6    []int
}

// New makes a policy of lists, which it copies.
func New(lists Lists) *Policy {
	p := &Policy{lists: lists.clone(), verdicts: make(map[netip.Prefix]Verdict)}
	var seen4, seen6 [129]bool
	for _, e := range p.lists.entries() {
		if _, ok := p.verdicts[e.Prefix]; ok {
			continue // the first one decides, as it does in a chain of rules
		}
		if p.insideLinkLocal(e.Prefix) {
			e.Verdict = Keep
		}
		p.verdicts[e.Prefix] = e.Verdict
		if e.Prefix.Addr().Is4() {
			seen4[e.Prefix.Bits()] = true
		} else {
			seen6[e.Prefix.Bits()] = true
		}
	}
	p.bits4, p.bits6 = lengths(seen4), lengths(seen6)
	return p
}

func lengths(seen [129]bool) []int {
	var bits []int
	for n := len(seen) - 1; n >= 0; n-- {
		if seen[n] {
			bits = append(bits, n)
		}
	}
	return bits
}

func (p *Policy) insideLinkLocal(pfx netip.Prefix) bool {
	return slices.ContainsFunc(p.lists.LinkLocal, func(ll netip.Prefix) bool {
		return ll.Bits() <= pfx.Bits() && ll.Contains(pfx.Addr())
	})
}

// Lists gives a copy of what the policy was made of.
func (p *Policy) Lists() Lists { return p.lists.clone() }

// Lookup gives the entry that decides for addr: the link-local prefix that
// contains it, else the longest prefix that does. False means that no prefix
// contains it; the entry is then zero, and its verdict Masquerade is the right
// one. An IPv4-mapped IPv6 address counts as IPv4, a zone is ignored.
func (p *Policy) Lookup(addr netip.Addr) (Entry, bool) {
	addr = addr.Unmap().WithZone("")
	for _, ll := range p.lists.LinkLocal {
		if ll.Contains(addr) {
			return Entry{ll, Keep}, true
		}
	}
	bits := p.bits6
	if addr.Is4() {
		bits = p.bits4
	}
	for _, n := range bits {
		pfx, err := addr.Prefix(n)
		if err != nil {
			break // only an address of neither family gets here
		}
		if v, ok := p.verdicts[pfx]; ok {
			return Entry{pfx, v}, true
		}
	}
	return Entry{}, false
}

// Entries gives each distinct prefix of a family once with its effective
// verdict, the longest prefix first, then by address: what a longest-prefix
// trie needs in order to decide as Lookup does. A Masquerade prefix inside
// link-local is Keep here, as a trie knows no order.
func (p *Policy) Entries(is6 bool) []Entry {
	var entries []Entry
	for pfx, v := range p.verdicts {
		if pfx.Addr().Is6() == is6 {
			entries = append(entries, Entry{pfx, v})
		}
	}
	slices.SortFunc(entries, func(a, b Entry) int {
		return cmp.Or(byLength(a, b), a.Prefix.Addr().Compare(b.Prefix.Addr()))
	})
	return entries
}

// Rules gives a family's prefixes in the order in which the first match decides
// as Lookup does, with the verdict of the list that they stand in: link-local,
// then NonMasquerade in the user's order with duplicates. A Masquerade list
// needs more: everything behind link-local is then sorted by prefix length, the
// longest first, otherwise in the user's order. Behind the last entry stands
// Masquerade.
func (p *Policy) Rules(is6 bool) []Entry {
	rules := p.lists.entries()
	if len(p.lists.Masquerade) > 0 {
		slices.SortStableFunc(rules[len(p.lists.LinkLocal):], byLength)
	}
	return slices.DeleteFunc(rules, func(e Entry) bool { return e.Prefix.Addr().Is6() != is6 })
}

func byLength(a, b Entry) int { return cmp.Compare(b.Prefix.Bits(), a.Prefix.Bits()) }
