// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
		return &foreignChainError{chain: c.name, table: c.table}
	}
	err = t.write(ctx, c, do, func(s state) change { rest, _ := c.remove(s); return rest })
	if err != nil {
		return err
	}
	log.Info("iptables chain removed", "family", t.family.String(), "backend", string(t.mode), "table", c.table,
		"chain", c.name, "kept_for_others", kept)
	return nil
}

// foreignChainError is a chain with our name that somebody else filled.
type foreignChainError struct{ chain, table string }

func (e *foreignChainError) Error() string {
	return fmt.Sprintf("chain %s of table %s holds no rule of ip-masq-agent: left as it is", e.chain, e.table)
}
