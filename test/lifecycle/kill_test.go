// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"ip-masq-agent/internal/lab"
)

// startUp is one way in which an agent starts, to be killed in it.
type startUp struct {
	name     string
	before   string // the datapath that was there; empty: none
	datapath string
	more     []string // flags
}

func startUps() []startUp {
	all := []startUp{
		{"iptables, first", "", "iptables", nil},
		{"iptables, other rules", "iptables", "iptables", []string{"--invalid=drop", "--to-ports=1024-65535"}},
		{"ebpf, first", "", "ebpf", nil},
		{"ebpf, table of another size", "ebpf", "ebpf", []string{"--nat-table-size=4096"}},
		{"iptables to ebpf", "iptables", "ebpf", nil},
	}
	if long() {
		return append(all, startUp{"ebpf, again", "ebpf", "ebpf", nil})
	}
	return all
}

// An agent may be killed before any of the changes that it makes when it
// starts. Traffic that was served before goes on being served, and the next
// agent finds its way from whatever there is.
func TestKilledWhileStarting(t *testing.T) {
	lab.AgentBinary(t) // built outside of any namespace
	for _, s := range startUps() {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			// Without conntrack, what netfilter translates would end with the rules.
			conntrack := s.before != "" && s.before != s.datapath
			w := &walk{node: newNode(t, lab.Options{Conntrack: conntrack}), startUp: s}
			clean := w.footprint()
			steps := w.record()
			t.Logf("%d changes, %d looked at: %s", len(steps), len(chosen(steps)), summary(steps))
			for _, n := range chosen(steps) {
				w.kill(n)
			}
			w.cleanup()
			if diff := cmp.Diff(clean, w.footprint()); diff != "" {
				t.Errorf("what is left after cleanup (-before +after):\n%s", diff)
			}
		})
	}
}

// walk kills one start-up at one step after the other.
type walk struct {
	*node
	startUp
	whole []string // the pins of a whole start-up
}

// record gives the changes that the start-up makes.
func (w *walk) record() (steps []string) {
	w.t.Helper()
	w.prepare()
	if err := w.trace(func(what string) bool {
		steps = append(steps, what)
		return true
	}); err != nil {
		w.t.Fatal(err)
	}
	w.whole = w.ownPins()
	return steps
}

// prepare brings the node to where the start-up begins.
func (w *walk) prepare() {
	w.t.Helper()
	switch {
	case w.before == "":
		w.cleanup()
	case w.before != w.datapath || len(w.whole) == 0 || w.more != nil:
		w.once(w.before)
	}
}

func (w *walk) trace(step func(string) bool) error {
	args := append(w.flags(w.datapath, w.more...), "--once", "--metrics-bind-address=0")
	return runTraced(w.Node, append([]string{lab.AgentBinary(w.t)}, args...), step)
}

// kill kills the start-up before its n-th change, and lets the next agent come.
func (w *walk) kill(n int) {
	w.t.Helper()
	w.prepare()
	tcp, udp := w.serve("tcp", w.Remote.V4), w.serve("udp", w.Remote2.V4)
	var open []*lab.Conn
	w.forget()
	if w.before != "" {
		open = append(open, w.dial("tcp", tcp), w.dial("udp", udp))
	}
	at, count := "", 0
	if err := w.trace(func(what string) bool {
		at, count = what, count+1
		return count <= n
	}); err != nil {
		w.t.Fatal(err)
	}
	failedBefore := w.t.Failed()
	if w.before != "" {
		w.translates("tcp", tcp)
		w.translates("udp", udp)
		w.noLeak()
	}
	w.once(w.datapath, w.more...)
	w.forget()
	w.translates("tcp", tcp)
	w.translates("udp", udp)
	for _, c := range open {
		w.goesOn(c)
		_ = c.Close()
	}
	w.noLeak()
	w.sane()
	if w.t.Failed() && !failedBefore {
		w.t.Errorf("killed before change %d, %s", n, at)
	}
}

// sane checks what the next agent left.
func (w *walk) sane() {
	w.t.Helper()
	if s := w.status(); s.Datapath != w.datapath || len(s.Warnings) > 1 { // one says that no agent runs
		w.t.Errorf("status %+v", s)
	}
	if got := w.ownPins(); !slices.Equal(got, w.whole) {
		w.t.Errorf("pins %v, want %v", got, w.whole)
	}
	if w.datapath == "ebpf" {
		w.wholePairs()
	}
}

// ownPins are the pins, if there is a pin directory.
func (w *walk) ownPins() []string {
	w.t.Helper()
	if _, err := w.Node.Run(w.t.Context(), "test", "-d", pinPath); err != nil {
		return nil
	}
	return slices.Sorted(slices.Values(w.pins()))
}

// chosen are the steps at which to kill: all in the long form, else one of those
// in a row that are of the same kind.
func chosen(steps []string) []int {
	var at []int
	for first := 0; first < len(steps); {
		end := first + 1
		for end < len(steps) && steps[end] == steps[first] {
			end++
		}
		for i := first; i < end; i++ {
			if long() || i == first+(end-first)/2 {
				at = append(at, i)
			}
		}
		first = end
	}
	return at
}

// summary has each row of equal steps once.
func summary(steps []string) string {
	var rows []string
	for i := 0; i < len(steps); {
		end := i
		for end < len(steps) && steps[end] == steps[i] {
			end++
		}
		rows = append(rows, fmt.Sprintf("%d %s", end-i, steps[i]))
		i = end
	}
	return strings.Join(rows, ", ")
}
