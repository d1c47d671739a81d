// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"ip-masq-agent/internal/route"
)

const defaultRanges = "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16"

// bubble runs a test with its own clock.
func bubble(t *testing.T, test func(t *testing.T, b *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(t, newBench(t)) })
}

func TestStartsWithDefaultsAndThenStaysSilent(t *testing.T) {
	bubble(t, func(_ *testing.T, b *bench) {
		b.start()
		b.wantSyncs(1)
		b.wantKeeps(defaultRanges)
		b.wantLog(
			`level=INFO msg="config in force" source=defaults non_masquerade_cidrs="` + defaultRanges + `" masquerade_cidrs="" masq_link_local=false masq_link_local_ipv6=false resync_interval=1m0s`)
		time.Sleep(time.Hour + time.Second)
		b.wantSyncs(61)
		b.wantLog()
	})
}

func TestEveryTriggerLeadsToASync(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		b.start()
		for i, trigger := range []func(){
			b.Resync,
			func() { b.network.changed <- struct{}{} },
			func() { b.datapath.changed <- struct{}{} },
			func() { b.rewritten <- struct{}{} },
		} {
			time.Sleep(time.Second)
			trigger()
			synctest.Wait()
			if got, want := b.datapath.syncs(), i+2; got != want {
				t.Fatalf("got %d syncs after trigger %d, want %d at once", got, i, want)
			}
		}
	})
}

func TestConfigChangeIsInForceAtOnceAndOneLine(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		b.put(`nonMasqueradeCIDRs: [10.0.0.0/8]`)
		b.start()
		b.log.Take()
		b.rewrite(`nonMasqueradeCIDRs: [10.0.0.0/8, 198.51.100.0/24]`, `resyncInterval: 10s`)
		b.wantKeeps("10.0.0.0/8 198.51.100.0/24")
		b.wantLog(`level=INFO msg="config changed" source=FILE non_masquerade_cidrs_added=198.51.100.0/24 resync_interval=10s`)

		before := b.datapath.syncs()
		time.Sleep(30 * time.Second)
		synctest.Wait()
		if got := b.datapath.syncs() - before; got != 3 {
			t.Errorf("got %d syncs in 30 s, want 3 with the new interval", got)
		}
		b.rewrite(`nonMasqueradeCIDRs: [198.51.100.0/24, 10.0.0.0/8]`, `resyncInterval: 10s`)
		b.wantLog(`level=INFO msg="config changed" source=FILE non_masquerade_cidrs_reordered="198.51.100.0/24 10.0.0.0/8"`)
	})
}

func TestBadConfigKeepsTheLastGoodOneEnforcedAndHealed(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		b.put(`nonMasqueradeCIDRs: [203.0.113.0/24]`)
		b.start()
		b.log.Take()
		const line = `level=ERROR msg="config refused" path=FILE enforced="last good config" error="FILE:1: `

		b.rewrite(`nonMasqueradeCIDRs: [10.0.0.1/8]`)
		b.wantKeeps("203.0.113.0/24")
		b.wantLog(line + `nonMasqueradeCIDRs: CIDR \"10.0.0.1/8\" is not aligned to a CIDR block, ip: \"10.0.0.1\" network: \"10.0.0.0/8\""`)
		before := b.datapath.syncs()
		b.datapath.changed <- struct{}{} // someone flushed the chain
		b.settle()
		b.wantSyncs(before + 1)
		b.wantKeeps("203.0.113.0/24")
		time.Sleep(time.Hour)
		b.wantLog() // the fault was logged once

		b.rewrite(`nonMasqueradeCIDRs: [abcdefg]`)
		b.wantLog(line + `nonMasqueradeCIDRs: CIDR \"abcdefg\" could not be parsed, invalid CIDR address: abcdefg"`)
		if ok, _ := b.healthy(); !ok {
			t.Error("a bad config makes the agent unhealthy")
		}
		if ok, _ := b.ready(); !ok {
			t.Error("a bad config makes the agent unready")
		}
		b.rewrite(`nonMasqueradeCIDRs: [203.0.113.0/24]`)
		b.wantLog(`level=INFO msg="config good again, nothing to change" source=FILE`)
	})
}

// A turn may fall between the two steps of a writer that empties the file first.
func TestHalfWrittenConfigIsNotTaken(t *testing.T) {
	bubble(t, func(_ *testing.T, b *bench) {
		b.put(`nonMasqueradeCIDRs: [203.0.113.0/24]`)
		b.start()
		b.log.Take()
		time.Sleep(time.Second)
		b.put()
		b.network.changed <- struct{}{}
		time.Sleep(settleTime / 2)
		b.put(`nonMasqueradeCIDRs: [198.51.100.0/24]`)
		b.settle()
		b.wantKeeps("198.51.100.0/24")
		b.wantLog(`level=INFO msg="config changed" source=FILE non_masquerade_cidrs_added=198.51.100.0/24 non_masquerade_cidrs_removed=203.0.113.0/24`)
	})
}

func TestBadConfigAtFirstStartEnforcesTheDefaults(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		b.put(`resyncInterval: 0s`)
		b.start()
		b.wantSyncs(1)
		b.wantKeeps(defaultRanges)
		if got := b.settings.view(); got.fault == nil || !got.loaded.IsZero() {
			t.Errorf("got fault %v, loaded %v, want a fault and no time", got.fault, got.loaded)
		}
	})
}

func TestWarningsAreLoggedOnceUntilTheyChange(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		b.put(`nonMasqCIDRs: [10.0.0.0/8]`)
		b.start()
		count := func() int { return strings.Count(b.log.Take(), "config warning") }
		if got := count(); got != 1 {
			t.Errorf("got %d warnings at start, want 1", got)
		}
		time.Sleep(time.Hour)
		if got := count(); got != 0 {
			t.Errorf("got %d warnings while nothing changed, want 0", got)
		}
		b.rewrite(`nonMasqCIDRs: [10.0.0.0/8]`, `cidrLimits: 3`)
		if got := count(); got != 1 {
			t.Errorf("got %d warnings for a new one, want 1", got)
		}
	})
}

func TestFailedSyncIsRetriedAndLoggedOnceUntilItChanges(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		b.datapath.sync = func(_ context.Context, call int) error {
			switch {
			case call <= 5:
				return errors.New("lock held")
			case call == 6:
				return errors.New("no table")
			}
			return nil
		}
		b.start()
		b.log.Take()
		if ok, _ := b.ready(); ok {
			t.Error("ready before the first successful sync")
		}
		time.Sleep(15 * time.Second) // calls at 0, 1, 3, 7, 15
		synctest.Wait()
		b.wantSyncs(5)
		b.wantLog()
		time.Sleep(16 * time.Second)
		synctest.Wait()
		b.wantLog(`level=ERROR msg="sync failed, trying again" error="no table"`)
		time.Sleep(32 * time.Second)
		synctest.Wait()
		b.wantLog(`level=INFO msg="sync works again"`)
		if ok, _ := b.ready(); !ok {
			t.Error("not ready after a successful sync")
		}
	})
}

func TestHungSyncIsCutOffAndThenUnhealthy(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		var cut time.Duration
		release := make(chan struct{})
		b.datapath.sync = func(ctx context.Context, _ int) error {
			start := time.Now()
			<-ctx.Done()
			cut = time.Since(start)
			<-release // does not listen
			return ctx.Err()
		}
		b.start()
		time.Sleep(syncTimeout + beatGrace - time.Second)
		if ok, _ := b.healthy(); !ok {
			t.Error("unhealthy before the grace is over")
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if ok, body := b.healthy(); ok {
			t.Errorf("healthy while a sync hangs: %+v", body)
		}
		if cut != syncTimeout {
			t.Errorf("context ended after %v, want %v", cut, syncTimeout)
		}
		close(release)
		synctest.Wait()
		if ok, _ := b.healthy(); !ok {
			t.Error("unhealthy though the loop turns again")
		}
	})
}

func TestHealthyThroughLongIntervalsAndBackoff(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		b.put(`resyncInterval: 1h`)
		b.datapath.sync = func(_ context.Context, call int) error {
			if call > 1 {
				return errors.New("no")
			}
			return nil
		}
		b.start()
		for range 600 {
			time.Sleep(time.Minute)
			if ok, body := b.healthy(); !ok {
				t.Fatalf("unhealthy: %+v", body)
			}
		}
	})
}

func TestEndsAtOnceAndLeavesTheDatapath(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		stop := b.start()
		start := time.Now()
		if err := stop(); err != nil {
			t.Errorf("got %v, want nil", err)
		}
		if got := time.Since(start); got != 0 {
			t.Errorf("took %v", got)
		}
		if !b.datapath.closed {
			t.Error("datapath not closed")
		}
	})
}

func TestEndsInTimeWhileASyncHangs(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		release := make(chan struct{})
		b.datapath.sync = func(context.Context, int) error { <-release; return nil }
		stop := b.start()
		start := time.Now()
		if err := stop(); err != nil {
			t.Errorf("got %v, want nil", err)
		}
		if got := time.Since(start); got != stopTimeout {
			t.Errorf("took %v, want %v", got, stopTimeout)
		}
		close(release)
		synctest.Wait()
		if b.outcome().synced {
			t.Error("a sync that was cut off counts as done")
		}
	})
}

func TestLosingTheNetworkIsAnError(t *testing.T) {
	bubble(t, func(t *testing.T, b *bench) {
		want := errors.New("socket gone")
		b.network.fails <- want
		if err := b.Run(t.Context()); !errors.Is(err, want) {
			t.Errorf("got %v, want %v", err, want)
		}
	})
}

func TestOtherDatapathIsRetiredAfterTheFirstSuccess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		retires := 0
		var b *bench
		b = newBench(t, func(o *Options) {
			o.Retire = func(context.Context, *route.Snapshot) (Retirement, error) {
				if b.datapath.syncs() < 2 {
					t.Error("retired before a sync succeeded")
				}
				if retires++; retires < 3 {
					return Retirement{}, errors.New("busy")
				}
				return Retirement{Gone: true}, nil
			}
		})
		b.datapath.sync = func(_ context.Context, call int) error {
			if call == 1 {
				return errors.New("no")
			}
			return nil
		}
		b.start()
		time.Sleep(time.Second)
		synctest.Wait()
		if status, err := b.Status(); err != nil || len(status.Warnings) != 1 {
			t.Errorf("got warnings %v, %v, want one about the other datapath", status.Warnings, err)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if retires != 3 {
			t.Errorf("got %d calls, want 3: until it succeeds and never after", retires)
		}
		if status, _ := b.Status(); len(status.Warnings) != 0 {
			t.Errorf("got warnings %v, want none", status.Warnings)
		}
	})
}

func TestEndingIsNoFailure(t *testing.T) {
	untilEnd := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	for name, retire := range map[string]bool{"sync": false, "retire": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, func(o *Options) {
					o.Retire = func(ctx context.Context, _ *route.Snapshot) (Retirement, error) {
						return Retirement{}, untilEnd(ctx)
					}
				})
				if !retire {
					b.datapath.sync = func(ctx context.Context, _ int) error { return untilEnd(ctx) }
				}
				stop := b.start()
				b.log.Take()
				if err := stop(); err != nil {
					t.Error(err)
				}
				b.wantLog(`level=INFO msg="ip-masq-agent ends, the datapath stays in place"`)
			})
		})
	}
}

func TestOnce(t *testing.T) {
	boom := errors.New("boom")
	for _, test := range []struct {
		name, file string
		sync       error
		wantErr    bool
	}{
		{"good", "nonMasqueradeCIDRs: [10.0.0.0/8]", nil, false},
		{"sync fails", "nonMasqueradeCIDRs: [10.0.0.0/8]", boom, true},
		{"config refused", "nonMasqueradeCIDRs: [x]", nil, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t)
			b.put(test.file)
			b.datapath.sync = func(context.Context, int) error { return test.sync }
			if err := b.Once(t.Context()); (err != nil) != test.wantErr {
				t.Errorf("got %v, want an error: %v", err, test.wantErr)
			}
			b.wantSyncs(1)
			if !b.datapath.closed {
				t.Error("datapath not closed")
			}
		})
	}
}
