// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"ip-masq-agent/internal/api"

	goiptables "github.com/coreos/go-iptables/iptables"
)

// counters reads what the rules of our chains counted. The kernel zeroes a
// rule's counter when the rule is written; these go on.
type counters struct {
	chain string
	drops bool
	ports map[family]*goiptables.IPTables

	mutex      sync.Mutex // held while counters are read or zeroed
	translated map[family]*tally
	invalid    map[family]*tally
}

// tally is a counter that survives that of the kernel.
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

// probe asks the programs of a backend for their version and with it for what
// they can do. A family whose program is missing fails when it is synced.
func probe(m mode, options Options) (map[family]bool, *counters, error) {
	random := make(map[family]bool)
	c := &counters{
		chain: options.Chain, drops: options.DropInvalid,
		ports:      make(map[family]*goiptables.IPTables),
		translated: make(map[family]*tally), invalid: make(map[family]*tally),
	}
	for _, f := range families() {
		c.translated[f], c.invalid[f] = new(tally), new(tally)
		protocol := goiptables.ProtocolIPv4
		if f == ipv6 {
			protocol = goiptables.ProtocolIPv6
		}
		program := tool{mode: m, family: f}.program("")
		port, err := goiptables.New(goiptables.Path(program), goiptables.IPFamily(protocol), goiptables.Timeout(lockWait))
		if err != nil && f == ipv4 {
			return nil, nil, fmt.Errorf("ask %s for its version: %w", program, err)
		}
		random[f] = options.RandomFully && (err != nil || port.HasRandomFully())
		if err == nil && (f == ipv4 || options.IPv6) {
			c.ports[f] = port
		}
	}
	return random, c, nil
}

// read takes a reading of one family.
func (c *counters) read(f family) error {
	port := c.ports[f]
	if port == nil {
		return nil
	}
	n, err := count(port, tableNAT, c.chain, "MASQUERADE")
	if err != nil {
		return err
	}
	c.translated[f].see(n)
	if !c.drops {
		return nil
	}
	if n, err = count(port, tableMangle, InvalidChain, "DROP"); err != nil {
		return err
	}
	c.invalid[f].see(n)
	return nil
}

// count adds up the packets of a chain's rules with one target. A chain that is
// not there counted nothing.
func count(port *goiptables.IPTables, table, name, target string) (uint64, error) {
	lines, err := port.ListWithCounters(table, name)
	var failed *goiptables.Error
	if errors.As(err, &failed) && failed.ExitStatus() == 1 {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read counters of chain %s: %w", name, err)
	}
	var sum uint64
	for _, line := range lines {
		if r := rule(line); r.target() == target {
			n, err := strconv.ParseUint(r.value("-c"), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("read counters of chain %s: %w", name, err)
			}
			sum += n
		}
	}
	return sum, nil
}

// Stats are what the rules' counters say, over all rewrites of the chains. A
// rule of nat sees the first packet of a flow, so it counts flows.
func (d *Datapath) Stats() (api.Stats, error) {
	d.mutex.Lock()
	stats := api.Stats{Drops: make(map[string]uint64), Repairs: d.repairs}
	c := d.counters
	d.mutex.Unlock()
	for _, reason := range api.DropReasons() {
		stats.Drops[reason] = 0
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	var errs []error
	for _, f := range families() {
		errs = append(errs, c.read(f))
		stats.Drops["invalid"] += c.invalid[f].total()
	}
	stats.TranslationsV4, stats.TranslationsV6 = c.translated[ipv4].total(), c.translated[ipv6].total()
	return stats, errors.Join(errs...)
}

// writeCounted writes a change without losing what the rules counted so far.
func (d *Datapath) writeCounted(ctx context.Context, t tool, c chain, do change) error {
	d.counters.mutex.Lock()
	defer d.counters.mutex.Unlock()
	if err := d.counters.read(t.family); err != nil {
		d.log.Debug("counters of rules are lost", "chain", c.name, "error", err)
	}
	if err := t.write(ctx, c, do, c.difference); err != nil {
		return err
	}
	if do.refill {
		d.counters.of(c)[t.family].zeroed()
	}
	return nil
}

func (c *counters) of(written chain) map[family]*tally {
	if written.table == tableMangle {
		return c.invalid
	}
	return c.translated
}
