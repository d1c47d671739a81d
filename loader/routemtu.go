// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// leastRouteMTU is the least MTU that any route sets, in octets; 0: none does.
// It asks in the calling thread's network namespace. A list that changed while
// the kernel gave it will do: there is an event for what it may lack.
func leastRouteMTU() (mtu uint32, err error) {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		request := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
		request.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: family}})
		err := request.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE, func(message []byte) bool {
			mtu = lesserMTU(mtu, routeMTU(message))
			return true
		})
		if err != nil && !errors.Is(err, nl.ErrDumpInterrupted) {
			return 0, fmt.Errorf("list routes: %w", err)
		}
	}
	return mtu, nil
}

// routeMTU is what a message about a route says of its MTU; 0: nothing.
func routeMTU(message []byte) uint32 {
	if len(message) < unix.SizeofRtMsg {
		return 0
	}
	mtu := attribute(attribute(message[unix.SizeofRtMsg:], unix.RTA_METRICS), unix.RTAX_MTU)
	if len(mtu) != 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(mtu)
}

func attribute(attributes []byte, kind uint16) []byte {
	all, err := nl.ParseRouteAttr(attributes)
	if err != nil {
		return nil
	}
	for _, a := range all {
		if a.Attr.Type&^unix.NLA_F_NESTED == kind {
			return a.Value
		}
	}
	return nil
}

// lesserMTU is the lesser of those that are set.
func lesserMTU(a, b uint32) uint32 {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}
