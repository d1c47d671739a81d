// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Retreat is the way of the iptables datapath out of the kernel when another one
// has taken over: the jumps go at once, and the chains when no connection is left
// that netfilter translates. What masquerades in a chain keeps conntrack on, and
// these connections need it; nothing else may.
type Retreat struct {
	options  Options
	unhooked bool
	chains   bool                    // there are some that have to go
	open     map[connection]struct{} // that netfilter translated when the jumps went
	warnings []string
	done     bool
	idle     int // steps since then, or since the last look
}

// idleSteps is how many steps pass, once all is done, until one looks whether an
// agent that runs has put its rules back: listing tables costs some milliseconds.
const idleSteps = 5

// connection is what conntrack knows one by.
type connection struct {
	proto    uint8
	src, dst netip.AddrPort
}

// NewRetreat prepares a retreat of what options would make. It touches nothing.
func NewRetreat(options Options) (*Retreat, error) {
	if err := ValidateChain(options.Chain); err != nil {
		return nil, err
	}
	return &Retreat{options: options}, nil
}

// Step goes as far as is possible now. It gives the number of connections that
// netfilter translates still; 0: there is nothing left to do but to look, now and
// then, who else is there. What others made and what stands in the way is among
// the warnings.
func (r *Retreat) Step(ctx context.Context) (connections int, warnings []string, err error) {
	if r.done {
		err := r.watch(ctx)
		return 0, r.warnings, err
	}
	if !r.unhooked {
		r.warnings = nil
		if err := r.each(func(t tool) error { return r.unhook(ctx, t) }); err != nil {
			return 0, r.warnings, err
		}
		r.unhooked = true
	}
	if !r.chains {
		r.done = true
		return 0, r.warnings, nil
	}
	if err := r.look(); err != nil {
		r.warn(fmt.Sprintf("connections cannot be listed (%v): chain %s stays, unused, for those that netfilter may translate; cleanup removes it", err, r.options.Chain))
		return 0, r.warnings, nil
	}
	if len(r.open) > 0 {
		return len(r.open), r.warnings, nil
	}
	err = r.each(func(t tool) error { return r.remove(ctx, t) })
	r.done = err == nil
	return 0, r.warnings, err
}

// watch names the chains that others have put back, and forgets those that are
// gone. It removes nothing: their agent would only put it back once more.
func (r *Retreat) watch(ctx context.Context) error {
	if r.idle++; r.idle < idleSteps {
		return nil
	}
	r.idle, r.warnings = 0, nil
	return r.each(func(t tool) error { return r.name(ctx, t) })
}

// name has warnings say which chains masquerade before the programs.
func (r *Retreat) name(ctx context.Context, t tool) error {
	if !t.registered(tableNAT) {
		return nil
	}
	table, err := t.listTable(ctx, tableNAT)
	if err != nil {
		return err
	}
	for _, c := range r.ours(table) {
		now, err := t.read(ctx, c)
		if err != nil {
			return err
		}
		if !c.unhook(now).empty() {
			r.warnOf(t, c.name)
		}
	}
	r.warnOfSiblings(t, table)
	return nil
}

// each calls f for all tools whose nat table exists.
func (r *Retreat) each(f func(tool) error) error {
	var errs []error
	for _, m := range []mode{nft, legacy} {
		for _, family := range families() {
			t := newTool(m, family)
			if installed(t) != nil || m == legacy && len(t.tables()) == 0 {
				continue
			}
			if err := f(t); err != nil && !isUnsupported(err) {
				errs = append(errs, fmt.Errorf("%s rules of the %s backend: %w", family, m, err))
			}
		}
	}
	return errors.Join(errs...)
}

// unhook takes the jumps away, and notes whether chains have to follow. The chain
// of --invalid=drop follows at once.
func (r *Retreat) unhook(ctx context.Context, t tool) error {
	if err := removeChain(ctx, t, invalidChain(nil, nil), r.options.Log); err != nil {
		return err
	}
	if !t.registered(tableNAT) {
		return nil
	}
	table, err := t.listTable(ctx, tableNAT)
	if err != nil {
		return err
	}
	for _, c := range r.ours(table) {
		now, err := t.read(ctx, c)
		if err != nil {
			return err
		}
		if !now.content.found && !now.content.opaque {
			continue
		}
		if !c.made(now) {
			r.warnOf(t, c.name)
			continue
		}
		r.chains = true
		do := c.unhook(now)
		if do.empty() {
			continue
		}
		if err := t.write(ctx, c, do, c.unhook); err != nil {
			return err
		}
		r.options.Log.Info("iptables chain not in use any more", "family", t.family.String(), "backend", string(t.mode), "chain", c.name)
	}
	r.warnOfSiblings(t, table)
	return nil
}

// ours are the chains of this agent and of those that had other names for it.
func (r *Retreat) ours(table map[string]listed) []chain {
	all := []chain{natChain(r.options.Chain, nil, nil, false)}
	for _, name := range renamed(table, r.options.Chain) {
		all = append(all, natChain(name, nil, nil, false))
	}
	return all
}

// remove takes the chains away.
func (r *Retreat) remove(ctx context.Context, t tool) error {
	if !t.registered(tableNAT) {
		return nil
	}
	table, err := t.listTable(ctx, tableNAT)
	if err != nil {
		return err
	}
	for _, c := range r.ours(table) {
		err := removeChain(ctx, t, c, r.options.Log)
		if _, foreign := errors.AsType[*foreignChainError](err); err != nil && !foreign {
			return err
		}
	}
	return nil
}

func (r *Retreat) warnOfSiblings(t tool, table map[string]listed) {
	ours := renamed(table, r.options.Chain)
	for _, rule := range table[postrouting].rules {
		name := rule.target()
		if name != r.options.Chain && isSibling(table, rule) && !slices.Contains(ours, name) {
			r.warnOf(t, name)
		}
	}
}

func (r *Retreat) warnOf(t tool, chain string) {
	r.warn(fmt.Sprintf("chain %s (%s, %s backend) of another agent masquerades by its own list, before the programs: end that agent, or remove the chain", chain, t.family, t.mode))
}

func (r *Retreat) warn(text string) {
	if !slices.Contains(r.warnings, text) {
		r.warnings = append(r.warnings, text)
	}
}

// look asks conntrack which of the translated connections are left. Those that
// others translate after the first look do not count: nothing of ours made them.
func (r *Retreat) look() error {
	now := make(map[connection]struct{})
	for _, kind := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, kind)
		if errors.Is(err, netlink.ErrDumpInterrupted) && r.open != nil {
			return nil // some may be missing: the next look tells
		}
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return fmt.Errorf("list connections: %w", err)
		}
		for _, flow := range flows {
			if c, ok := translated(flow); ok {
				now[c] = struct{}{}
			}
		}
	}
	if r.open == nil {
		r.open = now
		return nil
	}
	for c := range r.open {
		if _, still := now[c]; !still {
			delete(r.open, c)
		}
	}
	return nil
}

// translated is the connection, if netfilter gave it another source.
func translated(flow *netlink.ConntrackFlow) (connection, bool) {
	in, out := flow.Forward, flow.Reverse
	src, ok := netip.AddrFromSlice(in.SrcIP)
	dst, dstOK := netip.AddrFromSlice(in.DstIP)
	if !ok || !dstOK || in.SrcIP.Equal(out.DstIP) && in.SrcPort == out.DstPort {
		return connection{}, false
	}
	return connection{in.Protocol, netip.AddrPortFrom(src, in.SrcPort), netip.AddrPortFrom(dst, in.DstPort)}, true
}
