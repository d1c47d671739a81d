// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// rewriteArgs makes a command line of the classic agent one that pflag takes:
// long flags may have one dash, and underscores for dashes as klog's have. What
// has one letter (-o, -v, -h) is a short flag in either world, and what follows
// a flag as its value stays as it is.
func rewriteArgs(args []string, root *cobra.Command) []string {
	known := make(map[string]*pflag.Flag)
	collectFlags(root, known)
	rewritten := make([]string, 0, len(args))
	for i := 0; i < len(args); i++ {
		arg := args[i]
		if arg == "--" || strings.HasPrefix(arg, "__") { // the shell completion's own
			return append(rewritten, args[i:]...)
		}
		flag := lookupFlag(arg, known)
		if flag == nil {
			rewritten = append(rewritten, arg)
			continue
		}
		name, value, hasValue := strings.Cut(arg, "=")
		if len(strings.TrimLeft(name, "-")) > 1 {
			name = "--" + flag.Name
		}
		if hasValue {
			name += "=" + value
		}
		rewritten = append(rewritten, name)
		if takesNext := !hasValue && flag.NoOptDefVal == ""; takesNext && i+1 < len(args) {
			i++
			rewritten = append(rewritten, args[i])
		}
	}
	return rewritten
}

// lookupFlag finds the flag that arg sets, nil if it sets none that is known.
func lookupFlag(arg string, known map[string]*pflag.Flag) *pflag.Flag {
	name, dashed := strings.CutPrefix(arg, "-")
	if !dashed {
		return nil
	}
	name, _, _ = strings.Cut(strings.TrimPrefix(name, "-"), "=")
	return known[strings.ReplaceAll(name, "_", "-")]
}

// collectFlags maps the long and short names of the flags of all commands.
func collectFlags(command *cobra.Command, known map[string]*pflag.Flag) {
	command.InitDefaultHelpFlag()
	command.Flags().VisitAll(func(flag *pflag.Flag) {
		known[flag.Name] = flag
		if flag.Shorthand != "" {
			known[flag.Shorthand] = flag
		}
	})
	for _, sub := range command.Commands() {
		collectFlags(sub, known)
	}
}
