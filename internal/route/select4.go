// SPDX-License-Identifier: Apache-2.0

package route

import (
	"cmp"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// select4 is inet_select_addr(dev, nextHop, RT_SCOPE_UNIVERSE) of
// net/ipv4/devinet.c over the device's addresses: the first primary one whose
// subnet holds the next hop, else the first primary one.
func select4(own []address, nextHop netip.Addr) netip.Addr {
	var first netip.Addr
	for _, a := range own {
		if !usable4(a) {
			continue
		}
		if a.subnet.Contains(nextHop) {
			return a.local
		}
		if !first.IsValid() {
			first = a.local
		}
	}
	return first
}

// usable4 leaves out secondary addresses and those of a narrower scope than
// universe.
func usable4(a address) bool {
	return a.local.Is4() && a.flags&unix.IFA_F_SECONDARY == 0 && a.scope == unix.RT_SCOPE_UNIVERSE
}

// rules4 are the masquerade addresses of a link by next hop. A link without
// address of its own borrows one, as the kernel does: from its VRF, then from
// the first link of the same VRF (or of none) that has one.
func (n node) rules4(l link, addrs map[int][]address) []AddressRule {
	if own := slices.DeleteFunc(slices.Clone(addrs[l.index]), func(a address) bool { return !usable4(a) }); len(own) > 0 {
		return compile4(own)
	}
	vrf := n.vrf(l)
	for _, index := range append([]int{vrf}, n.domain(vrf)...) {
		if a := select4(addrs[index], netip.Addr{}); a.IsValid() {
			return []AddressRule{{Prefix: netip.PrefixFrom(netip.IPv4Unspecified(), 0), Address: a}}
		}
	}
	return nil
}

// compile4 turns the first match of select4 into longest prefixes: next hops in
// a subnet and in no smaller one are in that subnet and in those around it.
// There is at least one address, and all are usable.
func compile4(own []address) []AddressRule {
	prefixes := []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0)}
	for _, a := range own {
		prefixes = append(prefixes, a.subnet)
	}
	// Each rule goes to the front, so the last one here comes first there.
	slices.SortFunc(prefixes, func(a, b netip.Prefix) int {
		return cmp.Or(cmp.Compare(a.Bits(), b.Bits()), b.Addr().Compare(a.Addr()))
	})

	var rules []AddressRule
	for _, p := range slices.Compact(prefixes) {
		pick := own[0].local
		for _, a := range own {
			if a.subnet.Bits() <= p.Bits() && a.subnet.Contains(p.Addr()) {
				pick = a.local
				break
			}
		}
		if around, ok := lookup(rules, p.Addr()); !ok || around != pick {
			rules = slices.Insert(rules, 0, AddressRule{Prefix: p, Address: pick})
		}
	}
	return rules
}
