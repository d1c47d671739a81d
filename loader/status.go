// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"cmp"
	"fmt"
	gomaps "maps"
	"slices"
	"strconv"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

// Plan is what Sync would program: see the function of this name.
func (d *Datapath) Plan(policy *prefix.Policy, network *route.Snapshot) (string, error) {
	return Plan(d.opts, policy, network)
}

// Status is the datapath's part of `status`.
func (d *Datapath) Status() (api.DatapathStatus, error) {
	status := d.attachments()
	var err error
	status.NAT, err = countFlows(d.families, nil)
	return status, err
}

// attachments is the part of Status that Sync changes.
func (d *Datapath) attachments() api.DatapathStatus {
	d.mu.Lock()
	defer d.mu.Unlock()
	status := api.DatapathStatus{
		Backend:    api.Backend{Name: "ebpf", Reason: "--datapath=ebpf; " + d.features.String()},
		Interfaces: []api.Interface{},
	}
	for _, index := range slices.Sorted(gomaps.Keys(d.uplinks)) {
		u := d.uplinks[index]
		status.Interfaces = append(status.Interfaces, api.Interface{
			Name: u.Name, Attach: u.attach(), SNATv4: anyAddress(u.V4), SNATv6: anyAddress(u.V6),
		})
		if len(u.V4) == 0 {
			status.Warnings = append(status.Warnings, noAddressWarning(u.Name))
		}
	}
	status.Warnings = append(status.Warnings, d.ahead...)
	status.Warnings = append(status.Warnings, d.events.warnings(time.Now())...)
	return status
}

func noAddressWarning(name string) string {
	return fmt.Sprintf("interface %s has no usable IPv4 address: what should be masqueraded there is dropped", name)
}

// countFlows counts the flows that are there, and shows each to visit, if any.
func countFlows(families []*family, visit func(*flow, bool)) (nat api.NAT, err error) {
	tables := []*api.Table{&nat.V4, &nat.V6}
	for _, f := range families {
		t := tables[0]
		if f.is6 {
			t = tables[1]
		}
		t.Capacity = int(f.flows.MaxEntries())
		err := f.eachFlow(func(e *flow) {
			t.Entries++
			if visit != nil {
				visit(e, f.is6)
			}
		})
		if err != nil {
			return nat, fmt.Errorf("count %s flows: %w", f, err)
		}
	}
	return nat, nil
}

// remote is what flows share ports towards.
type remote struct {
	addr  [4]uint32 // IPv4: the first word
	port  uint16
	proto uint8
}

func (e *flow) remote(is6 bool) remote {
	if is6 {
		return remote{e.key6.Daddr, e.key6.Dport, e.key6.Proto}
	}
	return remote{[4]uint32{e.key4.Daddr}, e.key4.Dport, e.key4.Proto}
}

// dropReasons are the drops that Stats tells apart, as api.DropReasons has
// them.
func dropReasons() map[bpf.MasqVerdict]string {
	return map[bpf.MasqVerdict]string{
		bpf.MasqVerdictVERDICT_DROP_PORT_EXHAUSTED: "port_exhausted",
		bpf.MasqVerdictVERDICT_DROP_TABLE_FULL:     "table_full",
		bpf.MasqVerdictVERDICT_DROP_FRAGMENT:       "fragment",
		bpf.MasqVerdictVERDICT_DROP_INVALID:        "invalid",
		bpf.MasqVerdictVERDICT_DROP_UNSUPPORTED:    "unsupported",
		bpf.MasqVerdictVERDICT_DROP_NO_ADDRESS:     "no_address",
	}
}

// Stats reads the datapath's counters.
func (d *Datapath) Stats() (api.Stats, error) {
	stats := api.Stats{Drops: make(map[string]uint64), LastSweep: d.sweeper.lastTook()}
	d.mu.Lock()
	stats.Repairs = d.repairs
	d.mu.Unlock()
	for verdict, reason := range dropReasons() {
		for direction := range bpf.MasqDirectionDIRECTION_COUNT {
			for family := range bpf.MasqFamilyFAMILY_COUNT {
				n, err := d.packets(direction, family, verdict)
				if err != nil {
					return stats, err
				}
				stats.Drops[reason] += n
			}
		}
	}
	var err error
	if stats.TranslationsV4, err = d.packets(bpf.MasqDirectionDIRECTION_EGRESS, bpf.MasqFamilyFAMILY_V4, bpf.MasqVerdictVERDICT_OPENED); err != nil {
		return stats, err
	}
	if stats.TranslationsV6, err = d.packets(bpf.MasqDirectionDIRECTION_EGRESS, bpf.MasqFamilyFAMILY_V6, bpf.MasqVerdictVERDICT_OPENED); err != nil {
		return stats, err
	}
	if stats.Attempts, err = d.attempts(); err != nil {
		return stats, err
	}
	flows, busiest := make(map[remote]int), 0
	nat, err := countFlows(d.families, func(e *flow, is6 bool) {
		to := e.remote(is6)
		flows[to]++
		busiest = max(busiest, flows[to])
	})
	if err != nil {
		return stats, err
	}
	stats.NAT = nat
	if ports := d.highPorts(); ports > 0 {
		stats.PortPressure = min(1, float64(busiest)/float64(ports))
	}
	return stats, nil
}

// attempts reads how many ports were tried for new flows.
func (d *Datapath) attempts() ([]uint64, error) {
	counts := make([]uint64, d.maps.Attempts.MaxEntries())
	for n := range counts {
		var perCPU []uint64
		if err := d.maps.Attempts.Lookup(uint32(n), &perCPU); err != nil {
			return nil, fmt.Errorf("read attempts: %w", err)
		}
		for _, count := range perCPU {
			counts[n] += count
		}
	}
	return counts, nil
}

// highPorts is how many ports there are for flows with a port above 1023.
func (d *Datapath) highPorts() uint32 {
	pool := new(bpf.MasqPortPool)
	if err := d.maps.PortPool.Lookup(uint32(0), pool); err != nil {
		return 0
	}
	return pool.Classes[bpf.MasqPortClassIdPORT_CLASS_HIGH].Count
}

// packets reads one counter: counter_index() in stats.h.
func (d *Datapath) packets(direction bpf.MasqDirection, family bpf.MasqFamily, verdict bpf.MasqVerdict) (uint64, error) {
	index := (uint32(direction)*uint32(bpf.MasqFamilyFAMILY_COUNT)+uint32(family))*uint32(bpf.MasqVerdictVERDICT_COUNT) + uint32(verdict)
	var perCPU []bpf.MasqCounter
	if err := d.maps.Counters.Lookup(index, &perCPU); err != nil {
		return 0, fmt.Errorf("read counter: %w", err)
	}
	var packets uint64
	for _, c := range perCPU {
		packets += c.Packets
	}
	return packets, nil
}

// Translations lists the live flows, ordered by family, source and remote.
func (d *Datapath) Translations() ([]api.Translation, error) {
	return listFlows(d.families, d.maps.Timeouts)
}

func listFlows(families []*family, timeoutsMap *ebpf.Map) ([]api.Translation, error) {
	timeouts, err := readTimeouts(timeoutsMap)
	if err != nil {
		return nil, err
	}
	list := []api.Translation{}
	for _, f := range families {
		now := monotonic()
		err := f.eachFlow(func(e *flow) {
			t := e.translation(f.is6)
			idle := time.Duration(int64(now) - int64(e.lastSeen))
			t.IdleSeconds = int(max(0, idle) / time.Second)
			t.ExpiresSeconds = int((timeouts[e.state] - max(0, idle)) / time.Second)
			if t.ExpiresSeconds >= 0 && !e.dying {
				list = append(list, t)
			}
		})
		if err != nil {
			return nil, fmt.Errorf("list %s flows: %w", f, err)
		}
	}
	slices.SortFunc(list, compareTranslations)
	return list, nil
}

func compareTranslations(a, b api.Translation) int {
	return cmp.Or(cmp.Compare(a.Family, b.Family), a.Src.Compare(b.Src), a.Dst.Compare(b.Dst),
		cmp.Compare(a.Proto, b.Proto), cmp.Compare(a.SPort, b.SPort), cmp.Compare(a.DPort, b.DPort))
}

func (e *flow) translation(is6 bool) api.Translation {
	t := api.Translation{NATAddr: e.natAddr(is6), NATPort: be16(e.natPort), State: stateName(e.state)}
	var proto uint8
	if is6 {
		t.Family, proto = 6, e.key6.Proto
		t.Src, t.SPort = fromAddr6(e.key6.Saddr), be16(e.key6.Sport)
		t.Dst, t.DPort = fromAddr6(e.key6.Daddr), be16(e.key6.Dport)
	} else {
		t.Family, proto = 4, e.key4.Proto
		t.Src, t.SPort = fromAddr4(e.key4.Saddr), be16(e.key4.Sport)
		t.Dst, t.DPort = fromAddr4(e.key4.Daddr), be16(e.key4.Dport)
	}
	t.Proto = protoName(proto)
	if proto == unix.IPPROTO_ICMP || proto == unix.IPPROTO_ICMPV6 {
		t.DPort = 0 // the kind of question: nothing that people call a port
	}
	return t
}

func protoName(proto uint8) string {
	switch proto {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_SCTP:
		return "sctp"
	case unix.IPPROTO_ICMP:
		return "icmp"
	case unix.IPPROTO_ICMPV6:
		return "icmpv6"
	}
	return strconv.Itoa(int(proto))
}

// stateName is a state's name in conntrack's spelling.
func stateName(state bpf.MasqFlowState) string {
	names := map[bpf.MasqFlowState]string{
		bpf.MasqFlowStateFLOW_TCP_SYN_SENT:       "SYN_SENT",
		bpf.MasqFlowStateFLOW_TCP_SYN_RECV:       "SYN_RECV",
		bpf.MasqFlowStateFLOW_TCP_ESTABLISHED:    "ESTABLISHED",
		bpf.MasqFlowStateFLOW_TCP_FIN_WAIT:       "FIN_WAIT",
		bpf.MasqFlowStateFLOW_TCP_CLOSE_WAIT:     "CLOSE_WAIT",
		bpf.MasqFlowStateFLOW_TCP_LAST_ACK:       "LAST_ACK",
		bpf.MasqFlowStateFLOW_TCP_TIME_WAIT:      "TIME_WAIT",
		bpf.MasqFlowStateFLOW_TCP_CLOSE:          "CLOSE",
		bpf.MasqFlowStateFLOW_TCP_UNACKNOWLEDGED: "UNACKNOWLEDGED",
		bpf.MasqFlowStateFLOW_UDP:                "UNREPLIED",
		bpf.MasqFlowStateFLOW_UDP_STREAM:         "STREAM",
	}
	if name, ok := names[state]; ok {
		return name
	}
	return "ACTIVE"
}
