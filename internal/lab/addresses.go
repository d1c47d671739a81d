// SPDX-License-Identifier: Apache-2.0

package lab

import "net/netip"

// Pair is one host's address in each family.
type Pair struct{ V4, V6 netip.Addr }

// Addr is the address in one family.
func (p Pair) Addr(is6 bool) netip.Addr {
	if is6 {
		return p.V6
	}
	return p.V4
}

// Addresses are the hosts of a lab. They are the same in every lab, since no
// lab sees another.
type Addresses struct {
	Node      Pair // eth0: what MASQUERADE picks for most destinations
	Secondary Pair // eth0: secondary in IPv4, deprecated in IPv6
	Subnet2   Pair // eth0: primary of a second subnet
	Uplink2   Pair // eth1, with Options.SecondUplink
	PodGate   Pair // the bridge
	VIP       Pair // routed to the node, but nobody's address, see Lab.Forward

	Router     Pair // the gateway behind eth0
	Remote     Pair // outside
	Remote2    Pair // outside
	Remote3    Pair // outside
	ViaSubnet2 Pair // outside; in IPv4 the next hop, in IPv6 the destination makes Subnet2 its masquerade address
	ViaUplink2 Pair // outside, through eth1, with Options.SecondUplink
	Client     Pair // outside; tests open connections to pods and the node from here
	Inside     Pair // beyond the router, in the ranges that are exempt by default
	Inside2    Pair // the same
	Exception  Pair // beyond the router, in 10.99.0.0/16 and fd00:99::/32: for tests of masqueradeCIDRs
	LinkLocal  Pair // beyond the router; IPv4 only
}

func pair(v4, v6 string) Pair {
	return Pair{V4: netip.MustParseAddr(v4), V6: netip.MustParseAddr(v6)}
}

func addresses() Addresses {
	return Addresses{
		Node:      pair("203.0.113.10", "2001:db8:113::10"),
		Secondary: pair("203.0.113.11", "2001:db8:113::11"),
		Subnet2:   pair("198.51.100.10", "2001:db8:51::10"),
		Uplink2:   pair("192.0.2.10", "2001:db8:2::10"),
		PodGate:   pair("10.244.0.1", "fd00:10:244::1"),
		VIP:       pair("198.18.0.10", "2001:db8:18::10"),

		Router:     pair("203.0.113.1", "2001:db8:113::1"),
		Remote:     pair("8.8.8.8", "2001:4860:4860::8888"),
		Remote2:    pair("8.8.4.4", "2001:4860:4860::8844"),
		Remote3:    pair("5.5.5.5", "2a00:5:5::5"),
		ViaSubnet2: pair("45.45.45.45", "2001:db8:51:1::45"),
		ViaUplink2: pair("1.1.1.1", "2606:4700:4700::1111"),
		Client:     pair("9.9.9.9", "2620:fe::9"),
		Inside:     pair("10.100.0.9", "fd00:100::9"),
		Inside2:    pair("192.168.77.9", "fd00:77::9"),
		Exception:  pair("10.99.0.9", "fd00:99::9"),
		LinkLocal:  Pair{V4: netip.MustParseAddr("169.254.169.254")},
	}
}

// outside are the addresses that the namespace outside has.
func (a Addresses) outside() []netip.Addr {
	var all []netip.Addr
	for _, p := range []Pair{
		a.Remote, a.Remote2, a.Remote3, a.ViaSubnet2, a.ViaUplink2, a.Client,
		a.Inside, a.Inside2, a.Exception, a.LinkLocal,
	} {
		for _, addr := range []netip.Addr{p.V4, p.V6} {
			if addr.IsValid() {
				all = append(all, addr)
			}
		}
	}
	return all
}

// PodRanges are the ranges in which all pods of all labs have their addresses.
func PodRanges() []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix("10.244.0.0/16"),
		netip.MustParsePrefix("fd00:10:244::/48"),
	}
}

// IsPod reports whether addr lies in PodRanges.
func IsPod(addr netip.Addr) bool {
	for _, p := range PodRanges() {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

// podAddress is the address of the n-th pod, counted from 0, on the bridge or
// on a link of its own.
func podAddress(bridged bool, n int) Pair {
	v4, v6 := [4]byte{10, 244, 0, byte(2 + n)}, netip.MustParseAddr("fd00:10:244::").As16()
	if !bridged {
		v4[2], v6[7] = 1, 1
	}
	v6[15] = byte(2 + n)
	return Pair{V4: netip.AddrFrom4(v4), V6: netip.AddrFrom16(v6)}
}
