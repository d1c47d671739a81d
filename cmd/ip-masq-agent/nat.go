// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/api"
)

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

// natFlags are what the user asks of `nat list`.
type natFlags struct {
	src, dst, proto, countBy, format string
	watch                            bool
}

func newNATListCommand(env environment) *cobra.Command {
	var f natFlags
	command := &cobra.Command{
		Use:   "list",
		Short: "List the live translations of the ebpf datapath",
		Args:  noArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			filter, err := f.check()
			if err != nil {
				return err
			}
			lister, err := findNATLister(command.Context(), env)
			if err != nil {
				return err
			}
			out := command.OutOrStdout()
			if f.watch {
				return watchNAT(command.Context(), lister, filter, out, f.format)
			}
			number, err := f.print(command.Context(), lister, filter, out)
			if err == nil && number == 0 {
				sayWhoTranslates(command.Context(), env, command.ErrOrStderr())
			}
			return err
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.StringVar(&f.src, "src", "", "only from this `address` or CIDR")
	flags.StringVar(&f.dst, "dst", "", "only towards this `address` or CIDR")
	flags.StringVar(&f.proto, "proto", "", "only this `protocol`: tcp, udp, icmp, …")
	flags.StringVar(&f.countBy, "count-by", "", "only how many there are, by `pod|destination`, the highest number first")
	flags.BoolVar(&f.watch, "watch", false, "go on with one line for each translation that comes, changes its state or goes")
	addOutputFlag(command, &f.format)
	return command
}

// check refuses what makes no sense, and gives the filter.
func (f *natFlags) check() (agent.NATFilter, error) {
	filter, err := natFilter(f.src, f.dst, f.proto)
	if err != nil {
		return filter, err
	}
	if !slices.Contains([]string{"", string(agent.ByPod), string(agent.ByDestination)}, f.countBy) {
		return filter, usagef("--count-by: %q is neither pod nor destination", f.countBy)
	}
	if f.watch && f.countBy != "" {
		return filter, usagef("--watch shows translations and no counts: leave --count-by away")
	}
	return filter, checkOutput(f.format)
}

// print prints the list or the counts, and says how many lines that were.
func (f *natFlags) print(ctx context.Context, lister natLister, filter agent.NATFilter, w io.Writer) (int, error) {
	if f.countBy != "" {
		counts, err := lister.NATCounts(ctx, filter, agent.CountBy(f.countBy))
		if err != nil {
			return 0, err
		}
		if f.format == "json" {
			return len(counts), printLines(w, counts)
		}
		return len(counts), printCounts(w, counts, f.countBy)
	}
	flows, err := listNAT(ctx, lister, filter)
	if err != nil {
		return 0, err
	}
	if f.format == "json" {
		return len(flows), printLines(w, flows)
	}
	return len(flows), printNAT(w, flows)
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
	NAT(context.Context, agent.NATFilter, func(api.Translation)) error
	NATCounts(context.Context, agent.NATFilter, agent.CountBy) ([]api.FlowCount, error)
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

// NAT visits the translations that filter matches.
func (k kernelNAT) NAT(_ context.Context, filter agent.NATFilter, visit func(api.Translation)) error {
	return eachLeftFlow(k.env, func(t api.Translation) {
		if filter.Match(t) {
			visit(t)
		}
	})
}

// NATCounts counts the translations that filter matches.
func (k kernelNAT) NATCounts(_ context.Context, filter agent.NATFilter, by agent.CountBy) ([]api.FlowCount, error) {
	each := func(visit func(api.Translation)) error { return eachLeftFlow(k.env, visit) }
	return agent.CountTranslations(each, filter, by)
}

// eachLeftFlow visits the translations of all datapaths that have their own.
func eachLeftFlow(env environment, visit func(api.Translation)) error {
	o, err := defaultOptions()
	if err != nil {
		return err
	}
	return eachDatapath(env, func(_ string, d datapath) error {
		if d.flows == nil {
			return nil
		}
		return d.flows(o, slog.New(slog.DiscardHandler), visit)
	})
}

// listNAT gives the translations in an order that people can read.
func listNAT(ctx context.Context, lister natLister, filter agent.NATFilter) ([]api.Translation, error) {
	flows := []api.Translation{}
	err := lister.NAT(ctx, filter, func(t api.Translation) { flows = append(flows, t) })
	slices.SortFunc(flows, compareFlows)
	return flows, err
}

func compareFlows(a, b api.Translation) int {
	return cmp.Or(a.Src.Compare(b.Src), strings.Compare(a.Proto, b.Proto), cmp.Compare(a.SPort, b.SPort),
		a.Dst.Compare(b.Dst), cmp.Compare(a.DPort, b.DPort))
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

// endpoint leaves out the port where there is none, as for the target of a ping.
func endpoint(a netip.Addr, port uint16) string {
	if port == 0 {
		return a.String()
	}
	return netip.AddrPortFrom(a, port).String()
}

func printNAT(w io.Writer, flows []api.Translation) error {
	rows := [][]string{{"PROTO", "SOURCE", "DESTINATION", "TRANSLATED TO", "STATE", "IDLE", "EXPIRES"}}
	for _, flow := range flows {
		rows = append(rows, natRow(flow))
	}
	return table(w, rows...)
}

func printCounts(w io.Writer, counts []api.FlowCount, by string) error {
	rows := [][]string{{"FLOWS", strings.ToUpper(by)}}
	for _, c := range counts {
		key := c.Src.String()
		if by == string(agent.ByDestination) {
			key = c.Proto + " " + endpoint(c.Dst, c.DPort)
		}
		rows = append(rows, []string{strconv.Itoa(c.Flows), key})
	}
	return table(w, rows...)
}
