// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/lab"
)

const (
	remotes    = 1024
	frameBytes = 60

	// chunk is how many packets a system call makes at least: each ends with a
	// wait of many milliseconds for the kernel to clean up.
	chunk = 2048

	arrivalTimeout = time.Second
)

// generator makes packets and counts what arrives. There is one for all labs:
// their addresses are the same, and only one measures at a time.
type generator struct {
	generatorObjects
}

func newGenerator(tb testing.TB) *generator {
	tb.Helper()
	if err := rlimit.RemoveMemlock(); err != nil {
		tb.Fatal(err)
	}
	g := new(generator)
	if err := loadGeneratorObjects(&g.generatorObjects, nil); err != nil {
		tb.Fatalf("load generator: %+v", err)
	}
	tb.Cleanup(func() {
		if err := g.Close(); err != nil {
			tb.Error(err)
		}
	})
	return g
}

// countAt has packets of the generator end where they arrive at a link, before
// or behind the programs that are there.
func (g *generator) countAt(tb testing.TB, at *lab.Link, place link.Anchor) {
	tb.Helper()
	var attached link.Link
	if err := at.NS.Do(func() (err error) {
		attached, err = link.AttachTCX(link.TCXOptions{
			Interface: at.Index,
			Program:   g.Count,
			Attach:    ebpf.AttachTCXIngress,
			Anchor:    place,
		})
		return err
	}); err != nil {
		tb.Fatalf("attach counter: %v", err)
	}
	tb.Cleanup(func() {
		if err := attached.Close(); err != nil {
			tb.Error(err)
		}
	})
}

// route is the way that packets take across a node.
type route struct {
	at         *lab.Link // where they begin, as if they had arrived
	inside     netip.Addr
	translated netip.Addr // what inside becomes
	remote     netip.Addr // the first of the remotes
	remotes    uint32     // how many; 0: remotes
	reply      bool       // from the remotes
}

// aim says what the next packets are. They go on with the numbers of the
// earlier ones, so that with many flows each packet is a new one.
func (g *generator) aim(r route, flows uint32) error {
	var job generatorTraffic
	if err := g.Job.Get(&job); err != nil {
		return fmt.Errorf("read job: %w", err)
	}
	job.Flows, job.Remotes = flows, cmp.Or(r.remotes, remotes)
	job.Inside, job.Translated, job.Remote = number(r.inside), number(r.translated), number(r.remote)
	job.Mac, job.Reply = r.at.MAC, 0
	if r.reply {
		job.Reply = 1
	}
	if err := g.Job.Set(job); err != nil {
		return fmt.Errorf("write job: %w", err)
	}
	return nil
}

func number(a netip.Addr) uint32 { return binary.BigEndian.Uint32(a.AsSlice()) }

// burst is what came of packets that were made one after another.
type burst struct {
	sent    uint64
	arrived generatorArrivals
	took    time.Duration // of one processor, so that other processes do not count
}

// rate is in packets per second.
func (b burst) rate() float64 { return float64(b.delivered()) / b.took.Seconds() }

func (b burst) delivered() uint64 {
	return b.arrived.Kept + b.arrived.Translated + b.arrived.Other
}

// expect says how many more packets fit into a time.
func (b burst) expect(within time.Duration) uint64 {
	if b.took == 0 {
		return 0
	}
	return uint64(float64(b.sent) * within.Seconds() / b.took.Seconds())
}

// send makes packets at a link, until there are enough or time is up, and waits
// until all have arrived, or no more will.
func (g *generator) send(at *lab.Link, packets uint64, atMost time.Duration) (burst, error) {
	var b burst
	if err := g.Arrived.Set(b.arrived); err != nil {
		return b, fmt.Errorf("reset counters: %w", err)
	}
	if err := at.NS.Do(func() error { return g.run(&b, at, packets, atMost) }); err != nil {
		return b, fmt.Errorf("generate: %w", err)
	}
	for deadline := time.Now().Add(arrivalTimeout); ; time.Sleep(time.Millisecond) {
		if err := g.Arrived.Get(&b.arrived); err != nil {
			return b, fmt.Errorf("read counters: %w", err)
		}
		if b.delivered() >= b.sent || time.Now().After(deadline) {
			return b, nil
		}
	}
}

// run wants a thread of its own. The kernel takes each packet through the node
// and to the counter before it makes many more, all on that thread's time.
func (g *generator) run(b *burst, at *lab.Link, packets uint64, atMost time.Duration) error {
	// struct xdp_md of linux/bpf.h
	context := struct{ Data, DataEnd, DataMeta, IngressIndex, Queue, EgressIndex uint32 }{
		DataEnd: frameBytes, IngressIndex: uint32(at.Index),
	}
	before, err := threadTime()
	for err == nil && b.sent < packets && b.took < atMost {
		n := min(packets-b.sent, max(chunk, b.expect(atMost-b.took)))
		if _, err := g.Generate.Run(&ebpf.RunOptions{
			Data:    make([]byte, frameBytes),
			Context: context,
			Repeat:  uint32(n),
			Flags:   unix.BPF_F_TEST_XDP_LIVE_FRAMES,
		}); err != nil {
			return err
		}
		b.sent += n
		var now time.Duration
		now, err = threadTime()
		b.took = now - before
	}
	return err
}

// threadTime is how long the calling thread has had a processor.
func threadTime() (time.Duration, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0, fmt.Errorf("read clock: %w", err)
	}
	return time.Duration(t.Nano()), nil
}

// settle sends packets until all arrive: the first ones wait for neighbours to
// answer, and few of them can.
func (g *generator) settle(at *lab.Link) error {
	const enough = 32
	for range 20 {
		b, err := g.send(at, enough, time.Second)
		if err != nil {
			return err
		}
		if b.delivered() == enough {
			return nil
		}
	}
	return fmt.Errorf("packets from %s do not arrive", at.Name)
}
