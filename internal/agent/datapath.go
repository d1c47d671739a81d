// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"

	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

// Datapath makes the kernel translate. It is called by one goroutine at a time,
// but for Stats, Status and EachTranslation, which may be called at any time.
type Datapath interface {
	// Name is the value of --datapath that selects it.
	Name() string

	// Sync makes the kernel agree with the policy on the node's uplinks. It
	// compares first and writes only on a difference. On error the old state
	// is still whole.
	Sync(ctx context.Context, policy *prefix.Policy, network *route.Snapshot) error

	// Plan is what Sync would program, as text for --dry-run. It touches nothing.
	Plan(policy *prefix.Policy, network *route.Snapshot) (string, error)

	// Changed delivers when something outside changed what Sync made, so that
	// it should run again soon.
	Changed() <-chan struct{}

	// Stats are counters for the metrics.
	Stats() (api.Stats, error)

	// Status is the datapath's part of `status`.
	Status() (api.DatapathStatus, error)

	// EachTranslation visits the live flows that the datapath itself translates,
	// in no particular order. Those that come or go meanwhile may be missed.
	EachTranslation(visit func(api.Translation)) error

	// Close gives up handles and goroutines. What the kernel runs stays.
	Close() error
}
