// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"flag"
	"fmt"
	"math"
	"testing"
	"time"

	"ip-masq-agent/internal/lab"
)

var smoke = flag.Bool("smoke", false, "measure, instead of only checking that what would be measured works")

const (
	someFlows = 1024             // fit every cache
	allFlows  = 60000 * remotes  // no packet's flow has been there before
	most      = 100_000          // packets of one slice: no table is full then
	slice     = time.Second / 10 // of one contender, in each round
	rounds    = 25               // at most
	budget    = 40 * time.Second // for the rounds
	forever   = time.Duration(math.MaxInt64)
)

// workload is what packets do to a node.
type workload struct {
	name  string
	flows uint32
}

var (
	newFlows    = workload{"new flows/s", allFlows}
	established = workload{"established packets/s", someFlows}
)

// TestSmoke compares the datapaths in a minute. Without -smoke it takes a few
// packets through each and lets captures look at them.
func TestSmoke(t *testing.T) {
	g := newGenerator(t)
	contenders := []*contender{
		newContender(t, g, plain, false),
		newContender(t, g, datapath, false),
		newContender(t, g, plain, true),
		newContender(t, g, datapath, true),
		newContender(t, g, iptables, true),
	}
	if !*smoke {
		for _, c := range contenders {
			lab.NewCapture(t, c.Wires[0])
		}
		runRound(t, g, contenders, 1000, forever)
		return
	}
	measured := results{}
	start := time.Now()
	for range rounds {
		measured.add(runRound(t, g, contenders, most, slice))
		if time.Since(start) > budget {
			break
		}
	}
	fmt.Print(measured.report(contenders))
}

// runRound has each contender do a slice of each workload.
func runRound(t *testing.T, g *generator, contenders []*contender, packets uint64, atMost time.Duration) map[cell]float64 {
	t.Helper()
	rates := make(map[cell]float64)
	for _, w := range []workload{newFlows, established} {
		for _, c := range contenders {
			b, err := c.run(g, w, packets, atMost)
			if err != nil {
				t.Fatalf("%s, %s: %v", c, w.name, err)
			}
			rates[cell{c, w}] = b.rate()
		}
	}
	return rates
}

// run does a workload, checks what came of each packet, and leaves no flow.
func (c *contender) run(g *generator, w workload, packets uint64, atMost time.Duration) (burst, error) {
	if err := g.aim(c.path(), w.flows); err != nil {
		return burst{}, err
	}
	if w == established {
		if _, err := g.send(c.path().at, someFlows, forever); err != nil {
			return burst{}, err
		}
	}
	b, err := g.send(c.path().at, packets, atMost)
	if err != nil {
		return b, err
	}
	if err := c.check(b); err != nil {
		return b, err
	}
	return b, c.forget()
}

// check: a pod's address outside is as wrong as the node's for a node that does
// not translate. The odd packet may be lost on a busy machine.
func (c *contender) check(b burst) error {
	wrong := b.arrived.Kept + b.arrived.Other
	if !c.translates() {
		wrong = b.arrived.Translated + b.arrived.Other
	}
	if wrong > 0 {
		return fmt.Errorf("%d of %d packets came with a wrong source: %+v", wrong, b.sent, b.arrived)
	}
	if lost := b.sent - b.delivered(); lost*1000 > b.sent {
		return fmt.Errorf("%d of %d packets were lost", lost, b.sent)
	}
	tracked, err := c.TrackedConnections()
	if err != nil {
		return fmt.Errorf("ask conntrack: %w", err)
	}
	if tracked > 0 != c.conntrack {
		return fmt.Errorf("the node tracks %d connections", tracked)
	}
	return nil
}
