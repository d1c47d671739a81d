// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"slices"
	"strings"
	"sync"

	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/portrange"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

// levelRules is --v=2: the rules themselves.
const levelRules = slog.LevelInfo - 2

// Options say what the datapath makes.
type Options struct {
	Chain       string            // in nat; see ValidateChain
	IPv6        bool              // IPv6 too
	RandomFully bool              // random source ports, where iptables can
	ToPorts     []portrange.Range // of TCP, UDP and SCTP; empty: the kernel's choice
	DropInvalid bool              // see InvalidChain

	// BeforeJump is called when a family's chain is filled and no jump leads to
	// it yet: conntrack sees all connections, and nothing is translated. Optional.
	BeforeJump func(ctx context.Context, ipv6 bool)

	Log *slog.Logger // required
}

// Datapath translates by iptables rules. It satisfies agent.Datapath.
type Datapath struct {
	options Options
	log     *slog.Logger
	changed chan struct{}
	watch   *watcher // nil: nothing tells of changes

	// Only Sync and Plan use these.
	random   map[family]bool // whether --random-fully is to be written
	done     map[key]chain   // what the last Sync was to write
	settled  bool            // leftovers of earlier runs, or in another backend, are gone
	surveyed map[family]survey

	mutex    sync.Mutex // guards what follows, which Status and Stats read
	mode     mode
	backend  api.Backend
	network  *route.Snapshot
	warnings map[family][]warning
	repairs  uint64

	counters counters
}

// New chooses the backend and starts to watch it. It changes nothing. It works
// in the calling thread's network namespace, in which the other methods must be
// called, too.
func New(options Options) (*Datapath, error) {
	if err := ValidateChain(options.Chain); err != nil {
		return nil, err
	}
	d := &Datapath{
		options:  options,
		log:      options.Log,
		changed:  make(chan struct{}, 1),
		done:     make(map[key]chain),
		surveyed: make(map[family]survey),
		warnings: make(map[family][]warning),
		counters: counters{tallies: make(map[key]*tally)},
	}
	if err := d.chooseBackend(context.Background()); err != nil {
		return nil, err
	}
	return d, nil
}

// Name is the value of --datapath that selects this datapath.
func (d *Datapath) Name() string { return "iptables" }

func (d *Datapath) chooseBackend(ctx context.Context) error {
	m, backend, err := choose(ctx, d.newTool)
	if err != nil {
		return err
	}
	random := make(map[family]bool)
	for _, f := range d.families() {
		random[f] = d.options.RandomFully && hasRandomFully(d.newTool(m, f))
	}
	if m == nft && d.watch == nil {
		// Without it the next interval heals: no reason to go without translation.
		if d.watch, err = newWatcher(d.watched(), d.changed); err != nil {
			d.log.Warn("what others change in the rules is seen only at the next interval", "error", err)
		}
	}
	d.settled = false
	d.log.Info("iptables backend chosen", "backend", backend.Name, "reason", backend.Reason)
	d.mutex.Lock()
	defer d.mutex.Unlock()
	d.mode, d.backend, d.random = m, backend, random
	return nil
}

func (d *Datapath) newTool(m mode, f family) tool {
	t := newTool(m, f)
	t.started = d.watch.ignore
	return t
}

func (d *Datapath) families() []family {
	if d.options.IPv6 {
		return families()
	}
	return []family{ipv4}
}

// chains are what the kernel should hold for a family.
func (d *Datapath) chains(f family, policy *prefix.Policy, network *route.Snapshot) []chain {
	entries := policy.Rules(f == ipv6)
	all := []chain{natChain(d.options.Chain, entries, d.options.ToPorts, d.random[f])}
	if d.options.DropInvalid {
		all = append(all, invalidChain(entries, network))
	}
	return all
}

// Plan is the restore text of what Sync would bring about, whatever is there
// now. It touches nothing.
func (d *Datapath) Plan(policy *prefix.Policy, network *route.Snapshot) (string, error) {
	var text strings.Builder
	for _, f := range d.families() {
		fmt.Fprintf(&text, "# %s --noflush\n", d.newTool(d.mode, f).program("-restore"))
		for _, c := range d.chains(f, policy, network) {
			text.WriteString(transaction(c.table, c.text()))
		}
	}
	return text.String(), nil
}

// Sync makes the kernel hold the chains and nothing of earlier runs beside
// them. One family's failure does not keep the other from being served.
func (d *Datapath) Sync(ctx context.Context, policy *prefix.Policy, network *route.Snapshot) error {
	d.mutex.Lock()
	d.network = network
	d.mutex.Unlock()
	err := d.syncFamilies(ctx, policy, network)
	if err != nil && d.switchBackend(ctx, err) {
		err = d.syncFamilies(ctx, policy, network)
	}
	if err == nil && !d.settled {
		d.settled = true
		d.settle(ctx)
	}
	return err
}

func (d *Datapath) syncFamilies(ctx context.Context, policy *prefix.Policy, network *route.Snapshot) error {
	var errs []error
	for _, f := range d.families() {
		t := d.newTool(d.mode, f)
		for _, c := range d.chains(f, policy, network) {
			if err := d.syncChain(ctx, t, c); err != nil {
				errs = append(errs, fmt.Errorf("sync %s rules: %w", f, err))
			}
		}
		d.lookAround(ctx, t)
	}
	return errors.Join(errs...)
}

func (d *Datapath) syncChain(ctx context.Context, t tool, c chain) error {
	do, err := d.apply(ctx, t, c)
	if err != nil {
		return err
	}
	k := key{t.family, c.table}
	before, known := d.done[k]
	repair := known && slices.Equal(before.rules, c.rules)
	d.done[k] = c
	if do.empty() {
		return nil
	}
	if repair {
		d.mutex.Lock()
		d.repairs++
		d.mutex.Unlock()
	}
	d.log.Info("iptables rules written", "family", t.family.String(), "table", c.table, "chain", c.name,
		"rules", len(c.rules), "reason", do.reason, "repair", repair)
	if d.log.Enabled(ctx, levelRules) {
		d.log.Log(ctx, levelRules, "iptables rules", "text", transaction(c.table, do.lines))
	}
	return nil
}

// apply makes the kernel hold one chain. It gives what had to be done.
func (d *Datapath) apply(ctx context.Context, t tool, c chain) (change, error) {
	d.counters.mutex.Lock()
	defer d.counters.mutex.Unlock()
	now, err := t.read(ctx, c)
	if err != nil {
		return change{}, err
	}
	d.surveyOn(t, c, now)
	counter := d.counters.of(t.family, c.table)
	if now.content.found {
		counter.see(now.content.packets(c.counted))
	}
	if now, err = d.fillFirst(ctx, t, c, now); err != nil {
		return change{}, err
	}
	do := c.difference(now)
	if do.empty() {
		return do, nil
	}
	if err := t.write(ctx, c, do, c.difference); err != nil {
		return do, err
	}
	if do.refill {
		counter.zeroed()
	}
	return do, nil
}

// fillFirst fills a chain that is not in use yet, and lets BeforeJump use the
// moment: rules that masquerade turn conntrack on, whether or not a jump leads to
// them. It gives the state afterwards.
func (d *Datapath) fillFirst(ctx context.Context, t tool, c chain, now state) (state, error) {
	if d.options.BeforeJump == nil || c.table != tableNAT || c.hooked(now) {
		return now, nil
	}
	if do := c.contentDifference(now); !do.empty() {
		if err := t.write(ctx, c, do, c.contentDifference); err != nil {
			return now, err
		}
	}
	d.options.BeforeJump(ctx, t.family == ipv6)
	return t.read(ctx, c)
}

// switchBackend looks for a backend anew where the one in use is gone.
func (d *Datapath) switchBackend(ctx context.Context, cause error) bool {
	if !errors.Is(cause, exec.ErrNotFound) && !isUnsupported(cause) {
		return false
	}
	before := d.mode
	return d.chooseBackend(ctx) == nil && d.mode != before
}

// Changed delivers when somebody else changed the rules. Only nft tells.
func (d *Datapath) Changed() <-chan struct{} { return d.changed }

// EachTranslation visits none: the kernel translates, and conntrack lists its flows.
func (d *Datapath) EachTranslation(func(api.Translation)) error { return nil }

// Close stops watching. The rules stay.
func (d *Datapath) Close() error { return d.watch.close() }
