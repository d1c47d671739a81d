// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"testing"

	"ip-masq-agent/test/bench/report"
)

// plausible are bounds that a working benchmark keeps on any machine.
func plausible() map[report.Figure][2]float64 {
	rate, connections := [2]float64{10, 1e9}, [2]float64{1, 1e7}
	return map[report.Figure][2]float64{
		report.Established: rate, report.Exempt: rate, report.Own: rate, report.NewFlows: rate,
		report.Throughput: {1e-3, 1e4}, report.Unaided: {1e-3, 1e4},
		report.Latency: {1, 1e6}, report.Connections: connections,
		report.Run: {10, 1e6}, report.Failures: {0, 10}, report.FlowBytes: {100, 1000},
		report.Reload: {0.1, 60_000}, report.SweepCPU: {1e-6, 1000}, report.SweepStretch: {1e-4, 1e4},
		report.Ask: {1e-3, 60_000}, report.Reconcile: {1e-3, 60_000}, report.Allocations: {1e-3, 1e6},
		report.Resident: {5, 500}, report.Idle: {0, 100},
	}
}

// checkAll: every figure is there of all that it is measured of, in every
// round, and can be true.
func (b *bench) checkAll(t *testing.T) {
	t.Helper()
	for _, k := range b.wanted() {
		if len(b.results[k]) == 0 {
			t.Errorf("not measured: %+v", k)
		}
	}
	bounds := plausible()
	for k, values := range b.results {
		for _, value := range values {
			if low, high := bounds[k.Figure][0], bounds[k.Figure][1]; !(value >= low && value <= high) {
				t.Errorf("%+v: %v, want %v to %v", k, value, low, high)
			}
		}
	}
}

// wanted are all keys that results must have.
func (b *bench) wanted() []report.Key {
	var keys []report.Key
	for _, c := range b.contenders {
		for _, size := range b.sizes {
			if c.ebpf() && c.size != size {
				continue
			}
			for _, w := range workloads() {
				keys = append(keys, c.key(w.figure, size))
			}
			if c.name != report.Plain && !c.ebpf() {
				keys = append(keys, c.key(report.Reload, size))
			}
		}
		for _, f := range []report.Figure{report.Throughput, report.Latency, report.Connections} {
			keys = append(keys, c.key(f, report.CIDRs))
		}
	}
	for _, c := range b.unaided {
		keys = append(keys, c.key(report.Unaided, report.CIDRs))
	}
	for _, size := range b.sizes {
		keys = append(keys, report.Key{Figure: report.Reload, Subject: report.EBPF, At: size})
	}
	for _, c := range b.limited {
		for _, load := range []int{75, 90, 100} {
			keys = append(keys, c.key(report.Failures, load))
		}
		for _, f := range []report.Figure{report.Resident, report.Idle} {
			keys = append(keys, c.key(f, 0))
		}
		for _, f := range []report.Figure{report.Reconcile, report.Allocations} {
			keys = append(keys, c.key(f, report.CIDRs))
		}
	}
	for _, w := range b.profiled.ways() {
		keys = append(keys, report.Key{Figure: report.Run, Subject: w.name})
	}
	for _, family := range []string{"IPv4", "IPv6"} {
		keys = append(keys, report.Key{Figure: report.FlowBytes, Subject: family})
	}
	for _, size := range b.flowSizes {
		for _, kind := range []string{"metrics", "status", "list"} {
			keys = append(keys, report.Key{Figure: report.Ask, Subject: askSubject(kind), At: size})
		}
		for _, kind := range []string{"empty", "live", "ended", "orphans"} {
			for _, f := range []report.Figure{report.SweepCPU, report.SweepStretch} {
				keys = append(keys, report.Key{Figure: f, Subject: sweepSubject(kind), At: size})
			}
		}
	}
	return keys
}
