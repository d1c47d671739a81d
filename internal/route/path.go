// SPDX-License-Identifier: Apache-2.0

package route

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Path is where the kernel would send a packet.
type Path struct {
	Local     bool       // to the node itself
	Broadcast bool       // to an IPv4 broadcast address; Local too if the node only takes it and does not pass it on
	LinkIndex int        // the link it leaves through
	LinkName  string     // empty: the link has gone meanwhile
	NextHop   netip.Addr // the gateway, which for IPv4 can be an IPv6 address, or the destination
}

// Path asks the kernel's FIB for the way to dst, policy rules included but those
// on marks. src may be the zero Addr. With a src that is the node's own it is the
// way of a packet that the node itself sends. With any other it is that of a
// packet which the node forwards, coming in where the way back to src goes out;
// if the kernel does not forward there, that of a packet of the node's. The error
// wraps the errno: ENETUNREACH without route, EACCES, EHOSTUNREACH or EINVAL for
// a route that prohibits.
func (t *Tracker) Path(dst, src netip.Addr) (Path, error) {
	dst, src = dst.Unmap(), src.Unmap()
	r, err := t.find(dst, src)
	if err != nil {
		return Path{}, fmt.Errorf("find route to %s: %w", dst, err)
	}
	p := Path{
		Local:     r.kind == unix.RTN_LOCAL || r.kind == unix.RTN_ANYCAST,
		Broadcast: r.kind == unix.RTN_BROADCAST,
		NextHop:   dst,
	}
	if len(r.hops) > 0 {
		p.LinkIndex = r.hops[0].link
		if r.hops[0].gateway.IsValid() {
			p.NextHop = r.hops[0].gateway
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.links[p.LinkIndex]
	p.LinkName = l.name
	p.Local = p.Local || p.Broadcast && l.loopback()
	return p, nil
}

func (t *Tracker) find(dst, src netip.Addr) (route, error) {
	if !dst.IsValid() {
		return route{}, unix.EDESTADDRREQ
	}
	if !src.IsValid() || src.Is4() != dst.Is4() {
		return t.conn.route(dst, netip.Addr{}, 0)
	}
	back, err := t.conn.route(src, netip.Addr{}, 0)
	if err != nil || len(back.hops) == 0 {
		return t.conn.route(dst, netip.Addr{}, 0)
	}
	if back.kind == unix.RTN_LOCAL {
		return t.conn.route(dst, src, 0)
	}
	r, err := t.conn.route(dst, src, back.hops[0].link)
	if err != nil {
		return t.conn.route(dst, netip.Addr{}, 0)
	}
	return r, nil
}
