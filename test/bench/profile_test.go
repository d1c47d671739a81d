// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"ip-masq-agent/test/bench/report"
)

var profile = flag.Bool("profile", false, "measure the programs one by one, instead of only checking that it works")

const (
	profiledPackets  = 500_000
	newProfiledFlows = 100_000 // at most: no table is full then
)

// way is one way through the programs.
type way struct {
	name   string
	attach ebpf.AttachType
	route  route
	flows  uint32
}

// TestProfile measures how long one run of a program takes by what the packet
// is. The time includes the kernel's work to measure it, most of what the
// counter takes.
func TestProfile(t *testing.T) {
	g := newGenerator(t)
	c := newProfiled(t, g)
	packets := uint64(someFlows)
	if *profile {
		packets = profiledPackets
	}
	measureRuns(t)
	for _, w := range c.ways() {
		spent, overhead := c.profile(t, g, w, packets)
		if *profile {
			fmt.Printf("%-36s %5d ns (counter %3d ns)\n", w.name, spent.mean(), overhead.mean())
		}
	}
}

// newProfiled makes a node whose replies' ports are known, and whose answers
// end behind our programs.
func newProfiled(tb testing.TB, g *generator) *contender {
	tb.Helper()
	c := newContender(tb, g, report.EBPF, options{size: report.CIDRs, flags: []string{"--random-fully=false"}})
	g.countAt(tb, c.Uplinks[0], link.Tail())
	return c
}

// measureRuns has the kernel measure all programs until the test ends, which
// makes them slower.
func measureRuns(tb testing.TB) {
	tb.Helper()
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := stats.Close(); err != nil {
			tb.Error(err)
		}
	})
}

func (c *contender) ways() []way {
	fromPod, fromNode, toExempt := c.toMasqueraded(), c.ofNode(), c.toExempt()
	toNode := route{at: c.Uplinks[0], inside: fromNode.inside, translated: fromNode.inside, remote: fromPod.remote, reply: true}
	fromExempt, toPod := toNode, toNode
	fromExempt.remote, fromExempt.inside, fromExempt.translated = toExempt.remote, fromPod.inside, fromPod.inside
	toPod.translated = fromPod.inside
	const egress, ingress = ebpf.AttachTCXEgress, ebpf.AttachTCXIngress
	return []way{
		{"masq_ingress, to the node itself", ingress, toNode, someFlows},
		{report.RunOwn, egress, fromNode, someFlows},
		{"masq_ingress, from an exempt range", ingress, fromExempt, someFlows},
		{report.RunExempt, egress, toExempt, someFlows},
		{"masq_egress, of a new flow", egress, fromPod, allFlows},
		{report.RunEstablished, egress, fromPod, someFlows},
		{"masq_ingress, reply to an old flow", ingress, toPod, someFlows},
	}
}

// profile takes packets a way, after those that open its flows.
func (c *contender) profile(tb testing.TB, g *generator, w way, packets uint64) (spent, overhead run) {
	tb.Helper()
	if w.flows == allFlows {
		packets = min(packets, newProfiledFlows)
	}
	if err := g.aim(w.route, w.flows); err != nil {
		tb.Fatal(err)
	}
	if _, err := g.send(w.route.at, someFlows, forever); err != nil {
		tb.Fatal(err)
	}
	ours := c.program(tb, w.attach)
	spent, overhead = runs(tb, ours), runs(tb, g.Count)
	b, err := g.send(w.route.at, packets, forever)
	if err != nil {
		tb.Fatal(err)
	}
	spent, overhead = runs(tb, ours).since(spent), runs(tb, g.Count).since(overhead)

	got := b.arrived.Kept
	if w.route.inside != w.route.translated {
		got = b.arrived.Translated
	}
	if got != b.sent || spent.count < b.sent {
		tb.Errorf("%s: %d sent, %+v arrived, %d runs", w.name, b.sent, b.arrived, spent.count)
	}
	return spent, overhead
}

// program is ours on the uplink.
func (c *contender) program(tb testing.TB, attach ebpf.AttachType) (program *ebpf.Program) {
	tb.Helper()
	if err := c.Node.Do(func() error {
		attached, err := link.QueryPrograms(link.QueryOptions{Target: c.Uplinks[0].Index, Attach: attach})
		if err != nil || len(attached.Programs) == 0 {
			return fmt.Errorf("ask for programs: %+v, %w", attached, err)
		}
		program, err = ebpf.NewProgramFromID(attached.Programs[0].ID)
		return err
	}); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { program.Close() })
	return program
}

// run is what the kernel says of a program's runs.
type run struct {
	count uint64
	time  time.Duration
}

func runs(tb testing.TB, p *ebpf.Program) run {
	tb.Helper()
	stats, err := p.Stats()
	if err != nil {
		tb.Fatal(err)
	}
	return run{stats.RunCount, stats.Runtime}
}

func (r run) since(earlier run) run {
	return run{r.count - earlier.count, r.time - earlier.time}
}

func (r run) mean() time.Duration { return r.time / time.Duration(max(r.count, 1)) }
