// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"time"
)

const (
	minGap   = 100 * time.Millisecond // between two turns, however often the loop is triggered
	minRetry = time.Second            // the first retry, and the gap after a failed turn
)

// runner calls a function again and again, in one goroutine. It guarantees:
//
//   - The first call is made at once.
//   - A trigger is never lost: a call begins after it. Triggers that come
//     while a call runs or is due are one.
//   - A triggered call begins at most minGap after the trigger, or after the
//     end of the call that ran meanwhile; minRetry if that call failed, so that
//     a failing call that triggers itself does not spin.
//   - Without a trigger, calls are an interval apart, counted from end to begin.
//   - After a failure the next call comes after minRetry, which doubles with
//     each further failure up to the interval. A success starts it anew.
//   - It returns once ctx has ended and the running call has returned.
type runner struct {
	triggered chan struct{}
}

func newRunner() *runner {
	return &runner{triggered: make(chan struct{}, 1)}
}

// trigger asks for a call. It never blocks.
func (r *runner) trigger() {
	select {
	case r.triggered <- struct{}{}:
	default: // one is due already, and it will see what this one is about
	}
}

// run calls turn until ctx ends. turn gives the interval to the next call and
// whether it failed.
func (r *runner) run(ctx context.Context, turn func(context.Context) (time.Duration, error)) {
	retry := minRetry
	for ctx.Err() == nil {
		gap := minGap
		wait, err := turn(ctx)
		if err != nil {
			interval := wait
			gap, wait = minRetry, min(retry, interval)
			retry = min(2*retry, interval)
		} else {
			retry = minRetry
		}
		r.wait(ctx, gap, wait)
	}
}

// wait returns after wait, or sooner after a trigger, but not before gap.
func (r *runner) wait(ctx context.Context, gap, wait time.Duration) {
	if sleep(ctx, gap); ctx.Err() != nil || wait <= gap {
		return
	}
	timer := time.NewTimer(wait - gap)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-r.triggered:
	}
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
