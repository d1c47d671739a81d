// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// runnerLog runs a runner for a while and gives the times at which calls began,
// counted from its start.
func runnerLog(t *testing.T, length, interval, duration time.Duration, fails func(call int) bool, script func(*runner)) []time.Duration {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	r, start := newRunner(), time.Now()
	if script != nil {
		go script(r)
	}
	var begins []time.Duration
	r.run(ctx, func(context.Context) (time.Duration, error) {
		begins = append(begins, time.Since(start))
		time.Sleep(duration)
		if fails != nil && fails(len(begins)) {
			return interval, errors.New("failed")
		}
		return interval, nil
	})
	return begins
}

func TestRunner(t *testing.T) {
	const ms, s = time.Millisecond, time.Second
	always := func(int) bool { return true }
	tests := []struct {
		name                       string
		length, interval, duration time.Duration
		fails                      func(int) bool
		script                     func(*runner)
		want                       []time.Duration
	}{
		{
			name:   "first at once, then the interval from end to begin",
			length: 25 * s, interval: 10 * s, duration: s,
			want: []time.Duration{0, 11 * s, 22 * s},
		},
		{
			name:   "an idle loop answers a trigger at once",
			length: 12 * s, interval: 10 * s,
			script: func(r *runner) { time.Sleep(5 * s); r.trigger() },
			want:   []time.Duration{0, 5 * s},
		},
		{
			name:   "a trigger during a call leads to one call after it",
			length: 8 * s, interval: 10 * s, duration: 2 * s,
			script: func(r *runner) {
				for range 3 {
					time.Sleep(s / 2)
					r.trigger()
				}
			},
			want: []time.Duration{0, 2*s + minGap},
		},
		{
			name:   "a storm of triggers gives a call every minGap",
			length: 450 * ms, interval: 10 * s,
			script: func(r *runner) {
				for range 450 {
					r.trigger()
					time.Sleep(ms)
				}
			},
			want: []time.Duration{0, 100 * ms, 200 * ms, 300 * ms, 400 * ms},
		},
		{
			name:   "retries back off up to the interval",
			length: 40 * s, interval: 10 * s, fails: always,
			want: []time.Duration{0, 1 * s, 3 * s, 7 * s, 15 * s, 25 * s, 35 * s},
		},
		{
			name:   "success starts the backoff anew",
			length: 27 * s, interval: 10 * s, fails: func(call int) bool { return call != 4 },
			want: []time.Duration{0, 1 * s, 3 * s, 7 * s, 17 * s, 18 * s, 20 * s, 24 * s},
		},
		{
			name:   "a failing call that triggers itself does not spin",
			length: 3500 * ms, interval: 60 * s, fails: always,
			script: func(r *runner) {
				for range 3500 {
					r.trigger()
					time.Sleep(ms)
				}
			},
			want: []time.Duration{0, 1 * s, 2 * s, 3 * s},
		},
		{
			name:   "the shortest interval is kept while failing",
			length: 3500 * ms, interval: s, fails: always,
			want: []time.Duration{0, 1 * s, 2 * s, 3 * s},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				got := runnerLog(t, test.length, test.interval, test.duration, test.fails, test.script)
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("calls began at (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func TestRunnerEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		runnerLog(t, 3*time.Second, time.Hour, 0, nil, nil)
		if got := time.Since(start); got != 3*time.Second {
			t.Errorf("returned after %v, want 3s", got)
		}
	})
}
