// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	gomaps "maps"
	"net/netip"
	"sync"
	"time"

	"github.com/cilium/ebpf"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/route"
)

const (
	// sweepInterval is how often dead flows are taken away; sooner under
	// pressure.
	sweepInterval = 10 * time.Second
	// pressureInterval is how often where a table is nearly full.
	pressureInterval = time.Second
	// pressure is how full a table is when sweeps come sooner.
	pressure = 0.9
	// orphanInterval is how often outside tuples without a flow are looked for.
	orphanInterval = time.Minute
	// sweepGrace is what a flow is given beyond its timeout before a sweep
	// calls it a candidate: last_seen is a second old at most, and sweeps wait
	// a second longer than lookups.
	sweepGrace = 2 * time.Second
)

// sweeper takes away what has ended, in a goroutine of its own, and counts what
// is left. The datapath is right without it: it only gives memory back.
type sweeper struct {
	families []*family
	timeouts *ebpf.Map
	counters counters
	log      *slog.Logger
	stop     func()
	wanted   chan struct{}
	searched time.Time // when orphans were looked for

	mu    sync.Mutex
	took  time.Duration
	swept uint64  // flows ended by all sweeps
	early uint64  // of these, flows that made room
	last  *census // nil: no sweep succeeded yet
}

func startSweeper(families []*family, timeouts *ebpf.Map, counters counters, log *slog.Logger) *sweeper {
	ctx, cancel := context.WithCancel(context.Background())
	s := &sweeper{families: families, timeouts: timeouts, counters: counters, log: log, wanted: make(chan struct{}, 1)}
	done := make(chan struct{})
	s.stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	go func() {
		defer close(done)
		s.run(ctx)
	}()
	return s
}

// soon has the next sweep come now, if the last one was not a moment ago.
func (s *sweeper) soon() { deliver(s.wanted) }

// run sweeps at once, since who asks how full the table is should not have to
// count it, and then again and again.
func (s *sweeper) run(ctx context.Context) {
	interval := time.Duration(0)
	fault := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(interval):
		case <-s.wanted:
		}
		again, err := s.sweep()
		if err != nil && err.Error() != fault {
			s.log.Error("sweep failed, trying again", "error", err)
		}
		fault = ""
		if err != nil {
			fault = err.Error()
		}
		if !sleep(ctx, pressureInterval) {
			return
		}
		interval = sweepInterval - pressureInterval
		if again {
			interval = 0
		}
	}
}

// sleep reports whether ctx lasted.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// work is how long the last sweep took, and how many flows all of them ended,
// and how many of these before their time.
func (s *sweeper) work() (took time.Duration, swept, early uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.took, s.swept, s.early
}

// sweep ends the flows that are past their time. It reports whether there will be
// something to do soon: a table is nearly full, or what is left leaves open what
// the datapath has to expect.
func (s *sweeper) sweep() (again bool, err error) {
	begin := time.Now()
	timeouts, err := readTimeouts(s.timeouts)
	if err != nil {
		return false, err
	}
	var found census
	crowds, swept, early := make(crowdCounter), 0, 0
	orphans := begin.Sub(s.searched) >= orphanInterval
	for _, f := range s.families {
		if found.opened[f.number()], err = s.counters.opened(f.number()); err != nil {
			return false, fmt.Errorf("%s: %w", f, err)
		}
		look := f.sticky.begin()
		flows, ended, room, err := f.sweepFlows(timeouts, crowds, look)
		if err == nil && orphans {
			err = s.sweepOrphans(f)
		}
		if err != nil {
			return false, fmt.Errorf("%s: %w", f, err)
		}
		unclear, err := f.sticky.conclude(look)
		if err != nil {
			return false, fmt.Errorf("%s: %w", f, err)
		}
		again = again || unclear || float64(flows) > pressure*float64(f.flows.MaxEntries())
		found.flows[f.number()] = flows - ended - room
		swept, early = swept+ended+room, early+room
	}
	if orphans {
		s.searched = begin
	}
	found.crowds = crowds.biggest()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.took, s.last = time.Since(begin), &found
	s.swept += uint64(swept)
	s.early += uint64(early)
	return again, nil
}

// sweepFlows ends the flows of a family that are past their time and, where the
// table is nearly full, those that nobody would miss. It says how many flows
// there were, how many were past their time and how many made room, and counts
// those that stay by their remotes. All of them are looked at.
func (f *family) sweepFlows(timeouts []time.Duration, crowds crowdCounter, look *search) (flows, ended, room int, err error) {
	var candidates unassured
	now := monotonic()
	ended, err = f.end(bpf.MasqSweepModeSWEEP_EXPIRED, func(e *flow) bool {
		flows++
		look.add(e, f.is6)
		if int64(now)-int64(e.lastSeen) >= int64(timeouts[e.state]+sweepGrace) {
			return true
		}
		candidates.add(e, now)
		crowds.add(e.remote(f.is6))
		return false
	})
	if err != nil {
		return flows, ended, 0, err
	}
	room, err = f.makeRoom(flows-ended, &candidates)
	return flows, ended, room, err
}

// sweepOrphans gives back outside tuples that have no flow.
func (s *sweeper) sweepOrphans(f *family) error {
	n, err := f.endOrphans()
	if n > 0 {
		s.log.Warn("gave back outside tuples that had no flow", "family", f.String(), "tuples", n)
	}
	return err
}

func readTimeouts(m *ebpf.Map) ([]time.Duration, error) {
	timeouts := make([]time.Duration, bpf.MasqFlowStateFLOW_STATE_COUNT)
	for state := range timeouts {
		var seconds uint32
		if err := m.Lookup(uint32(state), &seconds); err != nil {
			return nil, fmt.Errorf("read timeouts: %w", err)
		}
		timeouts[state] = time.Duration(seconds) * time.Second
	}
	return timeouts, nil
}

// end ends the flows that choose picks, those of them that mode still fits. The
// datapath itself does it, entry by entry under the flow's lock, so that no flow
// dies that a packet has just used.
func (f *family) end(mode bpf.MasqSweepMode, choose func(*flow) bool) (ended int, err error) {
	request := newSweepRequest(mode)
	var runErr error
	run := func() {
		if runErr == nil && request.head.Count > 0 {
			var n int
			n, runErr = request.run(f.sweep)
			ended += n
		}
	}
	err = f.eachFlow(func(e *flow) {
		if !choose(e) {
			return
		}
		request.add(e, f.is6)
		if request.full() {
			run()
		}
	})
	if err != nil {
		return ended, err
	}
	run()
	return ended, runErr
}

// sweepRequest is the data that a sweep program is run on.
type sweepRequest struct {
	head bpf.MasqSweepRequest
	data []byte // room for the head, then tuples
}

func newSweepRequest(mode bpf.MasqSweepMode) *sweepRequest {
	r := &sweepRequest{head: bpf.MasqSweepRequest{Mode: uint16(mode)}}
	r.data = make([]byte, binary.Size(r.head), binary.Size(r.head)+int(bpf.MasqLimitLIMIT_SWEEP)*binary.Size(bpf.MasqTupleV6{}))
	return r
}

func (r *sweepRequest) full() bool { return r.head.Count == uint32(bpf.MasqLimitLIMIT_SWEEP) }

// add writes out what encoding/binary would: that takes as long as the kernel
// takes to end a flow.
func (r *sweepRequest) add(e *flow, is6 bool) {
	if is6 {
		k := &e.key6
		r.data = appendWords(r.data, k.Saddr[:]...)
		r.data = appendWords(r.data, k.Daddr[:]...)
		r.data = appendRest(r.data, k.Sport, k.Dport, k.Proto)
	} else {
		k := &e.key4
		r.data = appendWords(r.data, k.Saddr, k.Daddr)
		r.data = appendRest(r.data, k.Sport, k.Dport, k.Proto)
	}
	r.head.Count++
}

func appendWords(data []byte, words ...uint32) []byte {
	for _, word := range words {
		data = binary.NativeEndian.AppendUint32(data, word)
	}
	return data
}

// appendRest appends the end of a tuple: ports, protocol and padding.
func appendRest(data []byte, sport, dport uint16, proto uint8) []byte {
	data = binary.NativeEndian.AppendUint16(data, sport)
	data = binary.NativeEndian.AppendUint16(data, dport)
	return append(data, proto, 0, 0, 0)
}

// run runs the program and empties the request.
func (r *sweepRequest) run(program *ebpf.Program) (ended int, err error) {
	size, err := binary.Encode(r.data, binary.NativeEndian, &r.head)
	if err != nil {
		return 0, fmt.Errorf("sweep: %w", err)
	}
	n, err := program.Run(&ebpf.RunOptions{Data: r.data})
	if err != nil {
		return 0, fmt.Errorf("sweep: %w", err)
	}
	r.head.Count, r.data = 0, r.data[:size]
	return int(n), nil
}

// outside is a masquerade address on an uplink.
type outside struct {
	ifindex uint32
	addr    netip.Addr
}

// endStrandedFlows ends the flows whose address left their uplink, or whose
// uplink is gone (nf_nat_masquerade.c): their replies would not reach us.
//
// An address that new flows do not get any more, a deprecated one for example,
// still serves those that have it.
func (d *Datapath) endStrandedFlows(network *route.Snapshot) error {
	usable := make(map[outside]bool)
	for _, u := range network.Uplinks {
		for _, a := range network.Addresses {
			if u.Up {
				usable[outside{uint32(u.Index), a}] = true
			}
		}
	}
	if d.usable != nil && gomaps.Equal(usable, d.usable) {
		return nil
	}
	ended := 0
	for _, f := range d.families {
		n, err := f.end(bpf.MasqSweepModeSWEEP_ALL, func(e *flow) bool {
			return !usable[outside{e.ifindex, e.natAddr(f.is6)}]
		})
		if err != nil {
			return fmt.Errorf("%s: %w", f, err)
		}
		if n > 0 {
			d.log.Info("ended flows whose address is gone", "family", f.String(), "flows", n)
		}
		ended += n
	}
	// What was on its way may have opened a flow behind the scan's back: only
	// a scan that finds nothing is the last.
	if ended == 0 {
		d.usable = usable
	} else {
		d.sweeper.soon() // for a new census
	}
	return nil
}
