// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"sync"

	"ip-masq-agent/internal/api"
)

// tally is a counter that survives that of the kernel, which is zeroed when its
// rule is written.
type tally struct{ past, last uint64 }

// see takes a reading. A smaller one than the last means that somebody else
// zeroed the counter since.
func (t *tally) see(now uint64) {
	if now < t.last {
		t.past += t.last
	}
	t.last = now
}

// zeroed says that the kernel's counter begins anew.
func (t *tally) zeroed() { t.past, t.last = t.past+t.last, 0 }

func (t *tally) total() uint64 { return t.past + t.last }

// counters are what the rules of our chains counted.
type counters struct {
	mutex   sync.Mutex // held while a chain is read and while it is written
	tallies map[key]*tally
}

// key names one of our chains.
type key struct {
	family family
	table  string
}

func (c *counters) of(f family, table string) *tally {
	k := key{f, table}
	if c.tallies[k] == nil {
		c.tallies[k] = new(tally)
	}
	return c.tallies[k]
}

// Stats are what the rules' counters say, over all rewrites of the chains. A
// rule of nat sees the first packet of a flow, so it counts flows. What was
// counted between the last reading and a foreign flush is lost.
func (d *Datapath) Stats() (api.Stats, error) {
	d.mutex.Lock()
	stats := api.Stats{Drops: make(map[string]uint64), Repairs: d.repairs}
	m := d.mode
	d.mutex.Unlock()
	for _, reason := range api.DropReasons() {
		stats.Drops[reason] = 0
	}
	var errs []error
	for _, f := range d.families() {
		for _, c := range emptyChains(d.options.Chain) {
			if c.table == tableMangle && !d.options.DropInvalid {
				continue
			}
			n, err := d.readCounter(newTool(m, f), c)
			errs = append(errs, err)
			switch {
			case c.table == tableMangle:
				stats.Drops["invalid"] += n
			case f == ipv4:
				stats.TranslationsV4 = n
			default:
				stats.TranslationsV6 = n
			}
		}
	}
	return stats, errors.Join(errs...)
}

// readCounter gives the last known figure where the chain cannot be read.
func (d *Datapath) readCounter(t tool, c chain) (uint64, error) {
	d.counters.mutex.Lock()
	defer d.counters.mutex.Unlock()
	counter := d.counters.of(t.family, c.table)
	if !t.registered(c.table) { // nothing was synced yet
		return counter.total(), nil
	}
	now, err := t.list(context.Background(), c.table, c.name)
	if err == nil && now.found {
		counter.see(now.packets(c.counted))
	}
	return counter.total(), err
}
