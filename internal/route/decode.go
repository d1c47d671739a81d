// SPDX-License-Identifier: Apache-2.0

package route

import (
	"bytes"
	"encoding/binary"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// link is what an RTM_NEWLINK message says, as far as we care. It is comparable:
// what does not make a difference here makes no event.
type link struct {
	index  int
	name   string
	kind   string // IFLA_INFO_KIND: veth, bridge, vlan …; empty for hardware
	hwType uint16 // ARPHRD_*
	flags  uint32 // IFF_UP and IFF_LOOPBACK, the others cleared
	master int    // index of the bridge, bond or VRF it belongs to, or 0
	mac    string // raw bytes
	remote string // raw bytes: the broadcast address, of a tunnel the other end
	lower  int    // of a VLAN: the link that it stands on
	tagged bool   // a VLAN whose frames have their tag in front of what they carry
	v6     ipv6Settings
}

// ipv6Settings are the sysctls of a link that the choice of a source address
// depends on.
type ipv6Settings struct {
	oifAddressesOnly bool // use_oif_addrs_only
	preferTemporary  bool // use_tempaddr >= 2
	useOptimistic    bool // use_optimistic
}

func (l link) up() bool       { return l.flags&unix.IFF_UP != 0 }
func (l link) loopback() bool { return l.flags&unix.IFF_LOOPBACK != 0 }

// address is one address of a link.
type address struct {
	link   int
	local  netip.Addr   // the node's own address
	subnet netip.Prefix // masked; on a point-to-point address the peer's
	flags  uint8        // IFA_F_*, the lower eight: those above do not concern the choice
	scope  uint8        // RT_SCOPE_*
}

// route is one route of any table.
type route struct {
	kind    uint8 // RTN_*
	dst     netip.Prefix
	hops    []hop
	nexthop uint32 // id of a nexthop object, or 0
}

// indirect reports whether the route names a nexthop object instead of links.
func (r route) indirect() bool { return r.nexthop != 0 && len(r.hops) == 0 }

// hop is one way that a route leads. The gateway is invalid for a destination
// on the link itself, and may be an IPv6 address in an IPv4 route.
type hop struct {
	link    int
	gateway netip.Addr
}

// rtaNexthopID is RTA_NH_ID of include/uapi/linux/rtnetlink.h.
const rtaNexthopID = 30

// Indices in the array of IFLA_INET6_CONF (include/uapi/linux/ipv6.h).
const (
	devconfUseTempaddr     = 10
	devconfUseOptimistic   = 34
	devconfUseOIFAddrsOnly = 37
)

// decodeLink returns false for a message that does not describe the whole link:
// those of the bridge family and wireless events.
func decodeLink(m []byte) (link, bool) {
	if len(m) < unix.SizeofIfInfomsg {
		return link{}, false
	}
	msg := nl.DeserializeIfInfomsg(m)
	if msg.Family != unix.AF_UNSPEC {
		return link{}, false
	}
	l := link{index: int(msg.Index), hwType: msg.Type, flags: msg.Flags & (unix.IFF_UP | unix.IFF_LOOPBACK)}
	attrs, err := nl.ParseRouteAttr(m[unix.SizeofIfInfomsg:])
	if err != nil {
		return link{}, false
	}
	lower := 0
	for _, a := range attrs {
		switch attrType(a.Attr.Type) {
		case unix.IFLA_WIRELESS:
			return link{}, false
		case unix.IFLA_IFNAME:
			l.name = text(a.Value)
		case unix.IFLA_MASTER:
			l.master = int(word(a.Value))
		case unix.IFLA_ADDRESS:
			l.mac = string(a.Value)
		case unix.IFLA_BROADCAST:
			l.remote = string(a.Value)
		case unix.IFLA_LINK:
			lower = int(word(a.Value))
		case unix.IFLA_LINKINFO:
			l.kind = text(attrIn(a.Value, unix.IFLA_INFO_KIND))
			l.tagged = l.kind == "vlan" && !reorders(attrIn(a.Value, unix.IFLA_INFO_DATA))
		case unix.IFLA_AF_SPEC:
			l.v6 = decodeIPv6Settings(attrIn(attrIn(a.Value, unix.AF_INET6), unix.IFLA_INET6_CONF))
		}
	}
	if l.kind == "vlan" {
		l.lower = lower
	}
	return l, true
}

// reorders reports whether a VLAN moves the tag out of its frames, to where
// devices and programs expect it (IFLA_VLAN_FLAGS, a struct of flags and mask; not
// there when no flag is set).
func reorders(vlan []byte) bool {
	flags := attrIn(vlan, nl.IFLA_VLAN_FLAGS)
	return word(flags)&nl.VLAN_FLAG_REORDER_HDR != 0
}

func decodeIPv6Settings(conf []byte) ipv6Settings {
	value := func(i int) int32 {
		if len(conf) < 4*(i+1) {
			return 0
		}
		return int32(word(conf[4*i:]))
	}
	return ipv6Settings{
		oifAddressesOnly: value(devconfUseOIFAddrsOnly) != 0,
		preferTemporary:  value(devconfUseTempaddr) >= 2,
		useOptimistic:    value(devconfUseOptimistic) != 0,
	}
}

// decodeAddress returns false for a message of another family than IP.
func decodeAddress(m []byte) (address, bool) {
	if len(m) < unix.SizeofIfAddrmsg {
		return address{}, false
	}
	msg := nl.DeserializeIfAddrmsg(m)
	attrs, err := nl.ParseRouteAttr(m[unix.SizeofIfAddrmsg:])
	if err != nil || !isIP(msg.Family) {
		return address{}, false
	}
	a := address{link: int(msg.Index), flags: msg.Flags, scope: msg.Scope}
	var peer netip.Addr // IFA_ADDRESS: the other end, or the local address again
	for _, attr := range attrs {
		switch attrType(attr.Attr.Type) {
		case unix.IFA_LOCAL:
			a.local = addr(attr.Value)
		case unix.IFA_ADDRESS:
			peer = addr(attr.Value)
		}
	}
	if !a.local.IsValid() {
		a.local = peer
	}
	if !peer.IsValid() {
		peer = a.local
	}
	a.subnet, err = peer.Prefix(int(msg.Prefixlen))
	return a, err == nil && a.local.IsValid()
}

// decodeRoute returns false for a message of another family than IP.
func decodeRoute(m []byte) (route, bool) {
	if len(m) < unix.SizeofRtMsg {
		return route{}, false
	}
	msg := nl.DeserializeRtMsg(m)
	attrs, err := nl.ParseRouteAttr(m[unix.SizeofRtMsg:])
	if err != nil || !isIP(msg.Family) {
		return route{}, false
	}
	r := route{kind: msg.Type}
	dst := netip.IPv4Unspecified()
	if msg.Family == unix.AF_INET6 {
		dst = netip.IPv6Unspecified()
	}
	var single hop
	for _, a := range attrs {
		switch attrType(a.Attr.Type) {
		case unix.RTA_DST:
			dst = addr(a.Value)
		case unix.RTA_OIF:
			single.link = int(word(a.Value))
		case unix.RTA_GATEWAY, unix.RTA_VIA:
			single.gateway = gateway(a.Attr.Type, a.Value)
		case unix.RTA_MULTIPATH:
			r.hops = append(r.hops, decodeHops(a.Value)...)
		case rtaNexthopID:
			r.nexthop = word(a.Value)
		}
	}
	if single.link != 0 {
		r.hops = append(r.hops, single)
	}
	r.dst, err = dst.Prefix(int(msg.Dst_len))
	return r, err == nil
}

// decodeHops reads RTA_MULTIPATH: a row of struct rtnexthop, each with its own
// attributes.
func decodeHops(b []byte) []hop {
	var hops []hop
	for len(b) >= unix.SizeofRtNexthop {
		nh := nl.DeserializeRtNexthop(b)
		n := int(nh.RtNexthop.Len)
		if n < unix.SizeofRtNexthop || n > len(b) {
			break
		}
		h := hop{link: int(nh.Ifindex)}
		attrs, err := nl.ParseRouteAttr(b[unix.SizeofRtNexthop:n])
		if err != nil {
			break
		}
		for _, a := range attrs {
			if t := attrType(a.Attr.Type); t == unix.RTA_GATEWAY || t == unix.RTA_VIA {
				h.gateway = gateway(t, a.Value)
			}
		}
		hops = append(hops, h)
		b = b[min(len(b), (n+unix.RTA_ALIGNTO-1)&^(unix.RTA_ALIGNTO-1)):]
	}
	return hops
}

// gateway reads RTA_GATEWAY, or RTA_VIA, which has the family in front.
func gateway(attr uint16, value []byte) netip.Addr {
	if attrType(attr) == unix.RTA_VIA && len(value) > 2 {
		value = value[2:]
	}
	return addr(value)
}

// attrIn finds one attribute in a nest, nil when it is not there.
func attrIn(nest []byte, want uint16) []byte {
	attrs, err := nl.ParseRouteAttr(nest)
	if err != nil {
		return nil
	}
	for _, a := range attrs {
		if attrType(a.Attr.Type) == want {
			return a.Value
		}
	}
	return nil
}

func attrType(t uint16) uint16 { return t &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER) }

func isIP(family uint8) bool { return family == unix.AF_INET || family == unix.AF_INET6 }

// addr is the invalid address for a value that is no address.
func addr(b []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(b)
	return a
}

func word(b []byte) uint32 {
	if len(b) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(b)
}

func text(b []byte) string {
	s, _, _ := bytes.Cut(b, []byte{0})
	return string(s)
}
