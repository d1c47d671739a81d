// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"slices"
	"time"

	"ip-masq-agent/internal/prefix"
)

// syncTimeout is how long one turn may take. iptables on a large node needs
// seconds; a minute means that something hangs.
const syncTimeout = time.Minute

// outcome is how the syncs went. Faults are empty where all is well.
type outcome struct {
	synced      bool      // at least one sync succeeded
	missing     []string  // what the last successful sync left out
	lastGood    time.Time // end of the last successful sync
	fault       string    // of the last sync
	retirement  Retirement
	retireFault string // why the other datapath could not give way
}

func (a *Agent) outcome() outcome {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.last
}

// note changes the outcome. Only the loop does so.
func (a *Agent) note(change func(*outcome)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change(&a.last)
}

// turn is one round of the loop. It gives the interval to the next one.
func (a *Agent) turn(ctx context.Context) (time.Duration, error) {
	a.beat.expect(syncTimeout)
	now := a.settings.reload(ctx)
	interval := now.config.ResyncInterval
	defer a.beat.expect(interval)

	turn, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	err := a.sync(turn, now.policy)
	if err == nil {
		err = a.retire(turn)
	}
	return interval, endedWith(ctx, err)
}

func (a *Agent) sync(ctx context.Context, policy *prefix.Policy) error {
	begin := time.Now()
	err := a.options.Datapath.Sync(ctx, policy, a.options.Network.Snapshot())
	if errors.Is(ctx.Err(), context.Canceled) {
		return ctx.Err() // the agent ends: this is neither a success nor a failure
	}
	a.metrics.syncDuration.Observe(time.Since(begin).Seconds())
	old := a.outcome().fault
	if err != nil {
		a.metrics.syncErrors.Inc()
		a.note(func(o *outcome) { o.fault = oneLine(err) })
		if fault := oneLine(err); fault != old {
			a.options.Log.Error("sync failed, trying again", "error", fault)
		}
		return err
	}
	missing := a.missing()
	a.note(func(o *outcome) { o.synced, o.missing, o.lastGood, o.fault = true, missing, time.Now(), "" })
	if old != "" {
		a.options.Log.Info("sync works again")
	}
	return nil
}

// missing says what keeps the datapath from being in place after a sync: eBPF
// programs that do not run. The other datapath has nothing to attach.
func (a *Agent) missing() []string {
	if a.options.Datapath.Name() != EBPF {
		return nil
	}
	status, err := a.options.Datapath.Status()
	if err != nil {
		return []string{"the datapath's status: " + oneLine(err)}
	}
	var missing []string
	if len(status.Interfaces) == 0 {
		missing = append(missing, "an uplink")
	}
	for _, i := range status.Interfaces {
		if i.Attach == "" {
			missing = append(missing, "programs on "+i.Name)
		}
	}
	return missing
}

// retire has the other datapath give way once ours is in place.
func (a *Agent) retire(ctx context.Context) error {
	last := a.outcome()
	if a.options.Retire == nil || last.retirement.Gone {
		return nil
	}
	now, err := a.options.Retire(ctx, a.options.Network.Snapshot())
	if errors.Is(ctx.Err(), context.Canceled) {
		return ctx.Err() // the agent ends: the next one sees to it
	}
	if err != nil {
		fault := oneLine(err)
		a.note(func(o *outcome) { o.retireFault = fault })
		if fault != last.retireFault {
			a.options.Log.Error("other datapath not removed, trying again", "error", fault)
		}
		return err
	}
	a.note(func(o *outcome) { o.retirement, o.retireFault = now, "" })
	a.logRetirement(last.retirement, now)
	return nil
}

func (a *Agent) logRetirement(before, now Retirement) {
	for _, warning := range now.Warnings {
		if !slices.Contains(before.Warnings, warning) {
			a.options.Log.Warn("something stays beside the datapath", "warning", warning)
		}
	}
	switch {
	case now.Drain.Active && !before.Drain.Active:
		a.options.Log.Info("open connections of the other datapath go on", "entries", now.Drain.Entries)
		a.loop.trigger() // what opened meanwhile should not have to wait
	case before.Drain.Active && !now.Drain.Active:
		a.options.Log.Info("the other datapath has drained")
	}
}
