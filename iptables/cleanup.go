// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
)

// Cleanup removes the chains that this package makes and the jumps to them, in
// both backends and families, whichever of them exist. Rules of others stay,
// and so does a chain that they jump to, emptied. A legacy table that does not
// exist is not made by asking for it.
func Cleanup(ctx context.Context, options Options) error {
	if err := ValidateChain(options.Chain); err != nil {
		return err
	}
	var errs []error
	for _, m := range []mode{nft, legacy} {
		for _, f := range families() {
			if err := cleanFamily(ctx, newTool(m, f), options); err != nil {
				errs = append(errs, fmt.Errorf("clean up %s rules of the %s backend: %w", f, m, err))
			}
		}
	}
	return errors.Join(errs...)
}

// GiveWay is Cleanup for when another datapath has taken over. It also removes
// the chains that an ip-masq-agent made under other names, since they would go on
// deciding by their own lists, and logs who else stands in the way.
func GiveWay(ctx context.Context, options Options) error {
	errs := []error{Cleanup(ctx, options)}
	for _, m := range []mode{nft, legacy} {
		for _, f := range families() {
			t := newTool(m, f)
			if installed(t) != nil || m == legacy && len(t.tables()) == 0 || !t.registered(tableNAT) {
				continue
			}
			if err := giveWayFamily(ctx, t, options); err != nil && !isUnsupported(err) {
				errs = append(errs, fmt.Errorf("remove old %s chains of the %s backend: %w", f, m, err))
			}
		}
	}
	return errors.Join(errs...)
}

func giveWayFamily(ctx context.Context, t tool, options Options) error {
	table, err := t.listTable(ctx, tableNAT)
	if err != nil {
		return err
	}
	for _, name := range renamed(table, options.Chain) {
		if err := removeChain(ctx, t, natChain(name, nil, nil, false), options.Log); err != nil {
			return err
		}
	}
	for _, r := range table[postrouting].rules {
		if name := r.target(); isSibling(table, r) && !slices.Contains(renamed(table, options.Chain), name) {
			options.Log.Warn("a chain of another agent masquerades by its own list, before the programs: remove it",
				"chain", name, "family", t.family.String(), "backend", string(t.mode))
		}
	}
	return nil
}

func cleanFamily(ctx context.Context, t tool, options Options) error {
	if t.mode == legacy && len(t.tables()) == 0 {
		return nil
	}
	var errs []error
	for _, c := range emptyChains(options.Chain) {
		if err := removeChain(ctx, t, c, options.Log); err != nil && !isUnsupported(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// removeChain takes a chain and its jumps away, if they are there, in one
// transaction.
func removeChain(ctx context.Context, t tool, c chain, log *slog.Logger) error {
	if !t.registered(c.table) {
		return nil
	}
	now, err := t.read(ctx, c)
	if err != nil {
		return err
	}
	do, kept := c.remove(now)
	if do.empty() {
		return nil
	}
	if !c.made(now) {
		return fmt.Errorf("chain %s of table %s holds no rule of ip-masq-agent: left as it is", c.name, c.table)
	}
	err = t.write(ctx, c, do, func(s state) change { rest, _ := c.remove(s); return rest })
	if err != nil {
		return err
	}
	log.Info("iptables chain removed", "family", t.family.String(), "backend", string(t.mode), "table", c.table,
		"chain", c.name, "kept_for_others", kept)
	return nil
}
