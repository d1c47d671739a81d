// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/lab"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

const (
	remotes = 1024 // that flows go to
	longAgo = 1    // by the datapath's clock
)

// benchmarkDatapath makes a datapath whose table holds a number of flows and
// that does not sweep by itself.
func benchmarkDatapath(b *testing.B, l *lab.Lab, size int) *Datapath {
	b.Helper()
	var d *Datapath
	err := l.Node.Do(func() (err error) {
		d, err = New(Options{
			PinPath: testPinPath, IPv6: true, RandomFully: true, NATTableSize: size,
			Log: slog.New(slog.DiscardHandler),
		})
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := d.Close(); err != nil {
			b.Error(err)
		}
	})
	d.sweeper.stop()
	if err := d.syncTimeouts(); err != nil {
		b.Fatal(err)
	}
	return d
}

// BenchmarkSweep sweeps tables that are empty, full of live flows, and full of
// flows that are past their time; and full of live flows when tuples without a
// flow are looked for, too. cpu-s is the time of all processors, call-ms the
// longest time of one system call.
func BenchmarkSweep(b *testing.B) {
	for kind, lastSeen := range map[string]func() uint64{
		"empty":   nil,
		"live":    monotonic,
		"ended":   func() uint64 { return longAgo },
		"orphans": monotonic,
	} {
		for _, size := range []int{4096, 262_144, 1_000_000} {
			for n, family := range []string{"IPv4", "IPv6"} {
				b.Run(fmt.Sprintf("%s/%d/%s", kind, size, family), func(b *testing.B) {
					d := benchmarkDatapath(b, lab.New(b, lab.Options{Pods: -1, RoutedPods: -1}), size)
					benchmarkSweep(b, d, d.families[n], lastSeen, kind == "orphans")
				})
			}
		}
	}
}

func benchmarkSweep(b *testing.B, d *Datapath, f *family, lastSeen func() uint64, orphans bool) {
	s := &sweeper{families: []*family{f}, timeouts: d.maps.Timeouts, counters: d.sweeper.counters, log: d.log}
	var used, longest time.Duration
	for b.Loop() {
		b.StopTimer()
		refill(b, f, lastSeen)
		if s.searched = time.Now(); orphans {
			s.searched = time.Time{}
		}
		before := processorTime(b)
		b.StartTimer()
		if _, err := s.sweep(); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		used += processorTime(b) - before
		refill(b, f, lastSeen)
		longest = max(longest, longestCall(b, f))
		b.StartTimer()
	}
	b.ReportMetric(used.Seconds()/float64(b.N), "cpu-s")
	b.ReportMetric(float64(longest.Microseconds())/1000, "call-ms")
}

// longestCall sweeps once more. What passes between two flows is a system call,
// or nearly nothing. Time of other threads does not count.
func longestCall(b *testing.B, f *family) (longest time.Duration) {
	b.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	left := threadTime(b)
	_, err := f.end(bpf.MasqSweepModeSWEEP_EXPIRED, func(e *flow) bool {
		longest = max(longest, threadTime(b)-left)
		left = threadTime(b)
		return e.lastSeen == longAgo
	})
	if err != nil {
		b.Fatal(err)
	}
	return max(longest, threadTime(b)-left)
}

// threadTime is what the calling thread has had of a processor.
func threadTime(b *testing.B) time.Duration {
	b.Helper()
	var used unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &used); err != nil {
		b.Fatal(err)
	}
	return time.Duration(used.Nano())
}

// processorTime is what this process has used.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// refill fills the family's tables with UDP flows that were last seen at a time.
func refill(b *testing.B, f *family, lastSeen func() uint64) {
	b.Helper()
	if lastSeen == nil {
		return
	}
	var err error
	if f.is6 {
		value := bpf.MasqMappingV6{}
		value.Flow.LastSeen, value.Flow.State = lastSeen(), uint8(bpf.MasqFlowStateFLOW_UDP)
		err = fillMaps(f, value, bpf.MasqReverseV6{}, func(n uint32) (inside, outside bpf.MasqTupleV6) {
			remote, port := [4]uint32{0: be32(n % remotes)}, be16(uint16(n/remotes))
			inside = bpf.MasqTupleV6{Saddr: [4]uint32{1}, Daddr: remote, Sport: port, Dport: be16(53), Proto: unix.IPPROTO_UDP}
			outside = bpf.MasqTupleV6{Saddr: remote, Sport: be16(53), Dport: port, Proto: unix.IPPROTO_UDP}
			return inside, outside
		})
	} else {
		value := bpf.MasqMappingV4{}
		value.Flow.LastSeen, value.Flow.State = lastSeen(), uint8(bpf.MasqFlowStateFLOW_UDP)
		err = fillMaps(f, value, bpf.MasqReverseV4{}, func(n uint32) (inside, outside bpf.MasqTupleV4) {
			remote, port := be32(n%remotes), be16(uint16(n/remotes))
			inside = bpf.MasqTupleV4{Saddr: 1, Daddr: remote, Sport: port, Dport: be16(53), Proto: unix.IPPROTO_UDP}
			outside = bpf.MasqTupleV4{Saddr: remote, Sport: be16(53), Dport: port, Proto: unix.IPPROTO_UDP}
			return inside, outside
		})
	}
	if err != nil {
		b.Fatal(err)
	}
}

// fillMaps has the maps of a family hold as many flows as fit.
func fillMaps[K, V, R any](f *family, mapping V, reverse R, tuples func(uint32) (inside, outside K)) error {
	const batch = 1 << 16
	insides, outsides := make([]K, batch), make([]K, batch)
	mappings, reverses := slices.Repeat([]V{mapping}, batch), slices.Repeat([]R{reverse}, batch)
	for first := uint32(0); first < f.flows.MaxEntries(); first += batch {
		count := min(batch, f.flows.MaxEntries()-first)
		for i := range count {
			insides[i], outsides[i] = tuples(first + i)
		}
		if _, err := f.reverse.BatchUpdate(outsides[:count], reverses[:count], nil); err != nil {
			return fmt.Errorf("fill %s: %w", f.reverse, err)
		}
		if _, err := f.flows.BatchUpdate(insides[:count], mappings[:count], nil); err != nil {
			return fmt.Errorf("fill %s: %w", f.flows, err)
		}
	}
	return nil
}

// BenchmarkAsk asks what people and Prometheus ask, with a table full of flows.
func BenchmarkAsk(b *testing.B) {
	for kind, ask := range map[string]func(*Datapath) error{
		"metrics": func(d *Datapath) error {
			_, err := d.Stats()
			return err
		},
		"status": func(d *Datapath) error {
			_, err := d.Status()
			return err
		},
		"list": func(d *Datapath) error { return d.EachTranslation(func(api.Translation) {}) },
	} {
		for _, size := range []int{4096, 262_144, 1_000_000} {
			b.Run(fmt.Sprintf("%s/%d/IPv4", kind, size), func(b *testing.B) {
				d := benchmarkDatapath(b, lab.New(b, lab.Options{Pods: -1, RoutedPods: -1}), size)
				refill(b, d.families[0], monotonic)
				for b.Loop() {
					if err := ask(d); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkSync syncs when nothing has changed, and when all CIDRs have.
func BenchmarkSync(b *testing.B) {
	for _, size := range []int{64, 1000, 10_000} {
		for kind, policies := range map[string][]*prefix.Policy{
			"idle":   {manyCIDRs(size, 0)},
			"reload": {manyCIDRs(size, 1), manyCIDRs(size, 0)},
		} {
			b.Run(fmt.Sprintf("ebpf/%d/%s", size, kind), func(b *testing.B) {
				l := lab.New(b, lab.Options{Pods: -1, RoutedPods: -1})
				d := benchmarkDatapath(b, l, 4096)
				if err := l.Node.Do(func() error { return benchmarkSync(b, d, policies) }); err != nil {
					b.Fatal(err)
				}
			})
		}
	}
}

// benchmarkSync is called in the node's namespace.
func benchmarkSync(b *testing.B, d *Datapath, policies []*prefix.Policy) error {
	tracker, err := route.NewTracker(route.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	defer tracker.Close()
	if err := d.Sync(b.Context(), policies[len(policies)-1], tracker.Snapshot()); err != nil {
		return err
	}
	for i := 0; b.Loop(); i++ {
		if err := d.Sync(b.Context(), policies[i%len(policies)], tracker.Snapshot()); err != nil {
			return err
		}
	}
	return nil
}

func manyCIDRs(n, turn int) *prefix.Policy {
	var lists prefix.Lists
	for i := range n {
		i += turn << 15
		lists.NonMasquerade = append(lists.NonMasquerade, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24))
	}
	return prefix.New(lists)
}
