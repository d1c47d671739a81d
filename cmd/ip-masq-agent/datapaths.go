// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
	"ip-masq-agent/iptables"
	"ip-masq-agent/loader"
)

// datapath is what the commands need of one datapath.
type datapath struct {
	// open makes it, without effect on packets before its first Sync.
	open func(*options, *slog.Logger) (agent.Datapath, error)

	// plan is what a first Sync would program, as text. It touches nothing.
	plan func(*options, *slog.Logger, *prefix.Policy, *route.Snapshot) (string, error)

	// inspect looks at what an agent left in the kernel, for the time when none
	// runs. False: nothing is there.
	inspect func(context.Context, *options, *slog.Logger) (api.DatapathStatus, bool, error)

	// flows visits the translations that it goes on with in the absence of an
	// agent. nil: the kernel lists its own.
	flows func(*options, *slog.Logger, func(api.Translation)) error

	// giveWay prepares to take it out of the kernel. What it gives is called once
	// another datapath is in place, and again until it is gone: open connections
	// go on until they end.
	giveWay func(*options, *slog.Logger) retreat

	// cleanup takes it out of the kernel with all that it ever made.
	cleanup func(context.Context, *options, *slog.Logger) error
}

// retreat is one step of a datapath's way out of the kernel.
type retreat func(context.Context, *route.Snapshot) (agent.Retirement, error)

// datapaths are those that --datapath selects from.
func datapaths() map[string]datapath {
	return map[string]datapath{
		agent.EBPF: {
			open:    openEBPF,
			plan:    planEBPF,
			inspect: inspectEBPF,
			flows:   flowsOfEBPF,
			giveWay: giveWayEBPF,
			cleanup: cleanupEBPF,
		},
		agent.IPTables: {
			open:    openIPTables,
			plan:    planIPTables,
			inspect: inspectIPTables,
			giveWay: giveWayIPTables,
			cleanup: removeIPTables,
		},
	}
}

// retireOthers gives what the agent is to call once the chosen datapath is in
// place: whoever translated before gives way.
func retireOthers(env environment, o *options, log *slog.Logger) retreat {
	steps := make(map[string]retreat)
	for name, d := range env.datapaths {
		if name != o.datapath {
			steps[name] = d.giveWay(o, log)
		}
	}
	return func(ctx context.Context, network *route.Snapshot) (agent.Retirement, error) {
		all := agent.Retirement{Gone: true}
		err := eachDatapath(env, func(name string, _ datapath) error {
			if steps[name] == nil {
				return nil
			}
			one, err := steps[name](ctx, network)
			all.Gone = all.Gone && one.Gone && err == nil
			all.Drain.Active = all.Drain.Active || one.Drain.Active
			all.Drain.Entries += one.Drain.Entries
			all.Warnings = append(all.Warnings, one.Warnings...)
			return err
		})
		return all, err
	}
}

// eachDatapath calls f for all datapaths in the order of their names.
func eachDatapath(env environment, f func(name string, d datapath) error) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(env.datapaths)) {
		if err := f(name, env.datapaths[name]); err != nil {
			errs = append(errs, fmt.Errorf("%s datapath: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

func iptablesOptions(o *options, log *slog.Logger) iptables.Options {
	return iptables.Options{
		Chain:       o.chain,
		IPv6:        o.config.EnableIPv6,
		RandomFully: o.randomFully,
		ToPorts:     o.toPorts,
		DropInvalid: o.dropInvalid,
		Log:         log,
	}
}

func openIPTables(o *options, log *slog.Logger) (agent.Datapath, error) {
	with := iptablesOptions(o, log)
	if loader.IsPinned(o.pinPath) {
		with.BeforeJump = func(_ context.Context, ipv6 bool) { introduceFlows(o, log, ipv6) }
	}
	d, err := iptables.New(with)
	if err != nil {
		return nil, err // not d: a nil pointer in an interface is not nil
	}
	return d, nil
}

// introduceFlows tells conntrack of the flows that the ebpf datapath has, before
// netfilter translates. Without the right to look at them, they end.
func introduceFlows(o *options, log *slog.Logger, ipv6 bool) {
	flows, err := loader.Introduce(ebpfOptions(o, log), ipv6)
	if err != nil {
		log.Warn("conntrack does not know all flows of the ebpf datapath, they may end", "ipv6", ipv6, "error", oneLine(err))
		return
	}
	if flows > 0 {
		log.Info("conntrack knows the flows of the ebpf datapath", "ipv6", ipv6, "flows", flows)
	}
}

func planIPTables(o *options, log *slog.Logger, policy *prefix.Policy, network *route.Snapshot) (string, error) {
	d, err := iptables.New(iptablesOptions(o, log))
	if err != nil {
		return "", err
	}
	defer closeQuietly(d)
	return d.Plan(policy, network)
}

func cleanupIPTables(ctx context.Context, o *options, log *slog.Logger) error {
	return iptables.Cleanup(ctx, iptablesOptions(o, log))
}

// removeIPTables ends also what netfilter still translates by rules that are
// gone.
func removeIPTables(ctx context.Context, o *options, log *slog.Logger) error {
	return errors.Join(cleanupIPTables(ctx, o, log), iptables.RemoveEmptyTables())
}

func giveWayIPTables(o *options, log *slog.Logger) retreat {
	r, err := iptables.NewRetreat(iptablesOptions(o, log))
	return func(ctx context.Context, _ *route.Snapshot) (agent.Retirement, error) {
		if err != nil {
			return agent.Retirement{}, err
		}
		left, warnings, err := r.Step(ctx)
		return agent.Retirement{Drain: drainOf(left), Warnings: warnings}, err // others may come back
	}
}

func drainOf(entries int) api.Drain { return api.Drain{Active: entries > 0, Entries: entries} }

func inspectIPTables(ctx context.Context, o *options, log *slog.Logger) (api.DatapathStatus, bool, error) {
	found, err := iptables.Inspect(ctx, iptablesOptions(o, log))
	status := api.DatapathStatus{Backend: found.Backend, Warnings: found.Warnings}
	return status, found.V4 || found.V6, err
}

func ebpfOptions(o *options, log *slog.Logger) loader.Options {
	return loader.Options{
		PinPath:      o.pinPath,
		IPv6:         o.config.EnableIPv6,
		RandomFully:  o.randomFully,
		ToPorts:      o.toPorts,
		NodePorts:    o.nodePorts,
		DropInvalid:  o.dropInvalid,
		FastPath:     o.fastPath,
		NATTableSize: o.natTableSize,
		Log:          log,
	}
}

func openEBPF(o *options, log *slog.Logger) (agent.Datapath, error) {
	d, err := loader.New(ebpfOptions(o, log))
	if unsupported, ok := errors.AsType[*loader.UnsupportedError](err); ok {
		return nil, missingError{datapath: agent.EBPF, what: unsupported.Missing}
	}
	if err != nil {
		return nil, err
	}
	return d, nil
}

// planEBPF works on any kernel: a plan needs neither programs nor maps.
func planEBPF(o *options, log *slog.Logger, policy *prefix.Policy, network *route.Snapshot) (string, error) {
	return loader.Plan(ebpfOptions(o, log), policy, network)
}

// giveWayEBPF needs the right to open maps. Where the node's own agent has left
// programs and that right is missing, they stay: harmless, since what netfilter
// has translated passes them as it is, but open connections of theirs end.
func giveWayEBPF(o *options, log *slog.Logger) retreat {
	return func(_ context.Context, network *route.Snapshot) (agent.Retirement, error) {
		left, err := loader.Drain(ebpfOptions(o, log), network)
		if errors.Is(err, os.ErrPermission) {
			return agent.Retirement{Gone: true, Drain: api.Drain{Active: true}, Warnings: []string{
				"the programs of the ebpf datapath stay, with the list of CIDRs that they had: there is no right to look at them; " +
					"start once with the capability BPF, or run cleanup (" + oneLine(err) + ")",
			}}, nil
		}
		return agent.Retirement{Gone: left == 0, Drain: drainOf(left)}, err
	}
}

func cleanupEBPF(_ context.Context, o *options, log *slog.Logger) error {
	return loader.Cleanup(ebpfOptions(o, log))
}

func inspectEBPF(_ context.Context, o *options, log *slog.Logger) (api.DatapathStatus, bool, error) {
	return loader.Inspect(ebpfOptions(o, log))
}

func flowsOfEBPF(o *options, log *slog.Logger, visit func(api.Translation)) error {
	_, err := loader.InspectTranslations(ebpfOptions(o, log), visit)
	return err
}
