// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/config"
	"ip-masq-agent/internal/route"
	"ip-masq-agent/loader"
)

// newAgentCommand is the root command: it runs the agent.
func newAgentCommand(env environment) *cobra.Command {
	o := &options{}
	var showVersion bool
	var output string
	command := &cobra.Command{
		Use:   "ip-masq-agent",
		Short: "Masquerade what pods send out of the node, except towards the ranges that should see them",
		Long: `Masquerade what pods send out of the node, except towards the ranges that
should see their addresses. Without a command, the agent runs until SIGTERM;
what it made in the kernel stays in place then.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q", args[0])
			}
			return nil
		},
		RunE: func(command *cobra.Command, _ []string) error {
			if showVersion {
				return printVersion(command.OutOrStdout(), output)
			}
			if err := o.check(); err != nil {
				return err
			}
			log := newLogger(command.ErrOrStderr(), o.logFormat, o.verbosity)
			tellIgnored(command.Flags(), log)
			o.datapathGiven = command.Flags().Changed("datapath")
			return reportFailure(log, runAgent(command.Context(), env, o, log, command.OutOrStdout()))
		},
	}
	o.addFlags(command.Flags())
	command.Flags().BoolVar(&showVersion, "version", false, "show which build this is")
	command.Flags().StringVarP(&output, "output", "o", "text", "output format: `text|json`")
	_ = command.Flags().MarkHidden("output") // it exists
	return command
}

// reportFailure logs why the agent ends, as all else that it says.
func reportFailure(log *slog.Logger, err error) error {
	missing, isMissing := errors.AsType[missingError](err)
	switch {
	case err == nil:
		return nil
	case isMissing:
		for _, what := range missing.what {
			log.Error("datapath cannot run here", "datapath", missing.datapath, "missing", what)
		}
	default:
		log.Error("ip-masq-agent ends", "error", oneLine(err))
	}
	return errReported
}

// missingError is a datapath that the kernel or the rights do not allow.
type missingError struct {
	datapath string
	what     []string
}

func (e missingError) Error() string {
	return fmt.Sprintf("the %s datapath cannot run here: %v", e.datapath, e.what)
}

// runAgent runs until ctx or a signal ends it.
func runAgent(ctx context.Context, env environment, o *options, log *slog.Logger, stdout io.Writer) error {
	ctx, stop := signal.NotifyContext(ctx, unix.SIGTERM, unix.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, unix.SIGHUP)
	defer signal.Stop(hangup)

	if o.dryRun {
		return dryRun(env, o, log, stdout)
	}
	// The socket comes first: it keeps a second agent from touching anything.
	control, err := agent.Listen(ctx, env.socket)
	if err != nil {
		return err
	}
	defer closeQuietly(control)
	build := thisVersion()
	log.Info("ip-masq-agent starts", "version", build.Version, "kernel", kernelRelease(),
		"datapath", o.datapath, "why", o.whyDatapath(), "config", o.config.Path)
	network, err := route.NewTracker(route.Options{Interfaces: o.interfaces, Log: log})
	if err != nil {
		return fmt.Errorf("read the node's network: %w", err)
	}
	defer closeQuietly(network)
	d, err := openDatapath(env, o, log)
	if err != nil {
		return err
	}
	a := agent.New(agent.Options{
		Build:              agent.Build{Version: build.Version, Revision: build.Commit, GoVersion: build.Go},
		Config:             o.config,
		Datapath:           d,
		Network:            network,
		Control:            control,
		MetricsBindAddress: o.metrics,
		Retire:             retireOthers(env, o, log),
		Readable:           loader.Readable,
		Log:                log,
	})
	if o.once {
		return a.Once(ctx)
	}
	go followHangups(ctx, hangup, a.Resync)
	return a.Run(ctx)
}

func followHangups(ctx context.Context, hangup <-chan os.Signal, resync func()) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-hangup:
			resync()
		}
	}
}

func kernelRelease() string {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return unknown
	}
	return unix.ByteSliceToString(name.Release[:])
}

func openDatapath(env environment, o *options, log *slog.Logger) (agent.Datapath, error) {
	d, err := env.datapaths[o.datapath].open(o, log)
	if err != nil {
		return nil, fmt.Errorf("open the %s datapath: %w", o.datapath, err)
	}
	return d, nil
}

// dryRun prints what a first sync would program. A refused config is an error,
// but the defaults are what the agent would start with.
func dryRun(env environment, o *options, log *slog.Logger, stdout io.Writer) error {
	network, err := route.NewTracker(route.Options{Interfaces: o.interfaces, Log: log})
	if err != nil {
		return fmt.Errorf("read the node's network: %w", err)
	}
	defer closeQuietly(network)
	result, refused := config.Load(o.config)
	if refused != nil {
		result.Config = config.Defaults(o.config)
	}
	plan, err := env.datapaths[o.datapath].plan(o, log, result.Config.Policy(o.config.EnableIPv6), network.Snapshot())
	if err != nil {
		return fmt.Errorf("plan the %s datapath: %w", o.datapath, err)
	}
	if _, err := io.WriteString(stdout, plan); err != nil {
		return fmt.Errorf("print the plan: %w", err)
	}
	return refused
}
