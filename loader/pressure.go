// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"time"

	"ip-masq-agent/bpf"
)

const (
	// crammed is how full a table is when flows that nobody would miss make
	// room, as conntrack begins to drop early at 95 % (gc_worker()).
	crammed = 0.95
	// relieved is how full it is afterwards, if there are so many of them.
	relieved = 0.9
	// oldest is the idle time in seconds from which on flows are as good as
	// each other to make room.
	oldest = 256
)

// unassured counts flows that nobody would miss by the seconds that they have
// been idle.
type unassured [oldest + 1]int

// isAssured is what the sweep program asks again: see assured() in sweep.h.
func (e *flow) isAssured() bool {
	switch e.state {
	case bpf.MasqFlowStateFLOW_TCP_SYN_SENT, bpf.MasqFlowStateFLOW_TCP_SYN_RECV, bpf.MasqFlowStateFLOW_TCP_LAST_ACK,
		bpf.MasqFlowStateFLOW_TCP_TIME_WAIT, bpf.MasqFlowStateFLOW_TCP_CLOSE, bpf.MasqFlowStateFLOW_UDP,
		bpf.MasqFlowStateFLOW_ICMP, bpf.MasqFlowStateFLOW_ICMPV6:
		return false
	}
	return e.replied
}

func (e *flow) idleSeconds(now uint64) int {
	idle := time.Duration(int64(now) - int64(e.lastSeen))
	return min(oldest, max(0, int(idle/time.Second)))
}

func (u *unassured) add(e *flow, now uint64) {
	if !e.isAssured() {
		u[e.idleSeconds(now)]++
	}
}

// from is the idle time from which on so many flows have been idle, or 0.
func (u *unassured) from(wanted int) int {
	for idle := oldest; idle > 0; idle-- {
		if wanted -= u[idle]; wanted <= 0 {
			return idle
		}
	}
	return 0
}

// makeRoom ends flows that nobody would miss, the longest idle ones first, until
// a table that was crammed is relieved. An assured flow never dies for a new one.
func (f *family) makeRoom(flows int, candidates *unassured) (ended int, err error) {
	capacity := float64(f.flows.MaxEntries())
	if float64(flows) < crammed*capacity {
		return 0, nil
	}
	wanted := flows - int(relieved*capacity)
	idle, now := candidates.from(wanted), monotonic()
	ended, err = f.end(bpf.MasqSweepModeSWEEP_UNASSURED, func(e *flow) bool {
		if wanted <= 0 || e.isAssured() || e.idleSeconds(now) < idle {
			return false
		}
		wanted--
		return true
	})
	if err != nil {
		return ended, fmt.Errorf("make room: %w", err)
	}
	return ended, nil
}

// endOrphans gives outside tuples back that have no flow, if the last time found
// them without one, too. They come of deletions by hand and of want of memory.
func (f *family) endOrphans() (ended int, err error) {
	request := newSweepRequest(bpf.MasqSweepModeSWEEP_ORPHANS)
	var failed error
	run := func() {
		if failed == nil && request.head.Count > 0 {
			var n int
			n, failed = request.run(f.sweep)
			ended += n
		}
	}
	visit := func(e *flow) {
		request.add(e, f.is6)
		if request.full() {
			run()
		}
	}
	if f.is6 {
		err = scan(f.reverse, func(k *bpf.MasqTupleV6, _ *bpf.MasqReverseV6) { visit(&flow{key6: *k}) })
	} else {
		err = scan(f.reverse, func(k *bpf.MasqTupleV4, _ *bpf.MasqReverseV4) { visit(&flow{key4: *k}) })
	}
	if err != nil {
		return ended, err
	}
	run()
	return ended, failed
}
