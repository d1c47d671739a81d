// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// cell is one column of one line of the table.
type cell struct {
	*contender
	workload
}

// results are rates, one a round.
type results map[cell][]float64

func (r results) add(rates map[cell]float64) {
	for c, rate := range rates {
		r[c] = append(r[c], rate)
	}
}

// report is a table and the ratios that matter.
func (r results) report(contenders []*contender) string {
	var s strings.Builder
	find := func(name string, conntrack bool) *contender {
		return contenders[slices.IndexFunc(contenders, func(c *contender) bool {
			return c.name == name && c.conntrack == conntrack
		})]
	}
	fmt.Fprintf(&s, "%s, %s\n", kernel(), processor())
	fmt.Fprintf(&s, "per second of one processor, %d CIDRs: median of %d rounds (quartiles)\n",
		cidrs, len(r[cell{contenders[0], newFlows}]))
	fmt.Fprintf(&s, "%-20s %-32s %s\n", "", newFlows.name, established.name)
	for _, c := range contenders {
		fmt.Fprintf(&s, "%-20s %-32s %s\n", c, spread(r[cell{c, newFlows}]), spread(r[cell{c, established}]))
	}
	for _, conntrack := range []bool{true, false} {
		if conntrack {
			fmt.Fprint(&s, "with conntrack: ")
		}
		ours := find(datapath, conntrack)
		fmt.Fprintf(&s, "new_flows ebpf/iptables@%d=%.2f established ebpf/plain=%.2f\n", cidrs,
			r.ratio(newFlows, ours, find(iptables, true)), r.ratio(established, ours, find(plain, conntrack)))
	}
	return s.String()
}

// ratio is the median of the rounds': what slows the machine down for a while
// slows both contenders of a round.
func (r results) ratio(w workload, a, b *contender) float64 {
	ratios := slices.Clone(r[cell{a, w}])
	for i, rate := range r[cell{b, w}] {
		ratios[i] /= rate
	}
	return quantile(ratios, 0.5)
}

func spread(rates []float64) string {
	return fmt.Sprintf("%8.0f (%.0f to %.0f)", quantile(rates, 0.5), quantile(rates, 0.25), quantile(rates, 0.75))
}

// quantile interpolates between the nearest two.
func quantile(values []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	low := int(at)
	high := min(low+1, len(sorted)-1)
	return sorted[low] + (at-float64(low))*(sorted[high]-sorted[low])
}

func kernel() string {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return "unknown kernel"
	}
	return "Linux " + unix.ByteSliceToString(name.Release[:])
}

func processor() string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return runtime.GOARCH
	}
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			return fmt.Sprintf("%s, %d of them", strings.TrimSpace(value), runtime.NumCPU())
		}
	}
	return runtime.GOARCH
}
