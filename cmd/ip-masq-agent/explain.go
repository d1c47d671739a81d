// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/config"
	"ip-masq-agent/internal/route"
	"ip-masq-agent/loader"
)

// explainFlags are what the user asks.
type explainFlags struct {
	dst, src, proto, format string
	sport, dport            uint16
}

func newExplainCommand(env environment) *cobra.Command {
	var f explainFlags
	o := &options{}
	command := &cobra.Command{
		Use:   "explain --dst IP",
		Short: "Say whether a packet would be masqueraded, why, and as what",
		Long: `Say whether a packet would be masqueraded, why, and as what. With source,
protocol and ports, a flow that the ebpf datapath translates already is found.

The running agent answers. Where none runs, this command does, and the flags
that it shares with the agent say what to assume.`,
		Args: noArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			question, err := f.question()
			if err != nil {
				return err
			}
			if err := errors.Join(checkOutput(f.format), o.checkConfigFlags()); err != nil {
				return err
			}
			if !command.Flags().Changed("datapath") {
				o.datapath = "" // whichever is there
			}
			answer, err := askExplain(command.Context(), env, o, question, command.ErrOrStderr())
			if err != nil {
				return err
			}
			return printAs(command.OutOrStdout(), f.format, answer, func(w io.Writer) error {
				return printAnswer(w, answer)
			})
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.StringVar(&f.dst, "dst", "", "destination `address`")
	flags.StringVar(&f.src, "src", "", "source `address` (default: any pod's)")
	flags.StringVar(&f.proto, "proto", "", "`protocol`: tcp, udp, icmp, …")
	flags.Uint16Var(&f.sport, "sport", 0, "source `port`, or identifier of an ICMP echo")
	flags.Uint16Var(&f.dport, "dport", 0, "destination `port`")
	addOutputFlag(command, &f.format)
	o.addConfigFlags(flags)
	return command
}

func (f explainFlags) question() (api.Question, error) {
	question := api.Question{Proto: strings.ToLower(f.proto), Sport: f.sport, Dport: f.dport}
	if f.dst == "" {
		return question, usagef("--dst is needed")
	}
	var err error
	if question.Dst, err = netip.ParseAddr(f.dst); err != nil {
		return question, usagef("--dst: %q is not an IP address", f.dst)
	}
	if f.src == "" {
		return question, nil
	}
	if question.Src, err = netip.ParseAddr(f.src); err != nil {
		return question, usagef("--src: %q is not an IP address", f.src)
	}
	return question, nil
}

func askExplain(ctx context.Context, env environment, o *options, question api.Question, stderr io.Writer) (api.Answer, error) {
	client, err := agent.Dial(ctx, env.socket)
	if err == nil {
		return client.Explain(ctx, question)
	}
	if !errors.Is(err, agent.ErrNotRunning) {
		return api.Answer{}, err
	}
	if o.datapath == "" {
		o.datapath = leftDatapath(ctx, env)
	}
	say(stderr, "ip-masq-agent: %s: this is what one would do with --datapath=%s\n", err, o.datapath)
	return explainAlone(env, o, question)
}

// leftDatapath is the datapath that an agent left in the kernel, else the
// default.
func leftDatapath(ctx context.Context, env environment) string {
	o, err := defaultOptions()
	if err != nil {
		return agent.IPTables
	}
	if name, _, _ := findDatapath(ctx, env, o); name != "" {
		return name
	}
	return agent.IPTables
}

// explainAlone answers from the config, the node's network and the flows that an
// agent left.
func explainAlone(env environment, o *options, question api.Question) (api.Answer, error) {
	network, err := route.NewTracker(route.Options{Interfaces: o.interfaces, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return api.Answer{}, fmt.Errorf("read the node's network: %w", err)
	}
	defer closeQuietly(network)
	loaded, err := config.Load(o.config)
	if err != nil {
		return api.Answer{}, fmt.Errorf("config refused: %w", err)
	}
	return agent.Explain(question, agent.Facts{
		Datapath:        o.datapath,
		IPv6:            o.config.EnableIPv6,
		Policy:          loaded.Config.Policy(o.config.EnableIPv6),
		Network:         network.Snapshot(),
		Path:            network.Path,
		EachTranslation: func(visit func(api.Translation)) error { return eachLeftFlow(env, visit) },
		Readable:        loader.Readable,
	})
}

func printAnswer(w io.Writer, a api.Answer) error {
	return table(w,
		[]string{"Verdict", a.Verdict},
		[]string{"Reason", a.Reason},
		[]string{"CIDR", orDash(a.CIDR)},
		[]string{"Source becomes", address(a.SNATAddress)},
		[]string{"Interface", orDash(a.Interface)},
	)
}
