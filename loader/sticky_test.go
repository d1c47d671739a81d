// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"testing"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/lab"
)

// hints are what the datapath is told of a family's flows.
func (n *node) hints(f *family) (hint bpf.MasqSticky, moved uint64) {
	n.t.Helper()
	if err := f.sticky.hints.Lookup(f.sticky.index, &hint); err != nil {
		n.t.Fatal(err)
	}
	if err := f.sticky.moved.Lookup(f.sticky.index, &moved); err != nil {
		n.t.Fatal(err)
	}
	return hint, moved
}

// expects reports whether the datapath looks packets to exempt destinations up
// among the flows.
func (n *node) expects(f *family) bool {
	hint, _ := n.hints(f)
	return hint.Exempt != 0
}

// Packets to exempt destinations are looked up from a change of the CIDRs on,
// until no flow goes there: by an agent that saw the change or the next one.
func TestFlowsToWhatBecomesExemptAreExpected(t *testing.T) {
	t.Parallel()
	opts := testOptions(t)
	n := newNode(t, lab.Options{}, opts)
	for i := range n.d.families {
		f := n.d.families[i]
		n.await("the first search", func() bool { return !n.expects(f) })
		conn := n.dial("tcp", n.serve("tcp", n.Remote.Addr(f.is6)))
		n.policy = testPolicy([]string{"8.0.0.0/8", "2001:4860::/32"}[i])
		n.sync()
		if !n.expects(f) {
			t.Fatalf("%s: not expected after the change", f)
		}
		n.goesOn(conn)

		n.stop() // it may die at any time
		n.start(opts)
		f = n.d.families[i]
		n.searched(f)
		if !n.expects(f) {
			t.Fatalf("%s: not expected though there is one", f)
		}
		n.goesOn(conn)
		if _, err := f.end(bpf.MasqSweepModeSWEEP_ALL, func(*flow) bool { return true }); err != nil {
			t.Fatal(err)
		}
		n.searched(f)
		if n.expects(f) {
			t.Errorf("%s: expected though there is none", f)
		}
	}
}

// searched has a search begin and end that is late enough to be believed.
func (n *node) searched(f *family) {
	n.t.Helper()
	n.await("a search", func() bool {
		look := f.sticky.begin()
		if err := f.eachFlow(func(e *flow) { look.add(e, f.is6) }); err != nil {
			n.t.Fatal(err)
		}
		again, err := f.sticky.conclude(look)
		if err != nil {
			n.t.Fatal(err)
		}
		return !again && look.settled != 0
	})
}

// A search is believed if it began late enough after the last change, and none
// came since.
func TestSearchesThatAreBelieved(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{}, testOptions4(t))
	s := n.d.families[0].sticky
	change := func() {
		t.Helper()
		if err := s.unsettle(n.policy); err != nil {
			t.Fatal(err)
		}
	}
	change()
	successor := newSticky(n.d.maps, bpf.MasqFamilyFAMILY_V4)
	if _, err := successor.conclude(successor.begin()); err != nil || !n.expects(n.d.families[0]) {
		t.Errorf("of an agent that does not know yet what is exempt: believed; %v", err)
	}
	for _, c := range []struct {
		name     string
		after    uint64 // the last change, in nanoseconds
		meantime func()
		believed bool
	}{
		{"too early", settleTime - 1, func() {}, false},
		{"during a change", settleTime, change, false},
		{"before a change", settleTime, func() { change(); s.settle() }, false},
		{"late", settleTime, func() {}, true},
	} {
		change()
		s.settle()
		look := s.begin()
		look.began = look.settled + c.after
		c.meantime()
		if _, err := s.conclude(look); err != nil {
			t.Fatal(err)
		}
		if got := !n.expects(n.d.families[0]); got != c.believed {
			t.Errorf("%s: believed %t, want %t", c.name, got, c.believed)
		}
	}
}

// A flow of the node's own that was moved is expected until it has ended.
func TestMovedFlowsAreExpected(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{}, testOptions4(t))
	f := n.d.families[0]
	expects := func() bool {
		hint, moved := n.hints(f)
		return moved > hint.Moved
	}
	if expects() {
		t.Error("expected from the start")
	}
	key := bpf.MasqTupleV4{Saddr: addr4(n.Addresses.Node.V4), Daddr: addr4(n.Remote.V4), Sport: be16(1000), Dport: be16(80), Proto: 6}
	mapping := bpf.MasqMappingV4{NatAddr: key.Saddr}
	mapping.Flow.NatPort, mapping.Flow.LastSeen = be16(1001), monotonic()
	if err := f.flows.Put(key, mapping); err != nil {
		t.Fatal(err)
	}
	if err := f.sticky.moved.Put(f.sticky.index, monotonic()); err != nil {
		t.Fatal(err)
	}
	n.searched(f)
	if !expects() {
		t.Error("not expected though there is one")
	}
	if err := f.flows.Delete(key); err != nil {
		t.Fatal(err)
	}
	n.searched(f)
	if expects() {
		t.Error("expected though there is none")
	}
}
