// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"slices"
)

// settle takes away what earlier runs left and this one does not make: chains
// under another --masq-chain, rules in the other backend, IPv6 rules without
// --enable-ipv6, the chain of --invalid=drop. It is done once, when the wanted
// rules are in place: an old chain would go on deciding, being first, and users
// who turn IPv6 off do not expect a stale IPv6 list to stay for ever. What comes
// back later belongs to an agent that runs beside us, and is only reported.
func (d *Datapath) settle(ctx context.Context) {
	for _, m := range []mode{nft, legacy} {
		for _, f := range families() {
			t := d.newTool(m, f)
			if installed(t) != nil {
				continue
			}
			for _, c := range d.leftovers(ctx, t) {
				if err := removeChain(ctx, t, c, d.log); err != nil && !isUnsupported(err) {
					d.log.Warn("rules of an earlier run stay", "family", f.String(), "backend", string(m), "chain", c.name, "error", err)
				}
			}
		}
	}
}

func (d *Datapath) leftovers(ctx context.Context, t tool) []chain {
	var all []chain
	served := t.mode == d.mode && slices.Contains(d.families(), t.family)
	if !served {
		all = append(all, natChain(d.options.Chain, nil, nil, false))
	}
	if !served || !d.options.DropInvalid {
		all = append(all, invalidChain(nil, nil))
	}
	if !t.registered(tableNAT) {
		return all
	}
	table, err := t.listTable(ctx, tableNAT)
	if err != nil {
		d.log.Debug("chains of earlier runs were not looked for", "family", t.family.String(), "backend", string(t.mode), "error", err)
		return all
	}
	for _, name := range renamed(table, d.options.Chain) {
		all = append(all, natChain(name, nil, nil, false))
	}
	return all
}

// renamed are the chains that an ip-masq-agent made under another name than
// this one: all their rules carry its comments, or they are empty and its jump
// leads to them.
func renamed(table map[string]listed, name string) []string {
	var names []string
	for other, c := range table {
		if other == name || slices.Contains(builtinChains(), other) {
			continue
		}
		foreign := slices.ContainsFunc(c.rules, func(r rule) bool { return !isOwnRule(r) })
		jump := slices.ContainsFunc(table[postrouting].rules, natChain(other, nil, nil, false).owns)
		if !foreign && (len(c.rules) > 0 || jump) {
			names = append(names, other)
		}
	}
	slices.Sort(names)
	return names
}
