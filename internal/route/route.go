// SPDX-License-Identifier: Apache-2.0

// Package route knows the node's uplinks and the address that MASQUERADE would
// pick on each of them, and follows both through netlink.
package route

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// Snapshot is the node's network at one moment. It is immutable.
type Snapshot struct {
	// Uplinks in the order of their interface index.
	Uplinks []Uplink

	// Addresses are all unicast addresses of the node, on every link, in
	// ascending order. Without 127.0.0.0/8, ::1 and fe80::/10, which mean
	// something else on every link.
	Addresses []netip.Addr

	// Broadcasts are the IPv4 broadcast addresses of the uplinks' subnets, in
	// ascending order.
	Broadcasts []netip.Addr
}

// UnknownHeader is the header length of a link of which nobody knows where in its
// frames the IP header is.
const UnknownHeader = -1

// Uplink is a link that leads out of the node, as found or as named by
// --interfaces.
type Uplink struct {
	Index     int
	Name      string
	Type      uint16           // ARPHRD_* of include/uapi/linux/if_arp.h
	HeaderLen int              // bytes before the IP header: 14, or 0 without Ethernet, or UnknownHeader
	Tagged    bool             // a VLAN's tag may come in addition to the header
	MAC       net.HardwareAddr // nil without Ethernet header
	Up        bool             // administratively; what is down has no rules

	// V4 maps next hops, V6 destinations, to the masquerade address: the
	// longest prefix that contains the address decides. Longest prefix first,
	// then by address. Empty: no usable address.
	V4, V6 []AddressRule
}

// AddressRule says which masquerade address goes with a range of next hops
// (IPv4) or destinations (IPv6).
type AddressRule struct {
	Prefix  netip.Prefix
	Address netip.Addr
}

// Address4 is the address that MASQUERADE picks for packets that leave through
// the uplink towards nextHop: the gateway if it is an IPv4 one, otherwise the
// destination. False: no usable address.
func (u *Uplink) Address4(nextHop netip.Addr) (netip.Addr, bool) {
	return lookup(u.V4, nextHop.Unmap())
}

// Address6 is the address that MASQUERADE picks for packets to dst that leave
// through the uplink. False: no usable address, or a destination that is never
// translated (link-local, multicast).
func (u *Uplink) Address6(dst netip.Addr) (netip.Addr, bool) {
	if !reachable6(dst) {
		return netip.Addr{}, false
	}
	return lookup(u.V6, dst.WithZone(""))
}

// lookup finds the longest prefix, which comes first.
func lookup(rules []AddressRule, a netip.Addr) (netip.Addr, bool) {
	for _, r := range rules {
		if r.Prefix.Contains(a) {
			return r.Address, true
		}
	}
	return netip.Addr{}, false
}

// Uplink returns the uplink with this interface index, or nil.
func (s *Snapshot) Uplink(index int) *Uplink {
	for i := range s.Uplinks {
		if s.Uplinks[i].Index == index {
			return &s.Uplinks[i]
		}
	}
	return nil
}

// Masquerade is the address that a packet to dst gets when it leaves by path.
// False: the path leaves through no uplink, or that has no usable address.
func (s *Snapshot) Masquerade(path Path, dst netip.Addr) (netip.Addr, bool) {
	u := s.Uplink(path.LinkIndex)
	if u == nil || path.Local {
		return netip.Addr{}, false
	}
	if !dst.Unmap().Is4() {
		return u.Address6(dst)
	}
	if path.NextHop.Is4() {
		return u.Address4(path.NextHop)
	}
	return u.Address4(dst)
}

// Equal reports whether both snapshots say the same.
func (s *Snapshot) Equal(o *Snapshot) bool {
	if s == nil || o == nil {
		return s == o
	}
	return slices.EqualFunc(s.Uplinks, o.Uplinks, Uplink.equal) && slices.Equal(s.Addresses, o.Addresses) &&
		slices.Equal(s.Broadcasts, o.Broadcasts)
}

func (u Uplink) equal(o Uplink) bool {
	return u.Index == o.Index && u.Name == o.Name && u.Type == o.Type && u.HeaderLen == o.HeaderLen && u.Tagged == o.Tagged && u.Up == o.Up &&
		bytes.Equal(u.MAC, o.MAC) && slices.Equal(u.V4, o.V4) && slices.Equal(u.V6, o.V6)
}

// String is one line for the log: each uplink with the addresses that it gives.
func (s *Snapshot) String() string {
	parts := make([]string, 0, len(s.Uplinks)+1)
	for _, u := range s.Uplinks {
		parts = append(parts, u.String())
	}
	return strings.Join(append(parts, fmt.Sprintf("%d addresses", len(s.Addresses))), ", ")
}

// String is the name and the addresses: "eth0 192.0.2.1 2001:db8::1", "ppp0 down".
func (u Uplink) String() string {
	if !u.Up {
		return u.Name + " down"
	}
	var b strings.Builder
	b.WriteString(u.Name)
	for _, a := range slices.Concat(distinct(u.V4), distinct(u.V6)) {
		b.WriteString(" " + a.String())
	}
	if len(u.V4)+len(u.V6) == 0 {
		b.WriteString(" without address")
	}
	return b.String()
}

// distinct lists the addresses of the rules, the one of the shortest prefix
// first, each once.
func distinct(rules []AddressRule) []netip.Addr {
	var addrs []netip.Addr
	for _, r := range slices.Backward(rules) {
		if !slices.Contains(addrs, r.Address) {
			addrs = append(addrs, r.Address)
		}
	}
	return addrs
}
