// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"fmt"
)

// read asks the kernel for a chain and for POSTROUTING.
func (t tool) read(ctx context.Context, c chain) (state, error) {
	content, err := t.list(ctx, c.table, c.name)
	if err != nil {
		return state{}, fmt.Errorf("list chain %s: %w", c.name, err)
	}
	outer, err := t.list(ctx, c.table, postrouting)
	if err != nil {
		return state{}, fmt.Errorf("list chain %s of table %s: %w", postrouting, c.table, err)
	}
	if outer.opaque {
		outer.rules, err = t.findJumps(ctx, c)
	}
	return state{content: content, outer: outer}, err
}

// findJumps stands in for a listing of POSTROUTING where rules written with nft
// keep iptables from showing the chain. It can still be asked for single rules.
func (t tool) findJumps(ctx context.Context, c chain) ([]rule, error) {
	var found []rule
	for _, r := range c.jumpVariants() {
		has, err := t.has(ctx, c.table, postrouting, r)
		if err != nil {
			return nil, fmt.Errorf("look for the jump to %s among rules that iptables cannot show: %w", c.name, err)
		}
		if has {
			found = append(found, r)
		}
	}
	return found, nil
}

// write applies a change and reads back what came of it: programs that exit 0
// without having done anything are in use. difference tells what is still to
// be done.
func (t tool) write(ctx context.Context, c chain, do change, difference func(state) change) error {
	if err := t.restore(ctx, c.table, do.lines); err != nil {
		return fmt.Errorf("write chain %s: %w", c.name, err)
	}
	after, err := t.read(ctx, c)
	if err != nil {
		return fmt.Errorf("read back: %w", err)
	}
	if rest := difference(after); !rest.empty() {
		return fmt.Errorf("%s exited 0, but what it was given is not there (%s): is it a script that does not pass its input on?",
			t.program("-restore"), rest.reason)
	}
	return nil
}
