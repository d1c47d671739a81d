// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/api"
)

// census is what a sweep found. It answers those who ask how full things are,
// since counting a full table anew takes long.
type census struct {
	flows  [bpf.MasqFamilyFAMILY_COUNT]int    // that the sweep left
	opened [bpf.MasqFamilyFAMILY_COUNT]uint64 // until then, as the datapath counts
	crowds []crowd                            // the biggest ones, in order
}

// table is how full the tables are: what the last sweep left and what was opened
// since. Flows that ended in another way than by a sweep are still in it.
func (s *sweeper) table() (api.NAT, error) {
	s.mu.Lock()
	last := s.last
	s.mu.Unlock()
	if last == nil {
		return countFlows(s.families)
	}
	var nat api.NAT
	for _, f := range s.families {
		opened, err := s.counters.opened(f.number())
		if err != nil {
			return nat, err
		}
		t := f.table(&nat)
		t.Capacity = int(f.flows.MaxEntries())
		since := opened - last.opened[f.number()]
		t.Entries = min(last.flows[f.number()]+int(since), t.Capacity)
	}
	return nat, nil
}

// busiest are the destinations with the most ports in use, as the last sweep
// found them.
func (s *sweeper) busiest() []crowd {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last == nil {
		return nil
	}
	return s.last.crowds
}

// remote is what flows share the ports of an address towards, in the datapath's
// form: a million of them are looked up in a sweep.
type remote struct {
	address, natAddr [4]uint32 // IPv4: the first word
	port             uint16    // of ICMP: the type of the question
	proto            uint8
	is6              bool
}

func (e *flow) remote(is6 bool) remote {
	if is6 {
		return remote{e.key6.Daddr, e.natAddr6, e.key6.Dport, e.key6.Proto, true}
	}
	return remote{[4]uint32{e.key4.Daddr}, [4]uint32{e.natAddr4}, e.key4.Dport, e.key4.Proto, false}
}

// crowd is how many flows a remote has.
type crowd struct {
	address, natAddr netip.Addr
	port             uint16 // of ICMP: the type of the question
	proto            uint8
	flows            int
}

func newCrowd(r remote, flows int) crowd {
	c := crowd{port: be16(r.port), proto: r.proto, flows: flows}
	if r.is6 {
		c.address, c.natAddr = fromAddr6(r.address), fromAddr6(r.natAddr)
	} else {
		c.address, c.natAddr = fromAddr4(r.address[0]), fromAddr4(r.natAddr[0])
	}
	return c
}

const (
	crowdCounters = 1024 // remotes that are counted at a time
	crowdsTold    = 5    // that are told of
)

// crowdCounter counts the flows of remotes: exactly up to crowdCounters of them,
// else too low by one flow in crowdCounters at most (the algorithm of Misra and
// Gries). A counter for each remote could take more memory than the agent.
type crowdCounter map[remote]int

func (c crowdCounter) add(r remote) {
	if _, known := c[r]; known || len(c) < crowdCounters {
		c[r]++
		return
	}
	for other := range c {
		if c[other]--; c[other] == 0 {
			delete(c, other)
		}
	}
}

// biggest gives the biggest crowds in order.
func (c crowdCounter) biggest() []crowd {
	all := make([]crowd, 0, len(c))
	for r, flows := range c {
		all = append(all, newCrowd(r, flows))
	}
	slices.SortFunc(all, func(a, b crowd) int {
		return cmp.Or(b.flows-a.flows, a.address.Compare(b.address), cmp.Compare(a.port, b.port),
			cmp.Compare(a.proto, b.proto), a.natAddr.Compare(b.natAddr))
	})
	return slices.Clone(all[:min(crowdsTold, len(all))])
}

// pressure is the share of the ports that a crowd uses. SCTP and protocols
// without ports share none.
func (c crowd) pressure(highPorts uint32) float64 {
	ports := highPorts
	switch c.proto {
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		ports = 1 << 16 // identifiers
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE, unix.IPPROTO_DCCP:
	default:
		ports = 0
	}
	if ports == 0 {
		return 0
	}
	return min(1, float64(c.flows)/float64(ports))
}

func (c crowd) String() string {
	if c.proto == unix.IPPROTO_ICMP || c.proto == unix.IPPROTO_ICMPV6 {
		return fmt.Sprintf("%s %s", protoName(c.proto), c.address)
	}
	return fmt.Sprintf("%s %s", protoName(c.proto), netip.AddrPortFrom(c.address, c.port))
}

// shortage is the share of ports or of a table in use at which `status` warns.
const shortage = 0.8

// shortages warn of what is going to run out.
func (d *Datapath) shortages(nat api.NAT) []string {
	var warnings []string
	for _, f := range d.families {
		if t := f.table(&nat); float64(t.Entries) >= shortage*float64(t.Capacity) {
			warnings = append(warnings, fmt.Sprintf(
				"the %s table holds %d of %d translations: new ones are refused when it is full; raise --nat-table-size", f, t.Entries, t.Capacity))
		}
	}
	ports := d.highPorts()
	for _, c := range d.sweeper.busiest() {
		if share := c.pressure(ports); share >= shortage {
			warnings = append(warnings, fmt.Sprintf(
				"%.0f%% of the source ports of %s towards %s are in use: make fewer connections to it, or more ports with --to-ports (see nat list --count-by=pod)",
				100*share, c.natAddr, c))
		}
	}
	return warnings
}
