// SPDX-License-Identifier: Apache-2.0

package route

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const (
	receiveTimeout = 10 // seconds without an answer to a request
	dumpAttempts   = 5  // a dump that changes interrupted is asked for again
)

// conn asks the kernel. It stays in the network namespace of the thread that
// made it.
type conn struct {
	socket *nl.SocketHandle
}

func dial() (*conn, error) {
	s, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	if err := s.SetReceiveTimeout(&unix.Timeval{Sec: receiveTimeout}); err != nil {
		s.Close()
		return nil, fmt.Errorf("set netlink timeout: %w", err)
	}
	return &conn{socket: &nl.SocketHandle{Socket: s}}, nil
}

func (c *conn) close() { c.socket.Close() }

// links asks for all links. With ErrDumpInterrupted the list is usable, but to be
// asked for again; so are those of the other functions.
func (c *conn) links() (map[int]link, error) {
	var links map[int]link
	err := c.dump(unix.RTM_GETLINK, unix.RTM_NEWLINK, linkRequest(),
		func() { links = map[int]link{} },
		func(m []byte) {
			if l, ok := decodeLink(m); ok {
				links[l.index] = l
			}
		})
	return links, listed("links", err)
}

// linkRequest leaves out the statistics, the larger half of each answer.
func linkRequest() []nl.NetlinkRequestData {
	const skipStats = 1 << 3 // RTEXT_FILTER_SKIP_STATS
	return []nl.NetlinkRequestData{
		nl.NewIfInfomsg(unix.AF_UNSPEC),
		nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(skipStats)),
	}
}

// addresses asks for all addresses, each link's in the kernel's order.
func (c *conn) addresses() ([]address, error) {
	var addrs []address
	err := c.dump(unix.RTM_GETADDR, unix.RTM_NEWADDR,
		[]nl.NetlinkRequestData{nl.NewIfAddrmsg(unix.AF_UNSPEC)},
		func() { addrs = nil },
		func(m []byte) {
			if a, ok := decodeAddress(m); ok {
				addrs = append(addrs, a)
			}
		})
	return addrs, listed("addresses", err)
}

// uses asks for the routes of all tables and sums up which links they use.
// Routes are not kept: a router may have a million.
func (c *conn) uses() (map[int]routeUse, error) {
	sum := newSummary()
	var torn error
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		err := c.dump(unix.RTM_GETROUTE, unix.RTM_NEWROUTE,
			[]nl.NetlinkRequestData{&nl.RtMsg{RtMsg: unix.RtMsg{Family: family}}},
			func() {},
			func(m []byte) {
				if r, ok := decodeRoute(m); ok {
					sum.add(r)
				}
			})
		if errors.Is(err, nl.ErrDumpInterrupted) {
			torn = err
		} else if err != nil {
			return nil, listed("routes", err)
		}
	}
	if len(sum.nexthops) > 0 {
		objects, err := c.nexthops()
		if err != nil {
			return nil, err
		}
		sum.resolve(objects)
	}
	return sum.links, listed("routes", torn)
}

func listed(what string, err error) error {
	if err != nil {
		return fmt.Errorf("list %s: %w", what, err)
	}
	return nil
}

// dump asks for all objects of a kind: begin is called before each attempt, each
// for every object. After the last attempt the error is ErrDumpInterrupted, and
// the list may lack something.
func (c *conn) dump(ask, answer int, request []nl.NetlinkRequestData, begin func(), each func([]byte)) error {
	var err error
	for range dumpAttempts {
		begin()
		req := c.request(ask, unix.NLM_F_DUMP, request)
		err = req.ExecuteIter(unix.NETLINK_ROUTE, uint16(answer), func(m []byte) bool {
			each(m)
			return true
		})
		if !errors.Is(err, nl.ErrDumpInterrupted) {
			return err
		}
	}
	return err
}

// route asks the FIB, as `ip route get` does. src and iif may be absent.
func (c *conn) route(dst, src netip.Addr, iif int) (route, error) {
	msg := &nl.RtMsg{RtMsg: unix.RtMsg{Family: unix.AF_INET6, Dst_len: uint8(dst.BitLen()), Flags: unix.RTM_F_LOOKUP_TABLE}}
	if dst.Is4() {
		msg.Family = unix.AF_INET
	}
	data := []nl.NetlinkRequestData{msg, nl.NewRtAttr(unix.RTA_DST, dst.AsSlice())}
	if src.IsValid() {
		msg.Src_len = uint8(src.BitLen())
		data = append(data, nl.NewRtAttr(unix.RTA_SRC, src.AsSlice()))
	}
	if iif != 0 {
		data = append(data, nl.NewRtAttr(unix.RTA_IIF, nl.Uint32Attr(uint32(iif))))
	}
	answers, err := c.request(unix.RTM_GETROUTE, 0, data).Execute(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE)
	if err != nil {
		return route{}, err
	}
	for _, m := range answers {
		if r, ok := decodeRoute(m); ok {
			return r, nil
		}
	}
	return route{}, errors.New("no answer from the kernel")
}

func (c *conn) request(kind, flags int, data []nl.NetlinkRequestData) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(kind, flags)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: c.socket}
	for _, d := range data {
		req.AddData(d)
	}
	return req
}
