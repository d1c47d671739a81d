// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"strings"
)

// CIDRs is how many exempt ranges there are where the number does not matter
// much.
const CIDRs = 1000

// What is left of plain routing's rate. Exempt packets must not pay for the
// translation of others.
const (
	establishedBound = 0.92
	exemptBound      = 0.96
)

// target is a promise to ourselves.
type target struct {
	what    string
	bound   float64
	atMost  bool // otherwise at least
	unit    string
	measure func(Results) (float64, bool)
}

// met reports whether a value is good enough.
func (t target) met(value float64) bool {
	if t.atMost {
		return value <= t.bound
	}
	return value >= t.bound
}

func (t target) want() string {
	sign := "≥"
	if t.atMost {
		sign = "≤"
	}
	return fmt.Sprintf("%s %s%s", sign, number(t.bound), t.unit)
}

func targets() []target {
	var all []target
	all = append(all, packetTargets()...)
	all = append(all, flowTargets()...)
	return append(all, costTargets()...)
}

func ratioOf(a, b Key) func(Results) (float64, bool) {
	return func(r Results) (float64, bool) { return r.Ratio(a, b) }
}

func medianOf(k Key) func(Results) (float64, bool) {
	return func(r Results) (float64, bool) { return r.Median(k) }
}

func with(conntrack bool) string {
	if conntrack {
		return "conntrack on"
	}
	return "no conntrack"
}

func packetTargets() []target {
	var targets []target
	for _, f := range []struct {
		figure Figure
		bound  float64
	}{{Established, establishedBound}, {Exempt, exemptBound}, {Own, exemptBound}} {
		what, _, _ := strings.Cut(string(f.figure), ",")
		for _, conntrack := range []bool{false, true} {
			targets = append(targets, target{
				what: what + ", ebpf against plain routing, " + with(conntrack), bound: f.bound,
				measure: ratioOf(Key{f.figure, EBPF, conntrack, CIDRs}, Key{f.figure, Plain, conntrack, CIDRs}),
			})
		}
	}
	return append(targets,
		target{what: "established flows, ebpf without conntrack against the best of netfilter", bound: 1.4, measure: againstNetfilter(EBPF, false)},
		target{what: "established flows, ebpf with conntrack on anyway against the best of netfilter", bound: 0.95, measure: againstNetfilter(EBPF, true)},
		target{what: "the same with --fast-path", bound: 1.25, measure: againstNetfilter(FastPath, true)},
	)
}

// againstNetfilter compares with the netfilter contender that was best.
func againstNetfilter(name string, conntrack bool) func(Results) (float64, bool) {
	return func(r Results) (float64, bool) {
		worst, found := 0.0, false
		for _, c := range r.columns() {
			if !c.netfilter() {
				continue
			}
			ratio, ok := r.Ratio(Key{Established, name, conntrack, CIDRs}, c.key(Established, CIDRs))
			if ok && (!found || ratio < worst) {
				worst, found = ratio, true
			}
		}
		return worst, found
	}
}

func flowTargets() []target {
	var targets []target
	for _, f := range []struct {
		conntrack bool
		at        int
		bound     float64
	}{{false, 4, 2.5}, {false, 1000, 15}, {true, 4, 1.4}, {true, 1000, 8}} {
		targets = append(targets, target{
			what: fmt.Sprintf("new flows, ebpf against iptables-nft at %d CIDRs, %s", f.at, with(f.conntrack)), bound: f.bound,
			measure: ratioOf(Key{NewFlows, EBPF, f.conntrack, f.at}, Key{NewFlows, NFT, true, f.at}),
		})
	}
	for _, f := range []struct {
		conntrack bool
		bound     float64
	}{{false, 2.5}, {true, 1.4}} {
		targets = append(targets, target{
			what: "new flows, ebpf against nft set + masquerade at any number of CIDRs, " + with(f.conntrack), bound: f.bound,
			measure: againstSet(f.conntrack),
		})
	}
	for _, conntrack := range []bool{false, true} {
		targets = append(targets, target{
			what: "new flows, ebpf at 10000 CIDRs against 4, " + with(conntrack), bound: 0.95,
			measure: ratioOf(Key{NewFlows, EBPF, conntrack, 10000}, Key{NewFlows, EBPF, conntrack, 4}),
		})
	}
	return targets
}

// againstSet is the worst ratio at any number of CIDRs.
func againstSet(conntrack bool) func(Results) (float64, bool) {
	return func(r Results) (float64, bool) {
		worst, found := 0.0, false
		for _, at := range r.at(NewFlows) {
			ratio, ok := r.Ratio(Key{NewFlows, EBPF, conntrack, at}, Key{NewFlows, Set, true, at})
			if ok && (!found || ratio < worst) {
				worst, found = ratio, true
			}
		}
		return worst, found
	}
}

func costTargets() []target {
	return []target{
		{what: "failed allocations towards one remote at 90 % of the ports, ebpf", bound: 0, atMost: true, unit: " %", measure: medianOf(Key{Failures, EBPF, false, 90})},
		{what: "the same at 100 %", bound: 1, atMost: true, unit: " %", measure: medianOf(Key{Failures, EBPF, false, 100})},
		{what: "map memory per translated flow, IPv4", bound: 256, atMost: true, unit: " bytes", measure: medianOf(Key{FlowBytes, "IPv4", false, 0})},
		{what: "map memory per translated flow, IPv6", bound: 320, atMost: true, unit: " bytes", measure: medianOf(Key{FlowBytes, "IPv6", false, 0})},
		{what: "sweep of 1000000 entries", bound: 1.5, atMost: true, unit: " s of CPU", measure: worstOf(SweepCPU, 1_000_000)},
		{what: "longest uninterrupted stretch of that sweep", bound: 10, atMost: true, unit: " ms", measure: worstOf(SweepStretch, 1_000_000)},
		{what: "reload of 10000 CIDRs, ebpf", bound: 100, atMost: true, unit: " ms", measure: medianOf(Key{Reload, EBPF, false, 10000})},
		{what: "reload of 10000 CIDRs, iptables (nft)", bound: 600, atMost: true, unit: " ms", measure: medianOf(Key{Reload, Iptables, true, 10000})},
		{what: "resident memory of the agent, either datapath", bound: 30, atMost: true, unit: " MB", measure: worstOf(Resident, 0)},
		{what: "CPU of an idle agent, either datapath", bound: 0.1, atMost: true, unit: " %", measure: worstOf(Idle, 0)},
	}
}

// worstOf is the largest median among a figure's subjects.
func worstOf(f Figure, at int) func(Results) (float64, bool) {
	return func(r Results) (float64, bool) {
		worst, found := 0.0, false
		for k := range r {
			if k.Figure != f || k.At != at {
				continue
			}
			if m, ok := r.Median(k); ok {
				worst, found = max(worst, m), true
			}
		}
		return worst, found
	}
}
