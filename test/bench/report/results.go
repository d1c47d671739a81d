// SPDX-License-Identifier: Apache-2.0

// Package report turns what the benchmarks measured into the tables and plots
// of docs/performance.md, and says which targets are met.
package report

import (
	"maps"
	"slices"
)

// Figure is what is measured.
type Figure string

// The figures, with their units.
const (
	Established  Figure = "established flows, packets/s"
	Exempt       Figure = "exempt flows, packets/s"
	Own          Figure = "the node's own flows, packets/s"
	NewFlows     Figure = "new flows/s"
	Throughput   Figure = "TCP, Gbit/s"
	Unaided      Figure = "TCP without offloads, Gbit/s"
	Latency      Figure = "TCP request and response, µs"
	Connections  Figure = "TCP connections/s"
	Run          Figure = "run of a program, ns"
	Failures     Figure = "failed allocations, %"
	FlowBytes    Figure = "map memory per flow, bytes"
	Reload       Figure = "reload, ms"
	SweepCPU     Figure = "sweep, s of CPU"
	SweepStretch Figure = "longest system call of a sweep, ms"
	Ask          Figure = "asked with a full table, ms"
	Reconcile    Figure = "reconcile, ms"
	Allocations  Figure = "reconcile, KiB allocated"
	Resident     Figure = "resident memory, MB"
	Idle         Figure = "CPU when idle, %"
)

// The contenders.
const (
	Plain    = "plain routing"
	Legacy   = "iptables-legacy"
	NFT      = "iptables-nft"
	Set      = "nft set + masquerade"
	Upstream = "classic agent's chain"
	Iptables = "ours, iptables"
	EBPF     = "ours, ebpf"
	FastPath = "ours, ebpf with --fast-path"
)

// Key says what a series of values is of.
type Key struct {
	Figure    Figure
	Subject   string // a contender, a way through the programs, a family
	Conntrack bool   // whether the node tracks connections
	At        int    // CIDRs, entries, or % of load; 0: the figure depends on none
}

// Results are values, one a round: values of the same index are of the same
// round.
type Results map[Key][]float64

// Add adds a round's value.
func (r Results) Add(k Key, value float64) { r[k] = append(r[k], value) }

// Median gives 0, false where nothing was measured.
func (r Results) Median(k Key) (float64, bool) {
	values := r[k]
	if len(values) == 0 {
		return 0, false
	}
	return Quantile(values, 0.5), true
}

// Ratio is the median of the rounds' ratios: what slows the machine down for a
// while slows both of a round. It gives 0, false where one was not measured.
func (r Results) Ratio(a, b Key) (float64, bool) {
	over, under := r[a], r[b]
	var ratios []float64
	for i := range min(len(over), len(under)) {
		ratios = append(ratios, over[i]/under[i])
	}
	if len(ratios) == 0 {
		return 0, false
	}
	return Quantile(ratios, 0.5), true
}

// Quantile interpolates between the nearest two of at least one value.
func Quantile(values []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	low := int(at)
	high := min(low+1, len(sorted)-1)
	return sorted[low] + (at-float64(low))*(sorted[high]-sorted[low])
}

// at lists what a figure was measured at.
func (r Results) at(f Figure) []int {
	found := make(map[int]bool)
	for k := range r {
		if k.Figure == f {
			found[k.At] = true
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// subjects lists what a figure was measured of, in alphabetical order.
func (r Results) subjects(f Figure) []string {
	found := make(map[string]bool)
	for k := range r {
		if k.Figure == f {
			found[k.Subject] = true
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// column is a contender on a node of one kind: a line of most tables.
type column struct {
	name      string
	conntrack bool
}

// columns are all that took part, netfilter's in the middle.
func (r Results) columns() []column {
	var columns []column
	for _, name := range []string{Plain, Legacy, NFT, Set, Upstream, Iptables, EBPF, FastPath} {
		for _, conntrack := range []bool{false, true} {
			c := column{name, conntrack}
			if slices.ContainsFunc(slices.Collect(maps.Keys(r)), c.of) {
				columns = append(columns, c)
			}
		}
	}
	return columns
}

func (c column) of(k Key) bool {
	return k.Figure == Established && k.Subject == c.name && k.Conntrack == c.conntrack
}

func (c column) key(f Figure, at int) Key { return Key{f, c.name, c.conntrack, at} }

// limit is plain routing on a node of the same kind.
func (c column) limit() column { return column{Plain, c.conntrack} }

// netfilter reports whether it is netfilter that translates: then conntrack is on anyway.
func (c column) netfilter() bool { return c.name != Plain && c.name != EBPF && c.name != FastPath }

func (c column) String() string {
	switch {
	case c.netfilter():
		return c.name
	case c.conntrack:
		return c.name + ", conntrack on"
	}
	return c.name + ", no conntrack"
}
