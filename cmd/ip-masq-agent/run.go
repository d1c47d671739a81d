// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"

	"ip-masq-agent/internal/agent"
)

// Exit codes.
const (
	exitFine    = 0
	exitFailure = 1 // at run time
	exitUsage   = 2
)

// environment is what the commands find around them. Tests put other things
// in its place.
type environment struct {
	ctx       context.Context
	socket    string // where the agent of this network namespace answers
	datapaths map[string]datapath
}

func realEnvironment() environment {
	return environment{ctx: context.Background(), socket: agent.Socket, datapaths: datapaths()}
}

// usageError is a command line that makes no sense.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error {
	return usageError{fmt.Errorf(format, args...)}
}

// errReported ends with exitFailure once everything has been said.
var errReported = errors.New("reported already")

// run runs a command line, without the program's name, to its end and gives
// the exit code.
func run(args []string, stdout, stderr io.Writer, env environment) int {
	root := newRoot(env)
	root.SetArgs(rewriteArgs(args, root))
	root.SetOut(stdout)
	root.SetErr(stderr)
	command, err := root.ExecuteContextC(env.ctx)
	usage, isUsage := errors.AsType[usageError](err)
	switch {
	case err == nil:
		return exitFine
	case errors.Is(err, errReported):
		return exitFailure
	case isUsage:
		say(stderr, "ip-masq-agent: %s (see %s --help)\n", oneLine(usage), command.CommandPath())
		return exitUsage
	}
	say(stderr, "ip-masq-agent: %s\n", oneLine(err))
	return exitFailure
}

func oneLine(err error) string {
	return strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", "; ")
}

// newRoot builds all commands.
func newRoot(env environment) *cobra.Command {
	root := newAgentCommand(env)
	root.SilenceErrors, root.SilenceUsage = true, true
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddCommand(
		newStatusCommand(env),
		newExplainCommand(env),
		newNATCommand(env),
		newCleanupCommand(env),
		newValidateCommand(),
		newVersionCommand(),
		newCompletionCommand(),
	)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	return root
}

// noArgs is for commands that take flags only.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("unexpected argument %q", args[0])
	}
	return nil
}

// newLogger writes to w. Verbosity 2 adds the rules or map changes, 4 everything.
func newLogger(w io.Writer, format string, verbosity int) *slog.Logger {
	const everything = slog.LevelDebug - 4
	options := &slog.HandlerOptions{Level: slog.LevelInfo}
	switch {
	case verbosity >= 4:
		options.Level = everything
	case verbosity >= 2:
		options.Level = levelRules
	}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}

// levelRules is the level at which the datapaths log what they write.
const levelRules = slog.LevelInfo - 2
