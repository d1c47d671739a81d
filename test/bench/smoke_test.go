// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"flag"
	"fmt"
	"strings"
	"testing"
	"time"

	"ip-masq-agent/internal/lab"
	"ip-masq-agent/test/bench/report"
)

var smoke = flag.Bool("smoke", false, "measure for a minute, instead of only checking that what would be measured works")

const (
	smokePackets = 100_000          // of one slice: no table is full then
	smokeSlice   = time.Second / 10 // of one contender, in each round
	smokeRounds  = 25               // at most
	smokeBudget  = 40 * time.Second // for the rounds
)

// TestSmoke compares the datapaths in a minute. Without -smoke it takes a few
// packets through each and lets captures look at them.
func TestSmoke(t *testing.T) {
	g := newGenerator(t)
	plain, tracking := options{size: report.CIDRs}, options{size: report.CIDRs, conntrack: true}
	contenders := []*contender{
		newContender(t, g, report.Plain, plain),
		newContender(t, g, report.EBPF, plain),
		newContender(t, g, report.FastPath, plain),
		newContender(t, g, report.Plain, tracking),
		newContender(t, g, report.EBPF, tracking),
		newContender(t, g, report.FastPath, tracking),
		newContender(t, g, report.Iptables, tracking),
	}
	results := report.Results{}
	if !*smoke {
		for _, c := range contenders {
			lab.NewCapture(t, c.Wires[0])
		}
		smokeRound(t, g, contenders, results, someFlows, forever)
		return
	}
	start := time.Now()
	for range smokeRounds {
		smokeRound(t, g, contenders, results, smokePackets, smokeSlice)
		if time.Since(start) > smokeBudget {
			break
		}
	}
	fmt.Print(smokeReport(results, contenders))
}

// smokeRound has each contender do a slice of two workloads.
func smokeRound(t *testing.T, g *generator, contenders []*contender, results report.Results, packets uint64, atMost time.Duration) {
	t.Helper()
	for _, w := range workloads()[:2] {
		for _, c := range contenders {
			b, err := c.run(g, w, packets, atMost)
			if err != nil {
				t.Fatal(err)
			}
			results.Add(c.key(w.figure, report.CIDRs), b.rate())
		}
	}
}

// smokeReport is a table and the ratios that matter.
func smokeReport(results report.Results, contenders []*contender) string {
	var s strings.Builder
	spread := func(c *contender, f report.Figure) string {
		rates := results[c.key(f, report.CIDRs)]
		return fmt.Sprintf("%8.0f (%.0f to %.0f)", report.Quantile(rates, 0.5), report.Quantile(rates, 0.25), report.Quantile(rates, 0.75))
	}
	fmt.Fprintf(&s, "%s, %s\n", kernel(), processor())
	fmt.Fprintf(&s, "per second of one processor, %d CIDRs: median of %d rounds (quartiles)\n",
		report.CIDRs, len(results[contenders[0].key(report.NewFlows, report.CIDRs)]))
	fmt.Fprintf(&s, "%-38s %-32s %s\n", "", report.NewFlows, report.Established)
	for _, c := range contenders {
		fmt.Fprintf(&s, "%-38s %-32s %s\n", c, spread(c, report.NewFlows), spread(c, report.Established))
	}
	for _, conntrack := range []bool{true, false} {
		if conntrack {
			fmt.Fprint(&s, "with conntrack: ")
		}
		ratio := func(f report.Figure, limit string, limitConntrack bool) float64 {
			ratio, _ := results.Ratio(report.Key{Figure: f, Subject: report.EBPF, Conntrack: conntrack, At: report.CIDRs},
				report.Key{Figure: f, Subject: limit, Conntrack: limitConntrack, At: report.CIDRs})
			return ratio
		}
		fmt.Fprintf(&s, "new_flows ebpf/iptables@%d=%.2f established ebpf/plain=%.2f\n", report.CIDRs,
			ratio(report.NewFlows, report.Iptables, true), ratio(report.Established, report.Plain, conntrack))
	}
	return s.String()
}
