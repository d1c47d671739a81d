// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"strings"
	"time"

	"ip-masq-agent/test/bench/report"
)

const (
	someFlows = 1024            // fit every cache
	allFlows  = 60000 * remotes // no packet's flow has been there before
	forever   = time.Duration(math.MaxInt64)
)

// workload is what packets do to a node.
type workload struct {
	figure report.Figure
	route  func(*contender) route
	flows  uint32
}

func workloads() []workload {
	return []workload{
		{report.NewFlows, (*contender).toMasqueraded, allFlows},
		{report.Established, (*contender).toMasqueraded, someFlows},
		{report.Exempt, (*contender).toExempt, someFlows},
		{report.Own, (*contender).ofNode, someFlows},
	}
}

// errLost says that more than the odd packet did not arrive.
var errLost = errors.New("packets were lost")

// run does a workload, checks what came of each packet, and leaves no flow. On
// a busy machine a queue may overflow: what was measured then counts for
// nothing, and is measured again.
func (c *contender) run(g *generator, w workload, packets uint64, atMost time.Duration) (b burst, err error) {
	const attempts = 5
	for range attempts {
		b, err = c.attempt(g, w, packets, atMost)
		if !errors.Is(err, errLost) {
			break
		}
	}
	if err != nil {
		return b, fmt.Errorf("%s, %s: %w", c, w.figure, err)
	}
	return b, nil
}

func (c *contender) attempt(g *generator, w workload, packets uint64, atMost time.Duration) (burst, error) {
	r := w.route(c)
	if err := g.aim(r, w.flows); err != nil {
		return burst{}, err
	}
	if w.flows == someFlows {
		if _, err := g.send(r.at, someFlows, forever); err != nil {
			return burst{}, err
		}
		if err := c.warm(g, r); err != nil {
			return burst{}, err
		}
	}
	b, err := g.send(r.at, packets, atMost)
	if err != nil {
		return b, err
	}
	return b, errors.Join(c.check(b, r), c.forget())
}

// check holds the sources outside against what they should be: a pod's address
// is as wrong as the node's for a node that does not translate.
func (c *contender) check(b burst, r route) error {
	wrong := b.arrived.Kept + b.arrived.Other
	if r.inside == r.translated {
		wrong = b.arrived.Translated + b.arrived.Other
	}
	if wrong > 0 {
		return fmt.Errorf("%d of %d packets came with a wrong source: %+v", wrong, b.sent, b.arrived)
	}
	if lost := b.sent - b.delivered(); lost*1000 > b.sent {
		drops, err := c.drops()
		return errors.Join(fmt.Errorf("%d of %d %w, the agent counts %v", lost, b.sent, errLost, drops), err)
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

// drops are those that our datapath counts, by metric.
func (c *contender) drops() (map[string]float64, error) {
	if c.agent == nil {
		return nil, nil
	}
	all, err := c.metrics()
	maps.DeleteFunc(all, func(name string, n float64) bool {
		return n == 0 || !strings.HasPrefix(name, "ip_masq_agent_datapath_drops_total")
	})
	return all, err
}
