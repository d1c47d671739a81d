// SPDX-License-Identifier: Apache-2.0

package route

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// candidate6 is one address of the candidate set of RFC 6724, section 4.
type candidate6 struct {
	addr     netip.Addr
	bits     int   // prefix length
	flags    uint8 // IFA_F_*
	outgoing bool  // on the interface that the packet leaves through
	sysctl   ipv6Settings
}

// score6 has one figure for each rule, in the order of the kernel's
// IPV6_SADDR_RULE_*. Greater is better, the first difference decides.
type score6 [8]int

// select6 is ipv6_dev_get_saddr of net/ipv6/addrconf.c with the kernel's default
// label table: the candidate with the best score, among equals the first. Rule 1
// is left out, because packets to the node's own addresses do not leave it, and
// rule 4, which is about Mobile IPv6. False: no candidates.
func select6(candidates []candidate6, dst netip.Addr) (netip.Addr, bool) {
	var best netip.Addr
	var high score6
	for _, c := range candidates {
		if s := c.score(dst); !best.IsValid() || slices.Compare(s[:], high[:]) > 0 {
			best, high = c.addr, s
		}
	}
	return best, best.IsValid()
}

// score is ipv6_get_saddr_eval for all rules.
func (c candidate6) score(dst netip.Addr) score6 {
	temporary := c.flags&unix.IFA_F_TEMPORARY != 0
	return score6{
		scopeDistance(scope6(c.addr), scope6(dst)),   // RFC 6724, section 5, rule 2
		truth(c.preferred()),                         // rule 3
		truth(c.outgoing),                            // rule 5
		truth(label6(c.addr) == label6(dst)),         // rule 6
		truth(temporary == c.sysctl.preferTemporary), // rule 7
		truth(isORCHID(c.addr) == isORCHID(dst)),     // RFC 4843, section 5
		min(commonPrefixLen(c.addr, dst), c.bits),    // rule 8
		truth(c.flags&unix.IFA_F_OPTIMISTIC == 0),    // RFC 4429, section 3.1
	}
}

// preferred reports whether the address is neither deprecated nor optimistic, or
// of a kind that is always preferred (ipv6_saddr_preferred).
func (c candidate6) preferred() bool {
	avoid := uint8(unix.IFA_F_DEPRECATED)
	if !c.sysctl.useOptimistic {
		avoid |= unix.IFA_F_OPTIMISTIC
	}
	return c.flags&avoid == 0 || c.addr.Is4In6() || isCompatible(c.addr) || isLoopback(c.addr)
}

// candidates6 lists the addresses that ipv6_dev_get_saddr considers for packets
// that leave through l, in its order. Those of link-local scope are left out:
// they are chosen only when there is nothing else, and must not stand for a pod
// beyond the link.
func (n node) candidates6(l link, addrs map[int][]address) []candidate6 {
	links := []int{l.index}
	if !l.v6.oifAddressesOnly {
		vrf := n.vrf(l)
		links = append(links, vrf)
		for _, index := range n.domain(vrf) {
			if index != l.index && index != vrf {
				links = append(links, index)
			}
		}
	}
	var candidates []candidate6
	for _, index := range links {
		for _, a := range addrs[index] {
			if usable6(a) {
				candidates = append(candidates, candidate6{
					addr:     a.local,
					bits:     a.subnet.Bits(),
					flags:    a.flags,
					outgoing: index == l.index,
					sysctl:   n.links[index].v6,
				})
			}
		}
	}
	return candidates
}

// usable6 leaves out addresses that are not assigned yet (RFC 4862), and those
// of link-local scope.
func usable6(a address) bool {
	tentative := a.flags&unix.IFA_F_TENTATIVE != 0 && a.flags&unix.IFA_F_OPTIMISTIC == 0
	return a.local.Is6() && !tentative && reachable6(a.local)
}

// scopeDistance prefers the smallest scope that suffices, then the largest.
func scopeDistance(scope, want int) int {
	if scope >= want {
		return -scope
	}
	return scope - 128
}

// scope6 is the scope part of __ipv6_addr_type in net/ipv6/addrconf_core.c, for
// unicast addresses.
func scope6(a netip.Addr) int {
	switch {
	case isLinkLocal(a), isLoopback(a):
		return 0x2
	case isSiteLocal(a):
		return 0x5
	}
	return 0xe
}

// reachable6 reports whether an IPv6 address can stand in a packet between links.
func reachable6(a netip.Addr) bool {
	return a.Is6() && !isLinkLocal(a) && !isLoopback(a) && !a.IsUnspecified() && a.As16()[0] != 0xff
}

// The methods of netip.Addr look through an IPv4-mapped address, the kernel does
// not. So these look at the bytes.

func isLinkLocal(a netip.Addr) bool {
	b := a.As16()
	return a.Is6() && b[0] == 0xfe && b[1]&0xc0 == 0x80
}

func isSiteLocal(a netip.Addr) bool {
	b := a.As16()
	return b[0] == 0xfe && b[1]&0xc0 == 0xc0
}

func isLoopback(a netip.Addr) bool { return a == netip.IPv6Loopback() }

func isCompatible(a netip.Addr) bool {
	b := a.As16()
	return [12]byte(b[:12]) == [12]byte{}
}

// isORCHID: RFC 4843, 2001:10::/28.
func isORCHID(a netip.Addr) bool {
	b := a.As16()
	return [3]byte(b[:3]) == [3]byte{0x20, 0x01, 0x00} && b[3]&0xf0 == 0x10
}

// label6 is the label in the policy table of RFC 6724, section 2.1, as in
// ip6addrlbl_init_table of net/ipv6/addrlabel.c.
func label6(a netip.Addr) int {
	b := a.As16()
	switch {
	case isLoopback(a):
		return 0
	case isCompatible(a):
		return 3
	case a.Is4In6():
		return 4
	case [4]byte(b[:4]) == [4]byte{0x20, 0x01}: // 2001::/32
		return 6
	case isORCHID(a):
		return 7
	case b[0] == 0x20 && b[1] == 0x02: // 2002::/16
		return 2
	case b[0] == 0x3f && b[1] == 0xfe: // 3ffe::/16
		return 12
	case isSiteLocal(a):
		return 11
	case b[0]&0xfe == 0xfc: // fc00::/7
		return 5
	}
	return 1
}

func commonPrefixLen(a, b netip.Addr) int {
	x, y := a.As16(), b.As16()
	if high := binary.BigEndian.Uint64(x[:8]) ^ binary.BigEndian.Uint64(y[:8]); high != 0 {
		return bits.LeadingZeros64(high)
	}
	return 64 + bits.LeadingZeros64(binary.BigEndian.Uint64(x[8:])^binary.BigEndian.Uint64(y[8:]))
}

func truth(b bool) int {
	if b {
		return 1
	}
	return 0
}
