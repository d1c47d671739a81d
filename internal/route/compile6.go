// SPDX-License-Identifier: Apache-2.0

package route

import (
	"cmp"
	"net/netip"
	"slices"
)

// compile6 turns select6 into as few longest-prefix rules as possible. For
// destinations that are never translated (reachable6 is false) they may say
// anything. The candidates are reachable ones; without any there are no rules.
//
// What select6 chooses depends on the scope and the label of the destination and
// on how many bits it has in common with each candidate. So the address space is
// cut into ranges inside which all of this is the same, and select6 is asked once
// in each. The rest is ORTC (Draves et al., INFOCOM 1999): from the leaves to the
// root it finds out which answers a prefix could give without costing a rule more
// than another, from the root to the leaves it takes one and leaves out the rules
// that a longer prefix has no need of.
func compile6(candidates []candidate6) []AddressRule {
	everywhere := netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	candidates = contenders(candidates)
	switch len(candidates) {
	case 0:
		return nil
	case 1:
		return []AddressRule{{Prefix: everywhere, Address: candidates[0].addr}}
	}
	cuts := cuts6()
	for _, c := range candidates {
		cuts = append(cuts, netip.PrefixFrom(c.addr, c.bits).Masked())
	}
	root := grow(everywhere, cuts, func(dst netip.Addr) []netip.Addr {
		if !reachable6(dst) {
			return nil
		}
		a, _ := select6(candidates, dst)
		return []netip.Addr{a}
	})
	rules := root.rules(netip.Addr{}, nil)
	slices.SortFunc(rules, func(a, b AddressRule) int {
		return cmp.Or(cmp.Compare(b.Prefix.Bits(), a.Prefix.Bits()), a.Prefix.Addr().Compare(b.Prefix.Addr()))
	})
	return rules
}

// maxBorrowed is how many addresses of other links are considered for a link that
// has none of its own. IPVS nodes have thousands, one for each service.
const maxBorrowed = 16

// contenders leaves out candidates that lose to another one whatever the
// destination: of the same scope, but by rule 3 or 5.
func contenders(candidates []candidate6) []candidate6 {
	rank := func(c candidate6) int { return 2*truth(c.preferred()) + truth(c.outgoing) }
	best := map[int]int{} // by scope
	for _, c := range candidates {
		best[scope6(c.addr)] = max(best[scope6(c.addr)], rank(c))
	}
	var left []candidate6
	borrowed := 0
	for _, c := range candidates {
		if rank(c) < best[scope6(c.addr)] || !c.outgoing && borrowed == maxBorrowed {
			continue
		}
		left = append(left, c)
		borrowed += 1 - truth(c.outgoing)
	}
	return left
}

// cuts6 are the prefixes at which scope6, label6, isORCHID or reachable6 change.
func cuts6() []netip.Prefix {
	var cuts []netip.Prefix
	for _, p := range []string{
		"::/96", "::1/128", "::ffff:0:0/96", "2001::/32", "2001:10::/28", "2002::/16", "3ffe::/16",
		"fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8",
	} {
		cuts = append(cuts, netip.MustParsePrefix(p))
	}
	return cuts
}

// region is a node of the binary trie. It has two halves or none.
type region struct {
	prefix  netip.Prefix
	halves  []region
	answers []netip.Addr // the equally good ones; none: any will do
}

// grow halves the prefix until no cut is inside, and asks at the leaves.
func grow(p netip.Prefix, cuts []netip.Prefix, ask func(netip.Addr) []netip.Addr) region {
	var inside []netip.Prefix
	for _, c := range cuts {
		if c.Bits() > p.Bits() && p.Contains(c.Addr()) {
			inside = append(inside, c)
		}
	}
	if len(inside) == 0 {
		return region{prefix: p, answers: ask(p.Addr())}
	}
	low, high := halve(p)
	r := region{prefix: p, halves: []region{grow(low, inside, ask), grow(high, inside, ask)}}
	r.answers = merge(r.halves[0].answers, r.halves[1].answers)
	return r
}

// merge is what both could answer, otherwise what either could.
func merge(a, b []netip.Addr) []netip.Addr {
	if len(a) == 0 {
		return b
	}
	if len(b) == 0 {
		return a
	}
	var both []netip.Addr
	for _, x := range a {
		if slices.Contains(b, x) {
			both = append(both, x)
		}
	}
	if len(both) > 0 {
		return both
	}
	return slices.Concat(a, b)
}

// rules appends the rules of the region, given what the rules around it answer.
func (r region) rules(around netip.Addr, rules []AddressRule) []AddressRule {
	if len(r.answers) > 0 && !slices.Contains(r.answers, around) {
		around = r.answers[0]
		rules = append(rules, AddressRule{Prefix: r.prefix, Address: around})
	}
	for _, half := range r.halves {
		rules = half.rules(around, rules)
	}
	return rules
}

// halve splits a prefix that is no single address.
func halve(p netip.Prefix) (low, high netip.Prefix) {
	b := p.Addr().As16()
	b[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	return netip.PrefixFrom(p.Addr(), p.Bits()+1), netip.PrefixFrom(netip.AddrFrom16(b), p.Bits()+1)
}
