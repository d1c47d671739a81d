// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"ip-masq-agent/internal/config"
)

func newValidateCommand() *cobra.Command {
	var format string
	o := config.Options{Path: defaultConfig, EnableIPv6: true}
	command := &cobra.Command{
		Use:   "validate [FILE]",
		Short: "Print the effective config, or what is wrong with it",
		Long: `Print the effective config, or one line for each fault. Unknown and duplicate
keys are faults here. FILE may be a directory; it is ` + defaultConfig + `
by default.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("validate takes one file, not %d", len(args))
			}
			return nil
		},
		RunE: func(command *cobra.Command, args []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			if len(args) == 1 {
				o.Path = args[0]
			}
			return validate(o, len(args) == 1, format, command.OutOrStdout(), command.ErrOrStderr())
		},
	}
	addOutputFlag(command, &format)
	command.Flags().BoolVar(&o.AllReservedRanges, "nomasq-all-reserved-ranges", false, "as the agent's flag")
	return command
}

// validate prints the config to stdout, or the faults to stderr. A file that
// was asked for must be there.
func validate(o config.Options, mustExist bool, format string, stdout, stderr io.Writer) error {
	result, err := config.Check(o)
	if faults, ok := errors.AsType[config.Faults](err); ok {
		for _, fault := range faults {
			say(stderr, "%v\n", fault)
		}
		return errReported
	}
	if err != nil {
		return err
	}
	if mustExist && !result.Present {
		return fmt.Errorf("%s: no such file", o.Path)
	}
	for _, warning := range result.Warnings {
		say(stderr, "warning: %v\n", warning)
	}
	return printAs(stdout, format, result.Config, func(w io.Writer) error {
		text, err := result.Config.YAML()
		if err != nil {
			return err
		}
		_, err = w.Write(text)
		return err
	})
}
