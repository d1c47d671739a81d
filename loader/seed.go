// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

// seed notes the connections that conntrack knows and that were opened from
// outside, as if the datapath had seen them come in: their replies must go out
// as they are, also once nobody tracks them any more. ICMP has no identifier in
// the list and is left out. Without conntrack there is nothing to learn.
//
// It is done once, where no agent before us left the datapath running.
func (d *Datapath) seed(policy *prefix.Policy, network *route.Snapshot) error {
	if d.seeded {
		return nil
	}
	d.seeded = true
	if slots, err := d.readSlots(); err != nil || len(slots) > 0 {
		return err
	}
	own := make(map[netip.Addr]bool)
	for _, a := range network.Addresses {
		own[a] = true
	}
	noted := 0
	for _, f := range d.families {
		flows, err := listConntrack(f)
		if err != nil {
			d.log.Debug("no list of connections", "family", f.String(), "error", err)
			continue
		}
		for _, flow := range flows {
			if opener, ok := address(flow.Forward.SrcIP); ok && keeps(policy, opener) {
				continue // what goes there is never masqueraded
			}
			ok, err := f.noteInbound(flow.Forward, own, d.inboundOf(f))
			if err != nil {
				return fmt.Errorf("note connections from outside: %w", err)
			}
			if ok {
				noted++
			}
		}
	}
	if noted > 0 {
		d.log.Info("noted connections that were open before", "connections", noted)
	}
	return nil
}

func keeps(policy *prefix.Policy, a netip.Addr) bool {
	entry, ok := policy.Lookup(a)
	return ok && entry.Verdict == prefix.Keep
}

func (d *Datapath) inboundOf(f *family) *ebpf.Map {
	if f.is6 {
		return d.maps.InboundV6
	}
	return d.maps.InboundV4
}

// noteInbound notes a connection by the tuple of its replies, unless the node
// itself opened it.
func (f *family) noteInbound(opened netlink.IPTuple, own map[netip.Addr]bool, inbound *ebpf.Map) (bool, error) {
	src, srcOK := address(opened.SrcIP)
	dst, dstOK := address(opened.DstIP)
	withPorts := opened.Protocol == unix.IPPROTO_TCP || opened.Protocol == unix.IPPROTO_UDP || opened.Protocol == unix.IPPROTO_SCTP
	if !srcOK || !dstOK || !withPorts || !f.has(src) || !f.has(dst) || own[src] {
		return false, nil
	}
	value := bpf.MasqInbound{LastSeen: monotonic()}
	return true, inbound.Put(tupleKey(dst, src, opened.DstPort, opened.SrcPort, opened.Protocol), value)
}

func address(ip net.IP) (netip.Addr, bool) {
	a, ok := netip.AddrFromSlice(ip)
	return a.Unmap(), ok
}

// tupleKey is a tuple as a key of the flow maps.
func tupleKey(src, dst netip.Addr, sport, dport uint16, proto uint8) any {
	if src.Is4() {
		return bpf.MasqTupleV4{Saddr: addr4(src), Daddr: addr4(dst), Sport: be16(sport), Dport: be16(dport), Proto: proto}
	}
	return bpf.MasqTupleV6{Saddr: addr6(src), Daddr: addr6(dst), Sport: be16(sport), Dport: be16(dport), Proto: proto}
}
