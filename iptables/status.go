// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/route"
)

// Status is the datapath's part of `status`, as of the last Sync.
func (d *Datapath) Status() (api.DatapathStatus, error) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	status := api.DatapathStatus{Backend: d.backend, Interfaces: interfaces(d.network)}
	for _, f := range d.families() {
		for _, w := range d.warnings[f] {
			status.Warnings = append(status.Warnings, fmt.Sprintf("%s: %s", f, w.text))
		}
	}
	return status, nil
}

// interfaces are the uplinks with the address that MASQUERADE picks towards
// their default gateway.
func interfaces(network *route.Snapshot) []api.Interface {
	if network == nil {
		return nil
	}
	var all []api.Interface
	for _, up := range network.Uplinks {
		all = append(all, api.Interface{Name: up.Name, SNATv4: widest(up.V4), SNATv6: widest(up.V6)})
	}
	return all
}

// widest is the address of the first of the rules with the shortest prefix.
func widest(rules []route.AddressRule) netip.Addr {
	if len(rules) == 0 {
		return netip.Addr{}
	}
	return slices.MinFunc(rules, func(a, b route.AddressRule) int { return a.Prefix.Bits() - b.Prefix.Bits() }).Address
}

// Inspection is what there is without an agent that runs.
type Inspection struct {
	Backend api.Backend
	// V4 and V6 tell whether the chain holds rules and POSTROUTING jumps to it.
	V4, V6   bool
	Warnings []string
}

// Inspect looks at what an agent left, for `status` where none runs. It changes
// nothing. An IPv6 that the kernel lacks is not an error.
func Inspect(ctx context.Context, options Options) (Inspection, error) {
	m, backend, err := choose(ctx, newTool)
	if err != nil {
		return Inspection{}, err
	}
	found := Inspection{Backend: backend}
	for _, f := range families() {
		t := newTool(m, f)
		if !t.registered(tableNAT) {
			continue
		}
		c := natChain(options.Chain, nil, nil, false)
		now, err := t.read(ctx, c)
		if err != nil && f == ipv4 {
			return found, err
		}
		present := err == nil && len(now.content.rules) > 0 && slices.ContainsFunc(now.outer.rules, c.owns)
		if f == ipv4 {
			found.V4 = present
		} else {
			found.V6 = present
		}
		if !present {
			continue
		}
		for _, w := range t.warnings(ctx, options.Chain) {
			found.Warnings = append(found.Warnings, fmt.Sprintf("%s: %s", f, w.text))
		}
	}
	return found, nil
}
