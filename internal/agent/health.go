// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"sync"
	"time"
)

// beatGrace is how much later than due a beat may come: a node under load must
// not have its agent restarted for it.
const beatGrace = 15 * time.Second

// heartbeat says whether the loop turns. The loop tells when its next sign of
// life is due at the latest; whoever asks later than that finds it stalled.
// The zero value is alive, as the loop has promised nothing yet.
type heartbeat struct {
	mu  sync.Mutex
	due time.Time
}

// expect promises the next beat within d.
func (h *heartbeat) expect(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.due = time.Now().Add(d + beatGrace)
}

// late is how long the beat is overdue, zero or less if it is not.
func (h *heartbeat) late() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.due.IsZero() {
		return 0
	}
	return time.Since(h.due)
}

// healthBody is what /healthz and /readyz show.
type healthBody struct {
	OK         bool       `json:"ok"`
	Missing    []string   `json:"missing"`              // what there is not yet, or no longer
	LastSync   *time.Time `json:"last_sync,omitempty"`  // the last successful one
	LastError  string     `json:"last_error,omitempty"` // of the last sync, if it failed
	ConfigGood bool       `json:"config_good"`          // for information: a bad file makes nothing unwell
}

func (a *Agent) health(missing []string) (bool, any) {
	last := a.outcome()
	body := healthBody{
		OK:         len(missing) == 0,
		Missing:    append([]string{}, missing...), // never null
		LastError:  last.fault,
		ConfigGood: a.settings.view().fault == nil,
	}
	if last.synced {
		body.LastSync = &last.lastGood
	}
	return body.OK, body
}

// healthy is /healthz: the loop turns. A bad config or a failing sync does not
// make it unhealthy, for a restart would mend neither.
func (a *Agent) healthy() (bool, any) {
	if late := a.beat.late(); late > 0 {
		return a.health([]string{fmt.Sprintf("the loop's turn, overdue by %v", late.Round(time.Second))})
	}
	return a.health(nil)
}

// ready is /readyz: the datapath is in place. It looks at what the last sync
// found, as probes are many and counting flows is not free.
func (a *Agent) ready() (bool, any) {
	last := a.outcome()
	if !last.synced {
		return a.health([]string{"first sync"})
	}
	return a.health(last.missing)
}
