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
	"github.com/spf13/pflag"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/config"
)

func newStatusCommand(env environment) *cobra.Command {
	var format string
	command := &cobra.Command{
		Use:   "status",
		Short: "Show what runs where, and whether the config is good",
		Args:  noArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			status, err := askStatus(command.Context(), env)
			if err != nil {
				return err
			}
			return printAs(command.OutOrStdout(), format, status, func(w io.Writer) error {
				return printStatus(w, status)
			})
		},
	}
	addOutputFlag(command, &format)
	return command
}

// askStatus asks the agent, or looks at the kernel where none runs.
func askStatus(ctx context.Context, env environment) (api.Status, error) {
	client, err := agent.Dial(ctx, env.socket)
	if errors.Is(err, agent.ErrNotRunning) {
		return inspect(ctx, env)
	}
	if err != nil {
		return api.Status{}, err
	}
	return client.Status(ctx)
}

// defaultOptions are those of an agent that is started without flags.
func defaultOptions() (*options, error) {
	o := &options{}
	o.addFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
	return o, o.check()
}

// inspect tells what an agent left behind, by the default names. The datapath
// is empty if nothing is there.
func inspect(ctx context.Context, env environment) (api.Status, error) {
	o, err := defaultOptions()
	if err != nil {
		return api.Status{}, err
	}
	name, found, err := findDatapath(ctx, env, o)
	status := agent.NewStatus(thisVersion().Version, name, found)
	status.Warnings = append([]string{agent.ErrNotRunning.Error()}, status.Warnings...)
	if err != nil { // what the other datapath says is still worth showing
		status.Warnings = append(status.Warnings, oneLine(err))
	}
	status.Config = api.ConfigStatus{Path: o.config.Path, Valid: true}
	o.config.EnableIPv6 = true // nobody knows, and the file should not be blamed for it
	result, err := config.Load(o.config)
	if err != nil {
		status.Config.Valid, status.Config.Error = false, err.Error()
		return status, nil
	}
	status.NonMasqueradeCIDRs = append(status.NonMasqueradeCIDRs, result.Config.NonMasqueradeCIDRs...)
	status.MasqueradeCIDRs = append(status.MasqueradeCIDRs, result.Config.MasqueradeCIDRs...)
	return status, nil
}

// findDatapath looks for what is in the kernel. The name is empty if nothing
// is, or if it cannot be known, which the error tells.
func findDatapath(ctx context.Context, env environment, o *options) (string, api.DatapathStatus, error) {
	log := slog.New(slog.DiscardHandler)
	var names []string
	var status api.DatapathStatus
	var drain api.Drain
	err := eachDatapath(env, func(name string, d datapath) error {
		found, there, err := d.inspect(ctx, o, log)
		if err == nil && there && found.Drain.Active {
			drain = found.Drain
			return nil
		}
		if err == nil && there {
			names = append(names, name)
			found.Warnings = append(status.Warnings, found.Warnings...)
			status = found
		}
		return err
	})
	status.Drain = drain
	if len(names) == 0 {
		return "", status, err
	}
	if len(names) > 1 {
		status.Warnings = append(status.Warnings, "several datapaths are in the kernel: "+strings.Join(names, ", "))
	}
	return names[len(names)-1], status, err
}

func printStatus(w io.Writer, s api.Status) error {
	rows := [][]string{
		{"Version", s.Version},
		{"Datapath", orDash(s.Datapath)},
		{"Backend", describeBackend(s.Backend)},
		{"Config", describeConfig(s.Config)},
		{"Keep source towards", prefixes(s.NonMasqueradeCIDRs)},
		{"Except", prefixes(s.MasqueradeCIDRs)},
	}
	for _, t := range []struct {
		name string
		api.Table
	}{{"IPv4 translations", s.NAT.V4}, {"IPv6 translations", s.NAT.V6}} {
		if t.Capacity > 0 {
			rows = append(rows, []string{t.name, fmt.Sprintf("%d of %d", t.Entries, t.Capacity)})
		}
	}
	if s.FastPath.Enabled {
		rows = append(rows, []string{"Fast path", describeFastPath(s.FastPath)})
	}
	if s.Drain.Active {
		rows = append(rows, []string{"Drain", fmt.Sprintf("%d flows are still served by the datapath of before", s.Drain.Entries)})
	}
	if err := table(w, rows...); err != nil {
		return err
	}
	if len(s.Interfaces) > 0 {
		say(w, "\n")
		interfaces := [][]string{{"INTERFACE", "ATTACH", "IPV4 SOURCE", "IPV6 SOURCE"}}
		for _, i := range s.Interfaces {
			interfaces = append(interfaces, []string{i.Name, orDash(i.Attach), address(i.SNATv4), address(i.SNATv6)})
		}
		if err := table(w, interfaces...); err != nil {
			return err
		}
	}
	for i, warning := range s.Warnings {
		if i == 0 {
			say(w, "\n")
		}
		say(w, "Warning: %s\n", warning)
	}
	return nil
}

func describeBackend(b api.Backend) string {
	if b.Reason == "" {
		return orDash(b.Name)
	}
	return fmt.Sprintf("%s (%s)", b.Name, b.Reason)
}

func describeConfig(c api.ConfigStatus) string {
	if c.Valid {
		return c.Path + ", good"
	}
	return c.Path + ", refused: " + strings.ReplaceAll(c.Error, "\n", "; ")
}

func prefixes(list []netip.Prefix) string {
	words := make([]string, 0, len(list))
	for _, p := range list {
		words = append(words, p.String())
	}
	return orDash(strings.Join(words, " "))
}

func address(a netip.Addr) string {
	if !a.IsValid() {
		return "-"
	}
	return a.String()
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}

func describeFastPath(f api.FastPath) string {
	if len(f.Interfaces) == 0 {
		return fmt.Sprintf("on, %d packets; no pod's interface has a flow yet", f.Packets)
	}
	return fmt.Sprintf("on, %d packets, from %s", f.Packets, strings.Join(f.Interfaces, " "))
}
