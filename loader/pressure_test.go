// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"testing"
	"time"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/lab"
)

// A table that is full of questions and answers makes room for a connection,
// and those that were open live on.
func TestUnassuredFlowsMakeRoom(t *testing.T) {
	t.Parallel()
	opts := testOptions(t)
	opts.NATTableSize = 20
	n := newNode(t, lab.Options{}, opts)
	server := n.serve("tcp", n.Remote.V4)
	open := []*lab.Conn{n.dial("tcp", server), n.dial("tcp", server)}
	questions := n.serve("udp", n.Remote.V4)
	ended := func() uint64 { _, _, early := n.d.sweeper.work(); return early }
	for ended() == 0 && len(n.translations()) < opts.NATTableSize {
		n.dial("udp", questions)
	}
	open = append(open, n.dial("tcp", server)) // its second SYN, if its first one found no room
	for _, c := range open {
		n.goesOn(c)
	}
	if ended() == 0 {
		t.Error("nothing made room")
	}
	if left := len(n.translations()); left > opts.NATTableSize {
		t.Errorf("%d translations in a table for %d", left, opts.NATTableSize)
	}
}

// Who is not crammed keeps what he has, and who is loses the longest idle first.
func TestWhoMakesRoom(t *testing.T) {
	var candidates unassured
	now := uint64(1000 * time.Second)
	for idle, flows := range map[int]int{0: 10, 3: 4, 30: 2, 400: 1} {
		e := flow{state: bpf.MasqFlowStateFLOW_UDP, lastSeen: now - uint64(idle)*uint64(time.Second)}
		for range flows {
			candidates.add(&e, now)
		}
		e.state, e.replied = bpf.MasqFlowStateFLOW_TCP_ESTABLISHED, true
		candidates.add(&e, now)
	}
	for wanted, want := range map[int]int{1: oldest, 2: 30, 3: 30, 4: 3, 7: 3, 8: 0, 100: 0} {
		if got := candidates.from(wanted); got != want {
			t.Errorf("%d flows: those idle for %d s, want %d", wanted, got, want)
		}
	}
	for state := range bpf.MasqFlowStateFLOW_STATE_COUNT {
		if (&flow{state: state}).isAssured() {
			t.Errorf("a flow without answer in state %d is assured", state)
		}
	}
}

// A flow that somebody deletes with bpftool leaves its outside tuple behind.
func TestOrphansAreGivenBack(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{}, testOptions(t))
	n.d.sweeper.stop() // the sweeps of this test are its own
	kept := n.dial("udp", n.serve("udp", n.Remote.V4))
	n.dial("udp", n.serve("udp", n.Remote.V4))
	n.dial("udp", n.serve("udp", n.Remote.V6))
	n.dial("udp", n.serve("udp", n.Remote.V6))
	tuples := func() (count int) {
		for _, f := range n.d.families {
			var key, value []byte
			for entries := f.reverse.Iterate(); entries.Next(&key, &value); {
				count++
			}
		}
		return count
	}
	for _, f := range n.d.families {
		deleted := false
		err := f.eachFlow(func(e *flow) {
			key := any(&e.key4)
			if f.is6 {
				key = &e.key6
			}
			if port := be16(e.remote(f.is6).port); !deleted && port != kept.Remote.Port() {
				deleted = f.flows.Delete(key) == nil
			}
		})
		if err != nil || !deleted {
			t.Fatalf("%s: no flow was deleted: %v", f, err)
		}
	}
	for sweep, want := range []int{4, 2, 2} {
		n.d.sweeper.searched = time.Time{}
		if _, err := n.d.sweeper.sweep(); err != nil {
			t.Fatal(err)
		}
		if got := tuples(); got != want {
			t.Errorf("%d outside tuples after sweep %d, want %d", got, sweep, want)
		}
	}
	n.goesOn(kept)
}
