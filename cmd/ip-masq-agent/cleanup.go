// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/iptables"
)

func newCleanupCommand(env environment) *cobra.Command {
	o := &options{}
	command := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove all that the agent made in the kernel",
		Long: `Remove all that the agent made in the kernel, in both datapaths, and end its
translations at once. Nothing else is touched. Refuses while an agent runs.`,
		Args: noArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			if err := iptables.ValidateChain(o.chain); err != nil {
				return usagef("--masq-chain: %w", err)
			}
			log := newLogger(command.ErrOrStderr(), "text", 0)
			return cleanup(command.Context(), env, func(d datapath) error {
				return d.cleanup(command.Context(), o, log)
			})
		},
	}
	command.Flags().StringVar(&o.chain, "masq-chain", defaultChain, "`name` of the chain in the nat table")
	command.Flags().StringVar(&o.pinPath, "pin-path", defaultPinPath, "`directory` of the ebpf datapath's maps and links")
	return command
}

// cleanup holds the agent's socket meanwhile, so that none starts.
func cleanup(ctx context.Context, env environment, each func(datapath) error) error {
	socket, err := agent.Listen(ctx, env.socket)
	if errors.Is(err, agent.ErrRunning) {
		return fmt.Errorf("end the agent first: %w", err)
	}
	if err != nil {
		return err
	}
	defer closeQuietly(socket)
	return eachDatapath(env, func(_ string, d datapath) error { return each(d) })
}
