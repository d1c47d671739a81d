// SPDX-License-Identifier: Apache-2.0

package route

import (
	"maps"
	"net"
	"net/netip"
	"path"
	"slices"

	"golang.org/x/sys/unix"
)

// routeUse says what kinds of routes lead through a link.
type routeUse uint8

const (
	carriesRoute   routeUse = 1 << iota
	carriesGateway          // via a gateway, or a default route
)

// counts reports whether the route can make an uplink: unicast, and no
// link-local or multicast prefix, which every link has.
func (r route) counts() bool {
	return r.kind == unix.RTN_UNICAST && !isLinkLocal(r.dst.Addr()) && !r.dst.Addr().IsMulticast()
}

// use is what the route says about the link of one of its hops.
func (r route) use(h hop) routeUse {
	if h.gateway.IsValid() || r.dst.Bits() == 0 {
		return carriesRoute | carriesGateway
	}
	return carriesRoute
}

// summary is what all routes together say about links, and about nexthop objects
// where they name only those.
type summary struct {
	links    map[int]routeUse
	nexthops map[uint32]routeUse
}

func newSummary() summary {
	return summary{links: map[int]routeUse{}, nexthops: map[uint32]routeUse{}}
}

func (s summary) add(r route) {
	if !r.counts() {
		return
	}
	for _, h := range r.hops {
		s.links[h.link] |= r.use(h)
	}
	if r.indirect() {
		s.nexthops[r.nexthop] |= r.use(hop{})
	}
}

// resolve turns what is said of nexthop objects into what is said of links.
func (s summary) resolve(objects map[uint32]nexthop) {
	for id, use := range s.nexthops {
		for _, member := range append(objects[id].group, id) { // groups do not nest
			h := objects[member].hop
			s.links[h.link] |= use
			if h.gateway.IsValid() {
				s.links[h.link] |= carriesGateway
			}
		}
	}
}

// node is what selection works on.
type node struct {
	links  map[int]link
	uses   map[int]routeUse
	served map[int]bool // uplinks so far
}

// uplinks returns the indices of the uplinks in ascending order. Without
// patterns it is every link that leads out of the node, and those that did
// before: when an address goes, its routes go too, and no event tells of it.
func (n node) uplinks(patterns []string) []int {
	var found []int
	for _, index := range slices.Sorted(maps.Keys(n.links)) {
		l := n.links[index]
		if l.loopback() || n.isPort(l) {
			continue
		}
		if len(patterns) > 0 && matches(patterns, l.name) || len(patterns) == 0 && (n.served[index] || n.leadsOut(l)) {
			found = append(found, index)
		}
	}
	return found
}

// leadsOut reports whether routes lead out of the node through the link.
func (n node) leadsOut(l link) bool {
	if !l.up() || l.kind == "dummy" {
		return false
	}
	if podFacing(l) {
		return n.uses[l.index]&carriesGateway != 0
	}
	return n.uses[l.index]&carriesRoute != 0
}

// podFacing reports whether links of this kind usually lead to pods.
func podFacing(l link) bool {
	return l.kind == "veth" || l.kind == "netkit" || l.kind == "bridge"
}

// isPort reports whether the link belongs to a bridge, a bond or the like, so
// that IP happens on that one. A VRF is the exception: its links keep their IP.
func (n node) isPort(l link) bool {
	return l.master != 0 && n.links[l.master].kind != "vrf"
}

// vrf is the index of the link's L3 master, or 0
// (l3mdev_master_ifindex_rcu in include/net/l3mdev.h).
func (n node) vrf(l link) int {
	if l.kind == "vrf" {
		return l.index
	}
	if n.links[l.master].kind == "vrf" {
		return l.master
	}
	return 0
}

// domain lists the links of a VRF, or those of none for 0.
//
// The kernel goes through its devices in the order in which they came into the
// namespace. User space sees the index, which differs only where a device came
// back from another namespace.
func (n node) domain(vrf int) []int {
	var links []int
	for _, index := range slices.Sorted(maps.Keys(n.links)) {
		if n.vrf(n.links[index]) == vrf {
			links = append(links, index)
		}
	}
	return links
}

// matches reports whether a pattern is the name or a glob that it matches. The
// patterns are good ones.
func matches(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		ok, _ := path.Match(p, name)
		return ok || p == name
	})
}

const ethernetHeader = 14

// headerLen is the length of the link's own header before the IP header, by
// ARPHRD type, or UnknownHeader.
func headerLen(l link) int {
	switch l.hwType {
	case unix.ARPHRD_ETHER, unix.ARPHRD_LOOPBACK:
		return ethernetHeader
	case unix.ARPHRD_NONE, unix.ARPHRD_RAWIP, unix.ARPHRD_PPP, unix.ARPHRD_SLIP,
		unix.ARPHRD_TUNNEL, unix.ARPHRD_TUNNEL6, unix.ARPHRD_SIT:
		return 0
	case unix.ARPHRD_IPGRE, unix.ARPHRD_IP6GRE:
		if l.hasOneRemote() {
			return 0
		}
	}
	return UnknownHeader
}

// hasOneRemote reports whether a tunnel has one other end. A GRE device without
// shows frames that begin with the outer header (ipgre_header in
// net/ipv4/ip_gre.c), in one direction.
func (l link) hasOneRemote() bool {
	remote, ok := netip.AddrFromSlice([]byte(l.remote))
	return ok && !remote.IsUnspecified() && !remote.IsMulticast()
}

// news reports whether some of the links have not been uplinks so far.
func (n node) news(found []int) bool {
	return slices.ContainsFunc(found, func(index int) bool { return !n.served[index] })
}

// snapshot describes the uplinks of these indices.
func (n node) snapshot(uplinks []int, addrs map[int][]address) *Snapshot {
	s := &Snapshot{}
	for _, index := range uplinks {
		s.Uplinks = append(s.Uplinks, n.uplink(n.links[index], addrs))
		for _, a := range addrs[index] {
			if b, ok := broadcast(a.subnet); ok {
				s.Broadcasts = append(s.Broadcasts, b)
			}
		}
	}
	for _, own := range addrs {
		for _, a := range own {
			if !isLinkLocal(a.local) && !a.local.IsLoopback() {
				s.Addresses = append(s.Addresses, a.local)
			}
		}
	}
	for _, list := range []*[]netip.Addr{&s.Addresses, &s.Broadcasts} {
		slices.SortFunc(*list, netip.Addr.Compare)
		*list = slices.Compact(*list)
	}
	return s
}

// broadcast is the last address of an IPv4 subnet that has one (fib_add_ifaddr
// in net/ipv4/fib_frontend.c; RFC 3021: a /31 has none).
func broadcast(subnet netip.Prefix) (netip.Addr, bool) {
	if !subnet.Addr().Is4() || subnet.Bits() == 0 || subnet.Bits() > 30 {
		return netip.Addr{}, false
	}
	last := subnet.Masked().Addr().As4()
	for bit := subnet.Bits(); bit < 32; bit++ {
		last[bit/8] |= 0x80 >> (bit % 8)
	}
	return netip.AddrFrom4(last), true
}

func (n node) uplink(l link, addrs map[int][]address) Uplink {
	u := Uplink{Index: l.index, Name: l.name, Type: l.hwType, HeaderLen: headerLen(l), Tagged: l.tagged, Up: l.up()}
	if n.links[l.lower].tagged {
		u.HeaderLen = UnknownHeader // it has that VLAN's tag in its frames, with or without its own
	}
	if u.HeaderLen >= ethernetHeader {
		u.MAC = net.HardwareAddr(l.mac)
	}
	if u.Up {
		u.V4 = n.rules4(l, addrs)
		u.V6 = compile6(n.candidates6(l, addrs))
	}
	return u
}
