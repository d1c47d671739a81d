// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"flag"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

var profile = flag.Bool("profile", false, "measure the programs one by one, instead of only checking that it works")

const profiled = 500_000 // packets

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
	c := newContender(t, g, datapath, false, "--random-fully=false") // so that replies' ports are known
	g.countAt(t, c.Uplinks[0], link.Tail())
	// The node's own packets come in through the pod's link too.
	if err := c.Node.Sysctl("net/ipv4/conf/"+c.path().at.Name+"/accept_local", "1"); err != nil {
		t.Fatal(err)
	}
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stats.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, w := range c.ways() {
		c.profile(t, g, w)
	}
}

func (c *contender) ways() []way {
	exempt := netip.MustParseAddr("10.0.0.0")
	fromPod, fromNode, toExempt := c.path(), c.path(), c.path()
	fromNode.inside = fromNode.translated
	toExempt.remote, toExempt.translated = exempt, toExempt.inside

	toNode := route{at: c.Uplinks[0], inside: fromNode.inside, translated: fromNode.inside, remote: fromPod.remote, reply: true}
	fromExempt, toPod := toNode, toNode
	fromExempt.remote, fromExempt.inside, fromExempt.translated = exempt, fromPod.inside, fromPod.inside
	toPod.translated = fromPod.inside
	const egress, ingress = ebpf.AttachTCXEgress, ebpf.AttachTCXIngress
	return []way{
		{"to the node itself", ingress, toNode, someFlows},
		{"of the node itself", egress, fromNode, someFlows},
		{"from an exempt range", ingress, fromExempt, someFlows},
		{"to an exempt range", egress, toExempt, someFlows},
		{"of a new flow", egress, fromPod, allFlows},
		{"of an old flow", egress, fromPod, someFlows},
		{"reply to an old flow", ingress, toPod, someFlows},
	}
}

func (c *contender) profile(t *testing.T, g *generator, w way) {
	t.Helper()
	packets := uint64(profiled)
	switch {
	case !*profile:
		packets = someFlows
	case w.flows == allFlows:
		packets = most
	}
	if err := g.aim(w.route, w.flows); err != nil {
		t.Fatal(err)
	}
	if _, err := g.send(w.route.at, someFlows, forever); err != nil {
		t.Fatal(err)
	}
	ours, name := c.program(t, w.attach)
	spent, overhead := runs(t, ours), runs(t, g.Count)
	b, err := g.send(w.route.at, packets, forever)
	if err != nil {
		t.Fatal(err)
	}
	spent, overhead = runs(t, ours).since(spent), runs(t, g.Count).since(overhead)

	got := b.arrived.Kept
	if w.route.inside != w.route.translated {
		got = b.arrived.Translated
	}
	if got != b.sent || spent.count < b.sent {
		t.Errorf("%s, %s: %d sent, %+v arrived, %d runs", name, w.name, b.sent, b.arrived, spent.count)
	}
	if *profile {
		fmt.Printf("%-12s %-21s %5d ns (counter %3d ns)\n", name, w.name, spent.mean(), overhead.mean())
	}
}

// program is ours on the uplink, with its name.
func (c *contender) program(t *testing.T, attach ebpf.AttachType) (program *ebpf.Program, name string) {
	t.Helper()
	if err := c.Node.Do(func() error {
		attached, err := link.QueryPrograms(link.QueryOptions{Target: c.Uplinks[0].Index, Attach: attach})
		if err != nil || len(attached.Programs) == 0 {
			return fmt.Errorf("ask for programs: %+v, %w", attached, err)
		}
		program, err = ebpf.NewProgramFromID(attached.Programs[0].ID)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { program.Close() })
	info, err := program.Info()
	if err != nil {
		t.Fatal(err)
	}
	return program, info.Name
}

// run is what the kernel says of a program's runs.
type run struct {
	count uint64
	time  time.Duration
}

func runs(t *testing.T, p *ebpf.Program) run {
	t.Helper()
	stats, err := p.Stats()
	if err != nil {
		t.Fatal(err)
	}
	return run{stats.RunCount, stats.Runtime}
}

func (r run) since(earlier run) run {
	return run{r.count - earlier.count, r.time - earlier.time}
}

func (r run) mean() time.Duration { return r.time / time.Duration(max(r.count, 1)) }
