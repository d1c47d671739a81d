// SPDX-License-Identifier: Apache-2.0

package loader

import (
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
	status, err := d.attachments()
	if err != nil {
		return status, err
	}
	if status.NAT, err = d.sweeper.table(); err != nil {
		return status, err
	}
	status.Warnings = append(status.Warnings, d.shortages(status.NAT)...)
	return status, nil
}

// attachments is the part of Status that Sync changes.
func (d *Datapath) attachments() (status api.DatapathStatus, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	status = api.DatapathStatus{
		Backend:    api.Backend{Name: "ebpf", Reason: "--datapath=ebpf; " + d.features.String()},
		Interfaces: []api.Interface{},
	}
	for _, index := range slices.Sorted(gomaps.Keys(d.uplinks)) {
		u := d.uplinks[index]
		status.Interfaces = append(status.Interfaces, api.Interface{
			Name: u.Name, Attach: u.attach(), SNATv4: anyAddress(u.V4), SNATv6: anyAddress(u.V6),
		})
		for _, f := range d.families {
			if len(f.addressRules(u.Uplink)) == 0 {
				status.Warnings = append(status.Warnings, noAddressWarning(u.Name, f))
			}
		}
	}
	if len(d.uplinks) == 0 {
		status.Warnings = append(status.Warnings, "no uplink is served, nothing is translated: links that carry routes count, others are named with --interfaces")
	}
	status.Warnings = append(status.Warnings, d.ahead...)
	status.Warnings = append(status.Warnings, d.events.warnings(time.Now())...)
	if d.opts.FastPath {
		status.Warnings = append(status.Warnings, d.fast.warnings()...)
	}
	status.FastPath, err = d.fast.status(d.opts.FastPath, d.counters)
	return status, err
}

func noAddressWarning(name string, f *family) string {
	return fmt.Sprintf(
		"interface %s has no usable %s address: what should be masqueraded there is dropped; give it one, or name other uplinks with --interfaces", name, f)
}

// countFlows counts the flows that are there.
func countFlows(families []*family) (nat api.NAT, err error) {
	for _, f := range families {
		t := f.table(&nat)
		t.Capacity = int(f.flows.MaxEntries())
		if err := f.eachFlow(func(*flow) { t.Entries++ }); err != nil {
			return nat, fmt.Errorf("count %s flows: %w", f, err)
		}
	}
	return nat, nil
}

// EachTranslation visits the live flows.
func (d *Datapath) EachTranslation(visit func(api.Translation)) error {
	return eachTranslation(d.families, d.maps.Timeouts, visit)
}

func eachTranslation(families []*family, timeoutsMap *ebpf.Map, visit func(api.Translation)) error {
	timeouts, err := readTimeouts(timeoutsMap)
	if err != nil {
		return err
	}
	for _, f := range families {
		now := monotonic()
		err := f.eachFlow(func(e *flow) {
			t := e.translation(f.is6)
			idle := time.Duration(int64(now) - int64(e.lastSeen))
			t.IdleSeconds = int(max(0, idle) / time.Second)
			t.ExpiresSeconds = int((timeouts[e.state] - max(0, idle)) / time.Second)
			if t.ExpiresSeconds >= 0 && !e.dying {
				visit(t)
			}
		})
		if err != nil {
			return fmt.Errorf("list %s flows: %w", f, err)
		}
	}
	return nil
}

func (e *flow) translation(is6 bool) api.Translation {
	t := api.Translation{NATAddr: e.natAddr(is6), NATPort: be16(e.natPort), State: e.stateName()}
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
	case unix.IPPROTO_UDPLITE:
		return "udplite"
	case unix.IPPROTO_DCCP:
		return "dccp"
	case unix.IPPROTO_SCTP:
		return "sctp"
	case unix.IPPROTO_ICMP:
		return "icmp"
	case unix.IPPROTO_ICMPV6:
		return "icmpv6"
	}
	return strconv.Itoa(int(proto))
}

// stateName is the state's name in conntrack's spelling.
func (e *flow) stateName() string {
	if e.state == bpf.MasqFlowStateFLOW_UDP && e.replied {
		return "REPLIED" // but too young to be a stream
	}
	switch e.state { // a map would be made anew for each of a million flows
	case bpf.MasqFlowStateFLOW_TCP_SYN_SENT:
		return "SYN_SENT"
	case bpf.MasqFlowStateFLOW_TCP_SYN_RECV:
		return "SYN_RECV"
	case bpf.MasqFlowStateFLOW_TCP_ESTABLISHED:
		return "ESTABLISHED"
	case bpf.MasqFlowStateFLOW_TCP_FIN_WAIT:
		return "FIN_WAIT"
	case bpf.MasqFlowStateFLOW_TCP_CLOSE_WAIT:
		return "CLOSE_WAIT"
	case bpf.MasqFlowStateFLOW_TCP_LAST_ACK:
		return "LAST_ACK"
	case bpf.MasqFlowStateFLOW_TCP_TIME_WAIT:
		return "TIME_WAIT"
	case bpf.MasqFlowStateFLOW_TCP_CLOSE:
		return "CLOSE"
	case bpf.MasqFlowStateFLOW_TCP_UNACKNOWLEDGED:
		return "UNACKNOWLEDGED"
	case bpf.MasqFlowStateFLOW_UDP:
		return "UNREPLIED"
	case bpf.MasqFlowStateFLOW_UDP_STREAM:
		return "STREAM"
	}
	return "ACTIVE"
}
