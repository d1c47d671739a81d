// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/route"
)

// reserve notes the outside tuples of the connections that netfilter translates,
// as the node's own, so that no pod's flow takes one. Where the programs can ask
// conntrack themselves (5.18) nothing is to be done.
//
// A note ends like a flow, and packets that leave keep it. ICMP takes its tuple
// by itself when its next packet leaves, as all of the node's that no socket
// guards.
func (d *Datapath) reserve(network *route.Snapshot) error {
	if d.features.CTLookup || !d.tracking {
		return nil
	}
	for _, f := range d.families {
		flows, err := listConntrack(f)
		if err != nil {
			d.log.Debug("no list of connections", "family", f.String(), "error", err)
			continue
		}
		for _, flow := range flows {
			r, ok := reservationOf(flow, network)
			if !ok {
				continue
			}
			if err := d.maps.natMaps(f.is6).reserve(r); err != nil {
				return fmt.Errorf("%s: %w", f, err)
			}
		}
	}
	return nil
}

func listConntrack(f *family) ([]*netlink.ConntrackFlow, error) {
	kind := netlink.InetFamily(unix.AF_INET)
	if f.is6 {
		kind = unix.AF_INET6
	}
	return netlink.ConntrackTableList(netlink.ConntrackTable, kind)
}

// reservation is an outside tuple that is not ours to give.
type reservation struct {
	src, dst     netip.Addr
	sport, dport uint16
	proto        uint8
	ifindex      uint32
	state        bpf.MasqFlowState
}

// reservationOf is the outside tuple of a connection that netfilter gave another
// source: one of an uplink's.
func reservationOf(flow *netlink.ConntrackFlow, network *route.Snapshot) (reservation, bool) {
	in, out := flow.Forward, flow.Reverse
	src, srcOK := address(out.DstIP)
	dst, dstOK := address(out.SrcIP)
	state, withPorts := stateOf(flow)
	if !srcOK || !dstOK || !withPorts || in.SrcIP.Equal(out.DstIP) && in.SrcPort == out.DstPort {
		return reservation{}, false
	}
	r := reservation{src: src, dst: dst, sport: out.DstPort, dport: out.SrcPort, proto: out.Protocol, state: state}
	for _, u := range network.Uplinks {
		for _, rules := range [][]route.AddressRule{u.V4, u.V6} {
			for _, rule := range rules {
				if rule.Address == src {
					r.ifindex = uint32(u.Index)
					return r, true
				}
			}
		}
	}
	return reservation{}, false
}

// stateOf is where a connection is in its life. False: it has no ports.
func stateOf(flow *netlink.ConntrackFlow) (bpf.MasqFlowState, bool) {
	switch flow.Forward.Protocol {
	case unix.IPPROTO_TCP:
		info, ok := flow.ProtoInfo.(*netlink.ProtoInfoTCP)
		if ok && info.State >= uint8(bpf.MasqFlowStateFLOW_TCP_SYN_SENT) && info.State <= uint8(bpf.MasqFlowStateFLOW_TCP_CLOSE) {
			return bpf.MasqFlowState(info.State), true // the numbers are conntrack's
		}
		return bpf.MasqFlowStateFLOW_TCP_ESTABLISHED, true
	case unix.IPPROTO_UDP:
		return bpf.MasqFlowStateFLOW_UDP_STREAM, true
	}
	return bpf.MasqFlowStateFLOW_NONE, false
}

// reserve puts a reservation into the maps, unless its tuple has an owner.
func (n *natMaps) reserve(r reservation) error {
	if n.is6 {
		return n.reserve6(r)
	}
	own, remote, port, remotePort := addr4(r.src), addr4(r.dst), be16(r.sport), be16(r.dport)
	p := pair4{
		tuple: bpf.MasqTupleV4{Saddr: own, Daddr: remote, Sport: port, Dport: remotePort, Proto: r.proto},
		reply: bpf.MasqTupleV4{Saddr: remote, Daddr: own, Sport: remotePort, Dport: port, Proto: r.proto},
		way:   bpf.MasqReverseV4{Addr: own, Port: port},
		newer: func(*bpf.MasqMappingV4) bool { return false },
	}
	p.mapping.NatAddr = own
	state := &p.mapping.Flow
	state.NatPort, state.Ifindex, state.State, state.Replied = port, r.ifindex, uint8(r.state), 1
	state.Created = monotonic()
	state.LastSeen = state.Created
	return p.insert(n)
}

func (n *natMaps) reserve6(r reservation) error {
	own, remote, port, remotePort := addr6(r.src), addr6(r.dst), be16(r.sport), be16(r.dport)
	p := pair6{
		tuple: bpf.MasqTupleV6{Saddr: own, Daddr: remote, Sport: port, Dport: remotePort, Proto: r.proto},
		reply: bpf.MasqTupleV6{Saddr: remote, Daddr: own, Sport: remotePort, Dport: port, Proto: r.proto},
		way:   bpf.MasqReverseV6{Addr: own, Port: port},
		newer: func(*bpf.MasqMappingV6) bool { return false },
	}
	p.mapping.NatAddr = own
	state := &p.mapping.Flow
	state.NatPort, state.Ifindex, state.State, state.Replied = port, r.ifindex, uint8(r.state), 1
	state.Created = monotonic()
	state.LastSeen = state.Created
	return p.insert(n)
}
