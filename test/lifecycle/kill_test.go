// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"fmt"
	"net/netip"
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
	wasFast  bool   // with the fast path in use
	datapath string
	more     []string // flags
	config   string   // that the start-up finds changed; empty: it is not
	idle     bool     // without open connections
	clsact   bool     // without TCX, as before Linux 6.6
}

const usualConfig, otherConfig = "nonMasqueradeCIDRs: [10.0.0.0/8]", "nonMasqueradeCIDRs: [10.0.0.0/9, 10.64.0.0/10, 192.168.0.0/16]"

func startUps() []startUp {
	size, fast := []string{"--nat-table-size=4096"}, []string{"--fast-path"}
	all := []startUp{
		{name: "iptables, first", datapath: "iptables"},
		{name: "iptables, other rules", before: "iptables", datapath: "iptables", more: []string{"--invalid=drop", "--to-ports=1024-65535"}, config: otherConfig},
		{name: "ebpf, first", datapath: "ebpf"},
		{name: "ebpf, first, on clsact", datapath: "ebpf", clsact: true},
		{name: "ebpf, table of another size", before: "ebpf", datapath: "ebpf", more: size},
		{name: "ebpf, table of another size, on clsact", before: "ebpf", datapath: "ebpf", more: size, clsact: true},
		{name: "ebpf, other lists", before: "ebpf", datapath: "ebpf", config: otherConfig},
		{name: "iptables to ebpf", before: "iptables", datapath: "ebpf"},
		{name: "ebpf to iptables", before: "ebpf", datapath: "iptables"},
		{name: "ebpf to iptables, nothing open", before: "ebpf", datapath: "iptables", idle: true},
		{name: "ebpf, fast path", before: "ebpf", wasFast: true, datapath: "ebpf", more: fast},
		{name: "ebpf, fast path ends", before: "ebpf", wasFast: true, datapath: "ebpf"},
	}
	if !long() {
		return all
	}
	return append(all,
		startUp{name: "ebpf, again", before: "ebpf", datapath: "ebpf"},
		startUp{name: "ebpf, again, on clsact", before: "ebpf", datapath: "ebpf", clsact: true},
		startUp{name: "iptables to ebpf, on clsact", before: "iptables", datapath: "ebpf", clsact: true},
		startUp{name: "ebpf to iptables, on clsact", before: "ebpf", datapath: "iptables", clsact: true},
		startUp{name: "ebpf to iptables, on clsact, nothing open", before: "ebpf", datapath: "iptables", clsact: true, idle: true},
	)
}

// An agent may be killed before any of the changes that it makes when it
// starts. Traffic that was served before goes on being served, and the next
// agent finds its way from whatever there is.
func TestKilledWhileStarting(t *testing.T) {
	lab.AgentBinary(t) // built outside of any namespace
	for _, s := range startUps() {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			w := &walk{node: newNode(t, lab.Options{}), startUp: s}
			clean := w.footprint()
			steps := w.record()
			t.Logf("%d changes, %d looked at: %s", len(steps), len(chosen(steps)), summary(steps))
			for _, c := range chosen(steps) {
				w.kill(c)
			}
			if len(w.missed) > 1 { // the sweeper may or may not come to its own before the end
				t.Errorf("there was no %v", w.missed)
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
	whole  []string // the pins of a whole start-up
	missed []change // that did not happen this time

	tcp, udp, exempt netip.AddrPort
}

// listen has the remotes serve.
func (w *walk) listen() {
	w.t.Helper()
	w.tcp, w.udp, w.exempt = w.serve("tcp", w.Remote.V4), w.serve("udp", w.Remote2.V4), w.serve("udp", w.Inside.V4)
}

// connect opens the connections that the start-up finds.
func (w *walk) connect() []*lab.Conn {
	w.t.Helper()
	if w.before == "" || w.idle {
		return nil
	}
	return []*lab.Conn{w.dial("tcp", w.tcp), w.dial("udp", w.udp)}
}

func closeAll(open []*lab.Conn) {
	for _, c := range open {
		_ = c.Close()
	}
}

// record gives the changes that the start-up makes.
func (w *walk) record() (steps []string) {
	w.t.Helper()
	w.listen()
	w.prepare()
	defer closeAll(w.connect())
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
	case w.before != w.datapath:
		w.cleanup()
		w.write(usualConfig)
		w.once(w.before)
	case w.wasFast:
		w.write(usualConfig)
		w.goFast()
	case len(w.whole) == 0 || w.more != nil || w.startUp.config != "":
		w.write(usualConfig)
		w.once(w.before)
	}
	if w.startUp.config != "" {
		w.write(w.startUp.config)
	}
}

// goFast leaves what an agent does that had packets take the fast path.
func (w *walk) goFast() {
	w.t.Helper()
	a := lab.StartAgent(w.t, w.Node, w.flags(w.before, "--fast-path")...)
	c := w.dial("tcp", w.tcp)
	defer c.Close()
	w.within(promptly, "a program at the pod's link", func() bool {
		w.goesOn(c)
		return len(w.fastPins()) > 0
	})
	a.Kill()
}

func (w *walk) trace(step func(string) bool) error {
	return w.runTraced(w.datapath, w.more, step)
}

func (w *walk) runTraced(datapath string, more []string, step func(string) bool) error {
	args := append(w.flags(datapath, more...), "--once", "--metrics-bind-address=0")
	return runTraced(w.Node, append([]string{lab.AgentBinary(w.t)}, args...), w.clsact, step)
}

// once has an agent start and end that nobody kills.
func (w *walk) once(datapath string, more ...string) {
	w.t.Helper()
	if !w.clsact {
		w.node.once(datapath, more...)
		return
	}
	if err := w.runTraced(datapath, more, func(string) bool { return true }); err != nil {
		w.t.Fatal(err)
	}
}

// kill kills the start-up before a change, and lets the next agent come.
func (w *walk) kill(before change) {
	w.t.Helper()
	failedBefore := w.t.Failed()
	defer func() {
		if w.t.Failed() && !failedBefore {
			w.t.Logf("that was after a kill before %s", before)
		}
	}()
	w.prepare()
	w.forget()
	open := w.connect()
	defer closeAll(open)
	left := before.nth
	if err := w.trace(func(what string) bool {
		if what == before.what {
			left--
		}
		return left > 0
	}); err != nil {
		w.t.Fatal(err)
	}
	if left > 0 {
		w.missed = append(w.missed, before)
	}
	if w.before != "" {
		w.served()
	}
	w.once(w.datapath, w.more...)
	w.forget()
	w.served()
	for _, c := range open {
		w.goesOn(c)
	}
	w.noLeak()
	w.sane()
}

// served checks that new connections get what they should.
func (w *walk) served() {
	w.t.Helper()
	w.translates("tcp", w.tcp)
	w.translates("udp", w.udp)
	w.keeps(w.exempt)
	w.noLeak()
}

// keeps checks that an exempt destination sees the pod's address.
func (w *walk) keeps(exempt netip.AddrPort) {
	w.t.Helper()
	conn := w.dial("udp", exempt)
	defer conn.Close()
	if conn.Seen.Addr() != w.Pods[0].V4 {
		w.t.Errorf("%s sees %s", exempt, conn.Seen)
	}
}

// sane checks what the next agent left.
func (w *walk) sane() {
	w.t.Helper()
	if s := w.status(); s.Datapath != w.datapath || len(s.Warnings) > 1 { // one says that no agent runs
		w.t.Errorf("status %+v", s)
	}
	if w.datapath != "ebpf" {
		return // the pins stay as long as flows drain
	}
	attach := "tcx"
	if w.clsact {
		attach = "tc"
	}
	if interfaces := w.status().Interfaces; len(interfaces) != 1 || interfaces[0].Attach != attach {
		w.t.Errorf("interfaces %+v, want them attached by %s", interfaces, attach)
	}
	if got := w.ownPins(); !slices.Equal(got, w.whole) {
		w.t.Errorf("pins %v, want %v", got, w.whole)
	}
	w.wholePairs()
}

// ownPins are the pins, if there is a pin directory.
func (w *walk) ownPins() []string {
	w.t.Helper()
	if _, err := w.Node.Run(w.t.Context(), "test", "-d", pinPath); err != nil {
		return nil
	}
	return slices.Sorted(slices.Values(w.pins()))
}

// change is one of those that a start-up makes, the nth of its kind, from 1 on:
// how many there are before it depends on the flows that are to be copied.
type change struct {
	what string
	nth  int
}

func (c change) String() string { return fmt.Sprintf("%s number %d", c.what, c.nth) }

// chosen are the changes at which to kill: all in the long form, else one of
// those in a row that are of the same kind.
func chosen(steps []string) (all []change) {
	count := make(map[string]int)
	for first := 0; first < len(steps); {
		what, end := steps[first], first+1
		for end < len(steps) && steps[end] == what {
			end++
		}
		for i := first; i < end; i++ {
			count[what]++
			if long() || i == first+(end-first)/2 {
				all = append(all, change{what, count[what]})
			}
		}
		first = end
	}
	return all
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
