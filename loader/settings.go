// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/portrange"
)

// timeoutSysctl says where the kernel has a state's timeout in seconds, and
// the kernel's default for where it has not (nf_conntrack not loaded).
type timeoutSysctl struct {
	state    bpf.MasqFlowState
	name     string
	fallback uint32
}

func timeoutSysctls() []timeoutSysctl {
	return []timeoutSysctl{
		{bpf.MasqFlowStateFLOW_TCP_SYN_SENT, "tcp_timeout_syn_sent", 120},
		{bpf.MasqFlowStateFLOW_TCP_SYN_RECV, "tcp_timeout_syn_recv", 60},
		{bpf.MasqFlowStateFLOW_TCP_ESTABLISHED, "tcp_timeout_established", 432000},
		{bpf.MasqFlowStateFLOW_TCP_FIN_WAIT, "tcp_timeout_fin_wait", 120},
		{bpf.MasqFlowStateFLOW_TCP_CLOSE_WAIT, "tcp_timeout_close_wait", 60},
		{bpf.MasqFlowStateFLOW_TCP_LAST_ACK, "tcp_timeout_last_ack", 30},
		{bpf.MasqFlowStateFLOW_TCP_TIME_WAIT, "tcp_timeout_time_wait", 120},
		{bpf.MasqFlowStateFLOW_TCP_CLOSE, "tcp_timeout_close", 10},
		{bpf.MasqFlowStateFLOW_TCP_UNACKNOWLEDGED, "tcp_timeout_unacknowledged", 300},
		{bpf.MasqFlowStateFLOW_UDP, "udp_timeout", 30},
		{bpf.MasqFlowStateFLOW_UDP_STREAM, "udp_timeout_stream", 120},
		{bpf.MasqFlowStateFLOW_ICMP, "icmp_timeout", 30},
		{bpf.MasqFlowStateFLOW_ICMPV6, "icmpv6_timeout", 30},
		{bpf.MasqFlowStateFLOW_SCTP, "sctp_timeout_established", 210},
		{bpf.MasqFlowStateFLOW_GENERIC, "generic_timeout", 600},
	}
}

// syncTimeouts writes the node's timeouts, where they differ.
func (d *Datapath) syncTimeouts() error {
	for _, t := range timeoutSysctls() {
		seconds, err := t.read()
		if err != nil {
			return err
		}
		var have uint32
		if err := d.maps.Timeouts.Lookup(uint32(t.state), &have); err != nil {
			return fmt.Errorf("read timeout %s: %w", t.name, err)
		}
		if last, ok := d.left.timeouts[t.name]; ok && have != last {
			d.repaired("timeout " + t.name)
		}
		d.left.timeouts[t.name] = seconds
		if have == seconds {
			continue
		}
		if err := d.maps.Timeouts.Put(uint32(t.state), seconds); err != nil {
			return fmt.Errorf("write timeout %s: %w", t.name, err)
		}
	}
	return nil
}

func (t timeoutSysctl) read() (uint32, error) {
	path := filepath.Join("/proc/sys/net/netfilter", "nf_conntrack_"+t.name)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return t.fallback, nil
	}
	if err != nil {
		return 0, err
	}
	seconds, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", path, err)
	}
	return uint32(seconds), nil
}

// syncPorts writes the pool of ports, if it differs.
func (d *Datapath) syncPorts() error {
	reserved, err := reservedPorts()
	if err != nil {
		return err
	}
	want := newPortPool(d.opts.ToPorts, d.opts.NodePorts, reserved)
	have := new(bpf.MasqPortPool)
	if err := d.maps.PortPool.Lookup(uint32(0), have); err != nil {
		return fmt.Errorf("read port pool: %w", err)
	}
	if d.left.ports != nil && *have != *d.left.ports {
		d.repaired("ports")
	}
	d.left.ports = nil
	if *have == *want {
		d.left.ports = want
		return nil
	}
	if err := d.maps.PortPool.Put(uint32(0), want); err != nil {
		return fmt.Errorf("write port pool: %w", err)
	}
	d.left.ports = want
	d.log.Info("ports changed", "high", want.Classes[bpf.MasqPortClassIdPORT_CLASS_HIGH].Count)
	return nil
}

// reservedPorts are those of net.ipv4.ip_local_reserved_ports.
func reservedPorts() ([]portrange.Range, error) {
	const path = "/proc/sys/net/ipv4/ip_local_reserved_ports"
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	ranges, err := parseReserved(strings.TrimSpace(string(text)))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return ranges, nil
}

// parseReserved reads the kernel's list, in which 0 may be, too. The list is in
// ascending order.
func parseReserved(text string) ([]portrange.Range, error) {
	first, others, _ := strings.Cut(text, ",")
	if first == "0" {
		text = others
	} else if last, ok := strings.CutPrefix(text, "0-"); ok {
		text = "1-" + last
	}
	return portrange.Parse(text)
}

// classRanges are the ports among which netfilter's NAT looks for another, by
// the class of the original one (nf_nat_l4proto_unique_tuple).
func classRanges() [bpf.MasqPortClassIdPORT_CLASS_COUNT]portrange.Range {
	return [...]portrange.Range{
		bpf.MasqPortClassIdPORT_CLASS_LOW:        {First: 1, Last: 511},
		bpf.MasqPortClassIdPORT_CLASS_PRIVILEGED: {First: 600, Last: 1023},
		bpf.MasqPortClassIdPORT_CLASS_HIGH:       {First: 1024, Last: 65535},
	}
}

// newPortPool lists the ports that flows may get. toPorts, if any, are all
// there is, for flows of every class; nodePorts are left out otherwise, and
// reserved ports always.
func newPortPool(toPorts, nodePorts, reserved []portrange.Range) *bpf.MasqPortPool {
	pool := new(bpf.MasqPortPool)
	next := uint32(0)
	fill := func(r portrange.Range, without ...[]portrange.Range) uint32 {
		count := uint32(0)
		for port := int(r.First); port <= int(r.Last); port++ {
			if !slicesContain(without, uint16(port)) {
				pool.Ports[next+count] = uint16(port)
				count++
			}
		}
		return count
	}
	allow := func(r portrange.Range, without ...[]portrange.Range) {
		for port := int(r.First); port <= int(r.Last); port++ {
			if !slicesContain(without, uint16(port)) {
				pool.Allowed[port>>6] |= 1 << (port & 63)
			}
		}
	}
	if len(toPorts) > 0 {
		for _, r := range toPorts {
			allow(r, reserved)
			next += fill(r, reserved)
		}
		for i := range pool.Classes {
			pool.Classes[i].First, pool.Classes[i].Count = 0, next
		}
		return pool
	}
	allow(portrange.Range{First: 1, Last: 65535}, reserved, nodePorts)
	for i, r := range classRanges() {
		pool.Classes[i].First = next
		pool.Classes[i].Count = fill(r, reserved, nodePorts)
		next += pool.Classes[i].Count
	}
	return pool
}

func slicesContain(lists [][]portrange.Range, port uint16) bool {
	for _, list := range lists {
		for _, r := range list {
			if r.Contains(port) {
				return true
			}
		}
	}
	return false
}
