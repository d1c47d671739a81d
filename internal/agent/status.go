// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net/netip"

	"ip-masq-agent/internal/api"
)

// EBPF and IPTables are the names of the datapaths.
const (
	EBPF     = "ebpf"
	IPTables = "iptables"
)

// Status is the answer to `status`.
func (a *Agent) Status() (api.Status, error) {
	datapath, err := a.options.Datapath.Status()
	if err != nil {
		return api.Status{}, fmt.Errorf("read datapath status: %w", err)
	}
	now, last := a.settings.view(), a.outcome()
	status := NewStatus(a.options.Build.Version, a.options.Datapath.Name(), datapath)
	if !status.Drain.Active {
		status.Drain = last.retirement.Drain
	}
	status.Config = api.ConfigStatus{Path: a.options.Config.Path, Valid: now.fault == nil}
	if now.fault != nil {
		status.Config.Error = now.fault.Error()
	}
	status.NonMasqueradeCIDRs = orEmpty(now.config.NonMasqueradeCIDRs)
	status.MasqueradeCIDRs = orEmpty(now.config.MasqueradeCIDRs)
	status.Warnings = append(a.warnings(now, last), status.Warnings...)
	return status, nil
}

// warnings are what the agent itself has to say.
func (a *Agent) warnings(now view, last outcome) []string {
	warnings := append([]string{}, now.warnings...) // never nil
	if last.fault != "" {
		warnings = append(warnings, "the last sync failed: "+last.fault)
	} else if !last.synced {
		warnings = append(warnings, "the first sync is not done yet")
	}
	if last.retireFault != "" {
		warnings = append(warnings, "the other datapath is not removed: "+last.retireFault)
	}
	return append(warnings, last.retirement.Warnings...)
}

// NewStatus makes a Status of what a datapath knows. Its lists are never nil,
// as JSON readers expect lists.
func NewStatus(version, name string, datapath api.DatapathStatus) api.Status {
	datapath.FastPath.Interfaces = orEmpty(datapath.FastPath.Interfaces)
	return api.Status{
		Version:            version,
		Datapath:           name,
		Backend:            datapath.Backend,
		Interfaces:         orEmpty(datapath.Interfaces),
		NonMasqueradeCIDRs: []netip.Prefix{},
		MasqueradeCIDRs:    []netip.Prefix{},
		NAT:                datapath.NAT,
		FastPath:           datapath.FastPath,
		Drain:              datapath.Drain,
		Warnings:           orEmpty(datapath.Warnings),
	}
}

// orEmpty is list, or an empty one for nil.
func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}
