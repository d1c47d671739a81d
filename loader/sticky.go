// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"sync"
	"time"

	"github.com/cilium/ebpf"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/prefix"
)

// settleTime is longer than the datapath needs from the time that it looks at a
// packet's destination until the flow that the packet opens is in the map.
const settleTime = uint64(time.Second)

// sticky tells the datapath whether a family has flows that packets have to be
// looked up for which are left alone otherwise: see struct sticky in masq.h. What
// is told is always safe, whenever the agent dies: that there may be such flows
// is said before they can come into being, and that there are none after a sweep
// has looked at all flows and found none.
type sticky struct {
	index uint32 // of the family in both maps
	hints *ebpf.Map
	moved *ebpf.Map

	mu      sync.Mutex     // Sync against sweeps
	policy  *prefix.Policy // which destinations are exempt
	settled uint64         // when the last change of the CIDRs was in place; 0: it is not yet
	expects bool           // the datapath may have been told to expect flows to exempt destinations
}

func newSticky(m *maps, f bpf.MasqFamily) *sticky {
	return &sticky{index: uint32(f), hints: m.Sticky, moved: m.Moved, expects: true}
}

// unsettle comes before a change of the CIDRs: flows that are open towards what
// becomes exempt stay translated.
func (s *sticky) unsettle(policy *prefix.Policy) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.policy, s.settled, s.expects = policy, 0, true
	return s.change(func(hint *bpf.MasqSticky) { hint.Exempt = monotonic() })
}

// settle comes after a change, when no program opens flows by other rules any
// more. It reports whether there was one.
func (s *sticky) settle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.settled != 0 || s.policy == nil {
		return false
	}
	s.settled = monotonic()
	return true
}

func (s *sticky) change(do func(*bpf.MasqSticky)) error {
	var hint bpf.MasqSticky
	if err := s.hints.Lookup(s.index, &hint); err != nil {
		return fmt.Errorf("read hints: %w", err)
	}
	before := hint
	if do(&hint); hint == before {
		return nil
	}
	if err := s.hints.Put(s.index, hint); err != nil {
		return fmt.Errorf("write hints: %w", err)
	}
	return nil
}

// search is a look at all flows for those that packets have to be looked up for.
type search struct {
	began         uint64
	policy        *prefix.Policy // nil: it does not matter
	settled       uint64
	exempt, moved bool // found
}

// begin begins a search, before the first flow is read.
func (s *sticky) begin() *search {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := &search{began: monotonic(), settled: s.settled}
	if s.expects {
		l.policy = s.policy
	}
	return l
}

// add looks at a flow.
func (l *search) add(e *flow, is6 bool) {
	if !l.moved {
		l.moved = e.isMoved(is6)
	}
	if !l.exempt && l.policy != nil {
		l.exempt = keeps(l.policy, e.dst(is6))
	}
}

// conclude tells the datapath what it need not expect any more. It reports
// whether another search soon would tell more.
func (s *sticky) conclude(l *search) (again bool, err error) {
	var lastMove uint64
	if err := s.moved.Lookup(s.index, &lastMove); err != nil {
		return false, fmt.Errorf("read time of last move: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	since := l.began - settleTime
	err = s.change(func(hint *bpf.MasqSticky) {
		if s.expects && !l.exempt && s.settled == l.settled && l.settled != 0 {
			again = l.settled > since
			s.expects = again
		}
		if !s.expects {
			hint.Exempt = 0
		}
		if lastMove > hint.Moved && !l.moved {
			hint.Moved = since
			again = again || lastMove > since
		}
	})
	return again, err
}
