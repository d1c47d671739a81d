// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"

	"github.com/spf13/cobra"
)

func newCompletionCommand() *cobra.Command {
	return &cobra.Command{
		Use:       "completion bash|zsh|fish",
		Short:     "Print a script that makes a shell complete this command",
		Long:      "Print a script that makes a shell complete this command, for example:\n\n  source <(ip-masq-agent completion bash)",
		ValidArgs: []string{"bash", "zsh", "fish"},
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef("completion takes one argument: bash, zsh or fish")
			}
			return nil
		},
		RunE: func(command *cobra.Command, args []string) error {
			root, out := command.Root(), command.OutOrStdout()
			write, ok := map[string]func(io.Writer) error{
				"bash": func(w io.Writer) error { return root.GenBashCompletionV2(w, true) },
				"zsh":  root.GenZshCompletion,
				"fish": func(w io.Writer) error { return root.GenFishCompletion(w, true) },
			}[args[0]]
			if !ok {
				return usagef("no completion for %q, only for bash, zsh and fish", args[0])
			}
			return write(out)
		},
	}
}
