// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/api"
)

// watchInterval is how often `nat list --watch` looks.
const watchInterval = time.Second

func newNATCommand(env environment) *cobra.Command {
	command := &cobra.Command{
		Use:   "nat",
		Short: "Look at the translations of the ebpf datapath",
		RunE: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q", args[0])
			}
			return usagef("a command is missing: nat list")
		},
	}
	command.AddCommand(newNATListCommand(env))
	return command
}

func newNATListCommand(env environment) *cobra.Command {
	var src, dst, proto, format string
	var watch bool
	command := &cobra.Command{
		Use:   "list",
		Short: "List the live translations of the ebpf datapath",
		Args:  noArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			filter, err := natFilter(src, dst, proto)
			if err != nil {
				return err
			}
			if err := checkOutput(format); err != nil {
				return err
			}
			lister, err := findNATLister(command.Context(), env)
			if err != nil {
				return err
			}
			if watch {
				return watchNAT(command.Context(), lister, filter, command.OutOrStdout(), format)
			}
			flows, err := listNAT(command.Context(), lister, filter)
			if err != nil {
				return err
			}
			if len(flows) == 0 {
				sayWhoTranslates(command.Context(), env, command.ErrOrStderr())
			}
			return printAs(command.OutOrStdout(), format, flows, func(w io.Writer) error { return printNAT(w, flows) })
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.StringVar(&src, "src", "", "only from this `address` or CIDR")
	flags.StringVar(&dst, "dst", "", "only towards this `address` or CIDR")
	flags.StringVar(&proto, "proto", "", "only this `protocol`: tcp, udp, icmp, …")
	flags.BoolVar(&watch, "watch", false, "go on with one line for each translation that comes, changes its state or goes")
	addOutputFlag(command, &format)
	return command
}

func natFilter(src, dst, proto string) (agent.NATFilter, error) {
	filter := agent.NATFilter{Proto: strings.ToLower(proto)}
	var err error
	if src != "" {
		if filter.Src, err = agent.ParseAddressOrPrefix(src); err != nil {
			return filter, usagef("--src: %q is neither an IP address nor a CIDR", src)
		}
	}
	if dst != "" {
		if filter.Dst, err = agent.ParseAddressOrPrefix(dst); err != nil {
			return filter, usagef("--dst: %q is neither an IP address nor a CIDR", dst)
		}
	}
	return filter, nil
}

// natLister is an agent.Client, or the kernel.
type natLister interface {
	NAT(context.Context, agent.NATFilter) ([]api.Translation, error)
}

// findNATLister gives the agent, or the kernel where none runs.
func findNATLister(ctx context.Context, env environment) (natLister, error) {
	client, err := agent.Dial(ctx, env.socket)
	if errors.Is(err, agent.ErrNotRunning) {
		return kernelNAT{env}, nil
	}
	if err != nil {
		return nil, err // not client: a nil pointer in an interface is not nil
	}
	return client, nil
}

// kernelNAT lists what an agent left running.
type kernelNAT struct{ env environment }

// NAT lists the translations that filter matches.
func (k kernelNAT) NAT(_ context.Context, filter agent.NATFilter) ([]api.Translation, error) {
	flows, err := leftFlows(k.env)
	return slices.DeleteFunc(flows, func(t api.Translation) bool { return !filter.Match(t) }), err
}

// leftFlows are the translations of all datapaths that have their own.
func leftFlows(env environment) ([]api.Translation, error) {
	o, err := defaultOptions()
	if err != nil {
		return nil, err
	}
	flows := []api.Translation{}
	err = eachDatapath(env, func(_ string, d datapath) error {
		if d.flows == nil {
			return nil
		}
		more, err := d.flows(o, slog.New(slog.DiscardHandler))
		flows = append(flows, more...)
		return err
	})
	return flows, err
}

// listNAT gives the translations in an order that people can read.
func listNAT(ctx context.Context, client natLister, filter agent.NATFilter) ([]api.Translation, error) {
	flows, err := client.NAT(ctx, filter)
	slices.SortFunc(flows, func(a, b api.Translation) int {
		return cmp.Or(a.Src.Compare(b.Src), strings.Compare(a.Proto, b.Proto), cmp.Compare(a.SPort, b.SPort),
			a.Dst.Compare(b.Dst), cmp.Compare(a.DPort, b.DPort))
	})
	return flows, err
}

// sayWhoTranslates tells those who look in the wrong place.
func sayWhoTranslates(ctx context.Context, env environment, stderr io.Writer) {
	status, err := askStatus(ctx, env)
	switch {
	case err != nil:
	case status.Datapath == agent.IPTables:
		say(stderr, "ip-masq-agent: the kernel translates for the iptables datapath: see conntrack -L --src-nat\n")
	case status.Datapath == "":
		say(stderr, "ip-masq-agent: %s, and none left anything\n", agent.ErrNotRunning)
	}
}

func natRow(t api.Translation) []string {
	return []string{
		t.Proto, endpoint(t.Src, t.SPort), endpoint(t.Dst, t.DPort), endpoint(t.NATAddr, t.NATPort),
		t.State, strconv.Itoa(t.IdleSeconds) + "s", strconv.Itoa(t.ExpiresSeconds) + "s",
	}
}

func endpoint(a netip.Addr, port uint16) string { return netip.AddrPortFrom(a, port).String() }

func printNAT(w io.Writer, flows []api.Translation) error {
	rows := [][]string{{"PROTO", "SOURCE", "DESTINATION", "TRANSLATED TO", "STATE", "IDLE", "EXPIRES"}}
	for _, flow := range flows {
		rows = append(rows, natRow(flow))
	}
	return table(w, rows...)
}

// natEvent is a line of `nat list --watch -o json`.
type natEvent struct {
	Event string `json:"event"` // "new", "state" or "end"
	api.Translation
}

// flowKey tells translations apart.
type flowKey struct {
	proto    string
	src, dst netip.AddrPort
}

func keyOf(t api.Translation) flowKey {
	return flowKey{proto: t.Proto, src: netip.AddrPortFrom(t.Src, t.SPort), dst: netip.AddrPortFrom(t.Dst, t.DPort)}
}

// watchNAT prints what changes from one look to the next until ctx ends.
func watchNAT(ctx context.Context, client natLister, filter agent.NATFilter, w io.Writer, format string) error {
	known := make(map[flowKey]api.Translation)
	ticker := time.NewTicker(watchInterval)
	defer ticker.Stop()
	for {
		flows, err := listNAT(ctx, client, filter)
		if err != nil {
			return err
		}
		for _, event := range natEvents(known, flows) {
			if err := printNATEvent(w, format, event); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// natEvents compares with what is known, and makes flows what is known.
func natEvents(known map[flowKey]api.Translation, flows []api.Translation) []natEvent {
	var events []natEvent
	seen := make(map[flowKey]bool, len(flows))
	for _, flow := range flows {
		key := keyOf(flow)
		seen[key] = true
		switch before, ok := known[key]; {
		case !ok:
			events = append(events, natEvent{"new", flow})
		case before.NATAddr != flow.NATAddr || before.NATPort != flow.NATPort:
			events = append(events, natEvent{"end", before}, natEvent{"new", flow})
		case before.State != flow.State:
			events = append(events, natEvent{"state", flow})
		}
		known[key] = flow
	}
	for key, flow := range known {
		if !seen[key] {
			events = append(events, natEvent{"end", flow})
			delete(known, key)
		}
	}
	return events
}

func printNATEvent(w io.Writer, format string, event natEvent) error {
	if format == "json" {
		return json.NewEncoder(w).Encode(event)
	}
	_, err := fmt.Fprintf(w, "%-5s  %s\n", event.Event, strings.Join(natRow(event.Translation), "  "))
	return err
}
