// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/api"
)

// Stats reads the datapath's counters. It does not look at flows.
func (d *Datapath) Stats() (api.Stats, error) {
	stats := api.Stats{Drops: make(map[string]uint64)}
	stats.LastSweep, stats.Swept, stats.Early = d.sweeper.work()
	d.mu.Lock()
	stats.Repairs = d.repairs
	d.mu.Unlock()
	for _, reason := range dropReasons() {
		stats.Drops[reason] = 0
	}
	names, err := verdictNames(d.spec.Types)
	if err != nil {
		return stats, err
	}
	err = d.counters.each(func(c count) {
		if reason, isDrop := dropReasons()[c.verdict]; isDrop {
			stats.Drops[reason] += c.Packets
		}
		if c.Packets > 0 {
			stats.Packets = append(stats.Packets, api.PacketCount{
				Direction: directionNames()[c.direction], Family: familyNames()[c.family], Verdict: names[c.verdict],
				Packets: c.Packets, Bytes: c.Bytes,
			})
		}
	})
	if err != nil {
		return stats, err
	}
	if stats.TranslationsV4, err = d.counters.translated(bpf.MasqFamilyFAMILY_V4); err != nil {
		return stats, err
	}
	if stats.TranslationsV6, err = d.counters.translated(bpf.MasqFamilyFAMILY_V6); err != nil {
		return stats, err
	}
	if stats.Attempts, err = d.attempts(); err != nil {
		return stats, err
	}
	stats.Busiest = d.busiest()
	stats.NAT, err = d.sweeper.table()
	return stats, err
}

func (d *Datapath) busiest() []api.BusyDestination {
	var busiest []api.BusyDestination
	ports := d.highPorts()
	for _, c := range d.sweeper.busiest() {
		b := api.BusyDestination{
			Proto: protoName(c.proto), Address: c.address, Port: c.port, NATAddr: c.natAddr,
			Flows: c.flows, Pressure: c.pressure(ports),
		}
		if c.proto == unix.IPPROTO_ICMP || c.proto == unix.IPPROTO_ICMPV6 {
			b.Port = 0 // the kind of question: nothing that people call a port
		}
		busiest = append(busiest, b)
	}
	return busiest
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

// counters are packets and bytes by fate, as stats.h counts them.
type counters struct{ *ebpf.Map }

// count is one of them, over all CPUs.
type count struct {
	direction bpf.MasqDirection
	family    bpf.MasqFamily
	verdict   bpf.MasqVerdict
	bpf.MasqCounter
}

// read reads one counter: counter_index() in stats.h.
func (m counters) read(direction bpf.MasqDirection, family bpf.MasqFamily, verdict bpf.MasqVerdict) (count, error) {
	index := (uint32(direction)*uint32(bpf.MasqFamilyFAMILY_COUNT)+uint32(family))*uint32(bpf.MasqVerdictVERDICT_COUNT) + uint32(verdict)
	sum := count{direction: direction, family: family, verdict: verdict}
	var perCPU []bpf.MasqCounter
	if err := m.Lookup(index, &perCPU); err != nil {
		return sum, fmt.Errorf("read counter: %w", err)
	}
	for _, c := range perCPU {
		sum.Packets += c.Packets
		sum.Bytes += c.Bytes
	}
	return sum, nil
}

func (m counters) each(visit func(count)) error {
	for direction := range bpf.MasqDirectionDIRECTION_COUNT {
		for family := range bpf.MasqFamilyFAMILY_COUNT {
			for verdict := range bpf.MasqVerdictVERDICT_COUNT {
				c, err := m.read(direction, family, verdict)
				if err != nil {
					return err
				}
				visit(c)
			}
		}
	}
	return nil
}

// translated is how many flows of pods were opened.
func (m counters) translated(family bpf.MasqFamily) (uint64, error) {
	c, err := m.read(bpf.MasqDirectionDIRECTION_EGRESS, family, bpf.MasqVerdictVERDICT_OPENED)
	return c.Packets, err
}

// opened is how many flows were opened, those of the node that need an entry too.
func (m counters) opened(family bpf.MasqFamily) (uint64, error) {
	pods, err := m.translated(family)
	if err != nil {
		return 0, err
	}
	own, err := m.read(bpf.MasqDirectionDIRECTION_EGRESS, family, bpf.MasqVerdictVERDICT_NODE_OPENED)
	return pods + own.Packets, err
}

// fast is how many packets took the fast path.
func (m counters) fast() (packets uint64, err error) {
	for direction := range bpf.MasqDirectionDIRECTION_COUNT {
		for family := range bpf.MasqFamilyFAMILY_COUNT {
			c, err := m.read(direction, family, bpf.MasqVerdictVERDICT_FAST_PATH)
			if err != nil {
				return packets, err
			}
			packets += c.Packets
		}
	}
	return packets, nil
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

func directionNames() map[bpf.MasqDirection]string {
	return map[bpf.MasqDirection]string{
		bpf.MasqDirectionDIRECTION_EGRESS: "egress", bpf.MasqDirectionDIRECTION_INGRESS: "ingress",
	}
}

func familyNames() map[bpf.MasqFamily]string {
	return map[bpf.MasqFamily]string{bpf.MasqFamilyFAMILY_V4: "ipv4", bpf.MasqFamilyFAMILY_V6: "ipv6"}
}

// verdictNames gives the names of enum verdict, from the types that are compiled
// into the programs: nobody has to keep a second list.
func verdictNames(types *btf.Spec) (map[bpf.MasqVerdict]string, error) {
	var enum *btf.Enum
	if err := types.TypeByName("verdict", &enum); err != nil {
		return nil, fmt.Errorf("read names of verdicts: %w", err)
	}
	names := make(map[bpf.MasqVerdict]string)
	for _, value := range enum.Values {
		verdict := bpf.MasqVerdict(value.Value)
		if _, named := names[verdict]; !named { // others stand for ranges
			names[verdict] = strings.ToLower(strings.TrimPrefix(value.Name, "VERDICT_"))
		}
	}
	return names, nil
}
