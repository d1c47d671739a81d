// SPDX-License-Identifier: Apache-2.0

package route

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// linksOf numbers the links from 1. All are up.
func linksOf(links ...link) map[int]link {
	m := map[int]link{}
	for i, l := range links {
		l.index = i + 1
		l.flags ^= unix.IFF_UP
		m[l.index] = l
	}
	return m
}

// What this kernel may not have is tested without it.
func TestSelection(t *testing.T) {
	const both = carriesRoute | carriesGateway
	for _, tt := range []struct {
		name   string
		links  map[int]link
		uses   map[int]routeUse
		served map[int]bool
		want   []int
	}{
		{"hardware with a route", linksOf(link{}), map[int]routeUse{1: carriesRoute}, nil, []int{1}},
		{"hardware without route", linksOf(link{}), nil, nil, nil},
		{"down", linksOf(link{flags: unix.IFF_UP}), map[int]routeUse{1: both}, nil, nil},
		{"down, but served", linksOf(link{flags: unix.IFF_UP}), nil, map[int]bool{1: true}, []int{1}},
		{"served, but gone", linksOf(link{}), nil, map[int]bool{2: true}, nil},
		{"dummy", linksOf(link{kind: "dummy"}), map[int]routeUse{1: both}, nil, nil},
		{"loopback", linksOf(link{flags: unix.IFF_LOOPBACK}), map[int]routeUse{1: both}, map[int]bool{1: true}, nil},
		{"vlan", linksOf(link{}, link{kind: "vlan"}), map[int]routeUse{2: carriesRoute}, nil, []int{2}},
		{"wireguard", linksOf(link{kind: "wireguard", hwType: unix.ARPHRD_NONE}), map[int]routeUse{1: carriesRoute}, nil, []int{1}},
		{"netkit to a pod", linksOf(link{kind: "netkit"}), map[int]routeUse{1: carriesRoute}, nil, nil},
		{"netkit with a gateway", linksOf(link{kind: "netkit"}), map[int]routeUse{1: both}, nil, []int{1}},
		{"bond and its ports", linksOf(link{kind: "bond"}, link{master: 1}, link{master: 1}),
			map[int]routeUse{1: both, 2: both, 3: carriesRoute}, nil, []int{1}},
		{"served link becomes a port", linksOf(link{kind: "bond"}, link{master: 1}), nil, map[int]bool{2: true}, nil},
		{"port of an unknown master", linksOf(link{master: 9}), map[int]routeUse{1: both}, nil, nil},
		{"port of a synthetic device", linksOf(link{}, link{master: 1}), map[int]routeUse{1: both, 2: both}, nil, []int{1}},
		{"VRF and its links", linksOf(link{kind: "vrf"}, link{master: 1}, link{kind: "veth", master: 1}),
			map[int]routeUse{2: carriesRoute, 3: carriesRoute}, nil, []int{2}},
		{"team", linksOf(link{kind: "team"}, link{master: 1}), map[int]routeUse{1: carriesRoute, 2: carriesRoute}, nil, []int{1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := node{links: tt.links, uses: tt.uses, served: tt.served}.uplinks(nil)
			if !slices.Equal(got, tt.want) {
				t.Errorf("uplinks %v, want %v", got, tt.want)
			}
		})
	}
}

func TestSelectionByName(t *testing.T) {
	n := node{links: linksOf(link{name: "eth0"}, link{name: "eth1", flags: unix.IFF_UP}, link{name: "dummy0", kind: "dummy"},
		link{name: "lo", flags: unix.IFF_LOOPBACK}, link{name: "bond0", kind: "bond"}, link{name: "eth2", master: 5}),
		served: map[int]bool{5: true}}
	for _, tt := range []struct {
		patterns []string
		want     []int
	}{
		{[]string{"eth0"}, []int{1}},
		{[]string{"eth?"}, []int{1, 2}},
		{[]string{"dummy0", "eth0"}, []int{1, 3}},
		{[]string{"*"}, []int{1, 2, 3, 5}},
		{[]string{"wlan*"}, nil},
	} {
		if got := n.uplinks(tt.patterns); !slices.Equal(got, tt.want) {
			t.Errorf("%q: uplinks %v, want %v", tt.patterns, got, tt.want)
		}
	}
}

func TestRoutesThatCount(t *testing.T) {
	via := netip.MustParseAddr("192.0.2.254")
	for _, tt := range []struct {
		dst  string
		kind uint8
		via  netip.Addr
		want routeUse
	}{
		{"192.0.2.0/24", unix.RTN_UNICAST, netip.Addr{}, carriesRoute},
		{"192.0.2.0/24", unix.RTN_UNICAST, via, carriesRoute | carriesGateway},
		{"0.0.0.0/0", unix.RTN_UNICAST, netip.Addr{}, carriesRoute | carriesGateway},
		{"::/0", unix.RTN_UNICAST, netip.Addr{}, carriesRoute | carriesGateway},
		{"169.254.169.254/32", unix.RTN_UNICAST, netip.Addr{}, carriesRoute},
		{"fe80::/64", unix.RTN_UNICAST, netip.Addr{}, 0},
		{"fe80::1/128", unix.RTN_UNICAST, via, 0},
		{"ff00::/8", unix.RTN_UNICAST, netip.Addr{}, 0},
		{"ff00::/8", unix.RTN_MULTICAST, netip.Addr{}, 0},
		{"224.0.0.0/4", unix.RTN_UNICAST, netip.Addr{}, 0},
		{"192.0.2.1/32", unix.RTN_LOCAL, netip.Addr{}, 0},
		{"192.0.2.255/32", unix.RTN_BROADCAST, netip.Addr{}, 0},
		{"2001:db8::/128", unix.RTN_ANYCAST, netip.Addr{}, 0},
		{"0.0.0.0/0", unix.RTN_BLACKHOLE, netip.Addr{}, 0},
		{"0.0.0.0/0", unix.RTN_THROW, netip.Addr{}, 0},
	} {
		sum := newSummary()
		sum.add(route{kind: tt.kind, dst: netip.MustParsePrefix(tt.dst), hops: []hop{{link: 3, gateway: tt.via}}})
		if got := sum.links[3]; got != tt.want {
			t.Errorf("%s of type %d via %v: %b, want %b", tt.dst, tt.kind, tt.via, got, tt.want)
		}
	}
}

// A new route makes all routes be listed only when it could make an uplink.
func TestRoutesThatMatter(t *testing.T) {
	tr := &Tracker{
		links:  linksOf(link{}, link{}, link{kind: "veth"}),
		served: map[int]bool{1: true},
	}
	gateway := netip.MustParseAddr("192.0.2.254")
	for _, tt := range []struct {
		name string
		hops []hop
		want bool
	}{
		{"through an uplink", []hop{{1, gateway}}, false},
		{"through another link", []hop{{2, netip.Addr{}}}, true},
		{"to a pod", []hop{{3, netip.Addr{}}}, false},
		{"via a gateway behind a veth", []hop{{3, gateway}}, true},
		{"through a link not seen yet", []hop{{9, netip.Addr{}}}, true},
		{"one hop of several", []hop{{1, gateway}, {2, gateway}}, true},
	} {
		r := route{kind: unix.RTN_UNICAST, dst: netip.MustParsePrefix("10.0.0.0/8"), hops: tt.hops}
		if got := tr.matters(r); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
	tr.patterns = []string{"eth0"}
	if tr.matters(route{kind: unix.RTN_UNICAST, dst: netip.MustParsePrefix("10.0.0.0/8"), hops: []hop{{2, netip.Addr{}}}}) {
		t.Error("a route matters although the uplinks are named")
	}
}

func TestHeaderLength(t *testing.T) {
	for hwType, want := range map[uint16]int{
		unix.ARPHRD_ETHER: 14, unix.ARPHRD_NONE: 0, unix.ARPHRD_PPP: 0, unix.ARPHRD_TUNNEL: 0, unix.ARPHRD_TUNNEL6: 0,
		unix.ARPHRD_SIT: 0, unix.ARPHRD_RAWIP: 0, unix.ARPHRD_LOOPBACK: 14,
		unix.ARPHRD_INFINIBAND: UnknownHeader, unix.ARPHRD_IEEE1394: UnknownHeader, unix.ARPHRD_IEEE80211: UnknownHeader,
	} {
		if got := headerLen(link{hwType: hwType}); got != want {
			t.Errorf("ARPHRD %d: %d bytes, want %d", hwType, got, want)
		}
	}
	for remote, want := range map[string]int{
		"192.0.2.1": 0, "2001:db8::1": 0, "0.0.0.0": UnknownHeader, "::": UnknownHeader, "239.0.0.1": UnknownHeader, "ff02::1": UnknownHeader,
	} {
		a := netip.MustParseAddr(remote)
		l := link{hwType: unix.ARPHRD_IPGRE, remote: string(a.AsSlice())}
		if a.Is6() {
			l.hwType = unix.ARPHRD_IP6GRE
		}
		if got := headerLen(l); got != want {
			t.Errorf("GRE to %s: %d bytes, want %d", remote, got, want)
		}
	}
}

// A VLAN may have its own tag in its frames, but not that of another below it.
func TestTagsInFrames(t *testing.T) {
	links := linksOf(link{hwType: unix.ARPHRD_ETHER},
		link{hwType: unix.ARPHRD_ETHER, lower: 1, tagged: true}, link{hwType: unix.ARPHRD_ETHER, lower: 1}, // VLANs on it
		link{hwType: unix.ARPHRD_ETHER, lower: 2}, link{hwType: unix.ARPHRD_ETHER, lower: 3, tagged: true}) // VLANs on these
	for index, want := range map[int]Uplink{
		1: {HeaderLen: 14}, 2: {HeaderLen: 14, Tagged: true}, 3: {HeaderLen: 14}, 4: {HeaderLen: UnknownHeader}, 5: {HeaderLen: 14, Tagged: true},
	} {
		if got := (node{links: links}).uplink(links[index], nil); got.HeaderLen != want.HeaderLen || got.Tagged != want.Tagged {
			t.Errorf("link %d: %d bytes, tagged %t, want %d and %t", index, got.HeaderLen, got.Tagged, want.HeaderLen, want.Tagged)
		}
	}
}

// Links of a VRF borrow from it, and from each other, but not from outside.
func TestAddressesOfAVRF(t *testing.T) {
	// 1 lo, 2 outside, 3 a link in the VRF, 4 the uplink in it, 5 the VRF.
	links := linksOf(link{flags: unix.IFF_LOOPBACK}, link{}, link{master: 5}, link{master: 5}, link{kind: "vrf"})
	all := map[int][]address{}
	for i := 1; i <= 5; i++ {
		for _, text := range []string{fmt.Sprintf("10.0.0.%d", i), fmt.Sprintf("2001:db8::%d", i)} {
			local := netip.MustParseAddr(text)
			all[i] = append(all[i], address{link: i, local: local, subnet: netip.PrefixFrom(local, 0).Masked()})
		}
	}
	for _, tt := range []struct {
		uplink int
		with   []int // links that have addresses
		want   string
	}{
		{4, []int{1, 2, 3, 4, 5}, "[{0.0.0.0/0 10.0.0.4}] [{::/0 2001:db8::4}]"},
		{4, []int{1, 2, 3, 5}, "[{0.0.0.0/0 10.0.0.5}] [{::/0 2001:db8::5}]"},
		{4, []int{1, 2, 3}, "[{0.0.0.0/0 10.0.0.3}] [{::/0 2001:db8::3}]"},
		{4, []int{1, 2}, "[] []"},
		{2, []int{1, 3, 4, 5}, "[{0.0.0.0/0 10.0.0.1}] [{::/0 2001:db8::1}]"},
		{2, []int{3, 4, 5}, "[] []"},
	} {
		addrs := map[int][]address{}
		for _, i := range tt.with {
			addrs[i] = all[i]
		}
		n := node{links: links}
		got := fmt.Sprint(n.rules4(links[tt.uplink], addrs), " ", compile6(n.candidates6(links[tt.uplink], addrs)))
		if got != tt.want {
			t.Errorf("uplink %d, addresses on %v: %s, want %s", tt.uplink, tt.with, got, tt.want)
		}
	}
}
