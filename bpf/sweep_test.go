// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
)

const (
	sweepExpired   = MasqSweepModeSWEEP_EXPIRED
	sweepAll       = MasqSweepModeSWEEP_ALL
	sweepUnassured = MasqSweepModeSWEEP_UNASSURED
	sweepOrphans   = MasqSweepModeSWEEP_ORPHANS
)

var sweepPrograms = []string{MasqProgSweepV4, MasqProgSweepV6}

// sweep runs a sweep program on the flows of some packets and returns how many
// it says to have ended.
func (d *datapath) sweep(h hosts, mode MasqSweepMode, flows ...packet) int {
	d.Helper()
	var tuples []tuple
	for _, p := range flows {
		tuples = append(tuples, p.tuple())
	}
	return d.request(h, mode, uint32(len(tuples)), tuples)
}

func (d *datapath) request(h hosts, mode MasqSweepMode, count uint32, tuples []tuple) int {
	d.Helper()
	name := MasqProgSweepV4
	if h.v6 {
		name = MasqProgSweepV6
	}
	head := MasqSweepRequest{Mode: uint16(mode), Count: count}
	data, err := binary.Append(nil, binary.NativeEndian, &head)
	for _, t := range tuples {
		if err == nil {
			data, err = binary.Append(data, binary.NativeEndian, t.key())
		}
	}
	if err != nil {
		d.Fatal("write the request:", err)
	}
	ended, err := d.coll.Programs[name].Run(&ebpf.RunOptions{Data: data})
	if err != nil {
		d.Fatalf("run %s: %v", name, err)
	}
	return int(ended)
}

func TestSweepEndsOnlyWhatIsPastItsTime(t *testing.T) {
	d := borrow(t, config{}, sweepPrograms...)
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d.forget(t, config{})
			var flows []packet
			for n := range uint16(4) {
				p := udp(h.pod, 40000+n, h.remote, 53)
				d.open(p)
				flows = append(flows, p)
			}
			d.age(flows[1], 29*time.Second)
			d.age(flows[2], 31*time.Second+200*time.Millisecond) // dead, but the sweep waits a second longer
			d.age(flows[3], 32*time.Second+100*time.Millisecond)
			unknown := udp(h.podB, 40000, h.remote, 53)
			if ended := d.sweep(h, sweepExpired, append(flows, unknown)...); ended != 1 {
				t.Errorf("ended %d flows, want 1", ended)
			}
			left := d.checkPairs()
			if _, ok := left[flows[3].tuple()]; ok || len(left) != 3 {
				t.Errorf("left: %v", left)
			}
			if ended := d.sweep(h, sweepAll, append(flows, unknown)...); ended != 3 || len(d.checkPairs()) != 0 {
				t.Errorf("ended %d flows when asked for all, want 3", ended)
			}
		})
	}
}

func TestSweepOfMany(t *testing.T) {
	d := borrow(t, config{}, sweepPrograms...)
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d.forget(t, config{})
			var flows []packet
			for n := range uint16(MasqLimitLIMIT_SWEEP + 1) {
				p := udp(h.pod, 40000+n, h.remote, 53)
				d.outsidePort(p)
				flows = append(flows, p)
			}
			if ended := d.sweep(h, sweepAll, flows...); ended != int(MasqLimitLIMIT_SWEEP) {
				t.Errorf("ended %d flows, want %d", ended, MasqLimitLIMIT_SWEEP)
			}
			if left := d.checkPairs(); len(left) != 1 {
				t.Errorf("%d flows left, want the one past the limit", len(left))
			}
		})
	}
}

func TestSweepBelievesNoCount(t *testing.T) {
	d := borrow(t, config{}, sweepPrograms...)
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d.forget(t, config{})
			a, b := udp(h.pod, 40000, h.remote, 53), udp(h.pod, 40001, h.remote, 53)
			d.open(a)
			d.open(b)
			tuples := []tuple{a.tuple(), a.tuple(), b.tuple()}
			if ended := d.request(h, sweepAll, 0, tuples); ended != 0 {
				t.Errorf("asked for none: ended %d", ended)
			}
			if ended := d.request(h, sweepAll, 2, tuples); ended != 1 {
				t.Errorf("asked for one twice: ended %d", ended)
			}
			if ended := d.request(h, sweepAll, 1<<31, tuples); ended != 1 {
				t.Errorf("asked for more than there are: ended %d", ended)
			}
			if ended := d.request(h, sweepAll, 1, []tuple{tuples[0].mirrored()}); ended != 0 || len(d.checkPairs()) != 0 {
				t.Errorf("asked for a reply's tuple: ended %d", ended)
			}
		})
	}
}

// Trap 51: the place of a dead flow may be taken by another at any time.
func TestDeadFlowMakesRoom(t *testing.T) {
	c := config{ports: onlyPorts(50000, 50000)}
	d := borrow(t, c, sweepPrograms...)
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d.forget(t, c)
			a, b := udp(h.pod, 40000, h.remote, 53), udp(h.podB, 40000, h.remote, 53)
			q := d.open(a)
			d.take("taken", leaves(b, portExhausted))
			d.age(a, 32*time.Second)
			if got := reopened(d, b); got.sport != q.sport {
				t.Fatalf("reopened as %v", got)
			}
			flows := d.flows()
			if _, ok := flows[a.tuple()]; ok || len(flows) != 1 {
				t.Errorf("flows: %v", flows)
			}
			d.take("reply", arrives(q.reply(), translated, b.reply()))
			d.take("the first pod again", leaves(a, portExhausted))
			if ended := d.sweep(h, sweepExpired, a, b); ended != 0 {
				t.Errorf("sweep ended %d live flows", ended)
			}
		})
	}
}

// Nobody uses a flow that somebody has marked for deletion.
func TestDyingFlowIsNobodys(t *testing.T) {
	d := borrow(t, config{}, sweepPrograms...)
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d.forget(t, config{})
			p := tcp(h.pod, 40000, h.remote, 80, "S")
			q := d.open(p)
			d.change(p, func(_, _ *uint64, _, dying *uint8) { *dying = 1 })
			d.take("reply", arrives(q.reply(), noFlow))
			d.take("error", arrives(h.icmpError(h.router, h.node, h.exceeded, 0, q, 8), noFlow))
			if got := d.run(egress, p.frame()); got.verdict < MasqVerdictVERDICT_DROP_FIRST {
				t.Errorf("egress: %s, want a drop until it is gone", verdictName(got.verdict))
			}
			if ended := d.sweep(h, sweepAll, p); ended != 0 || !slices.Equal(flowsDying(d), []bool{true}) {
				t.Errorf("a second one deletes it too: %d", ended)
			}
		})
	}
}

func flowsDying(d *datapath) (dying []bool) {
	for _, f := range d.flows() {
		dying = append(dying, f.dying)
	}
	return dying
}

// Under pressure those go first that nobody would miss, and none but those.
func TestSweepOfTheUnassured(t *testing.T) {
	d := borrow(t, config{}, sweepPrograms...)
	for _, h := range families {
		segment := func(port uint16, flags string) packet { return tcp(h.pod, port, h.remote, 80, flags) }
		answer := func(q packet, flags string) step { return step{direction: ingress, in: q.reply().withFlags(flags)} }
		tests := []struct {
			name  string
			first packet
			then  func(p, q packet) []step
			ends  bool
		}{
			{"UDP without answer", udp(h.pod, 40000, h.remote, 53), nil, true},
			{"UDP with an answer", udp(h.pod, 40000, h.remote, 53), func(_, q packet) []step {
				return []step{{direction: ingress, in: q.reply()}}
			}, true},
			{"UDP stream", udp(h.pod, 40000, h.remote, 53), func(p, q packet) []step {
				return []step{{direction: ingress, in: q.reply()}, do(func(d *datapath) { d.age(p, 3*time.Second) }), {in: p}}
			}, false},
			{"ping", h.ping(h.pod, h.remote, 7), func(_, q packet) []step { return []step{{direction: ingress, in: q.reply()}} }, true},
			{"SYN without answer", segment(40000, "S"), nil, true},
			{"SYN with an answer", segment(40000, "S"), func(_, q packet) []step { return []step{answer(q, "SA")} }, true},
			{"connection", segment(40000, "S"), func(p, q packet) []step {
				return []step{answer(q, "SA"), {in: p.withFlags("A")}}
			}, false},
			{"picked up without answer", segment(40000, "A"), nil, true},
			{"picked up with an answer", segment(40000, "A"), func(_, q packet) []step { return []step{answer(q, "A")} }, false},
			{"half closed", segment(40000, "A"), func(p, q packet) []step {
				return []step{answer(q, "A"), {in: p.withFlags("FA")}}
			}, false},
			{"reset", segment(40000, "A"), func(p, q packet) []step { return []step{answer(q, "A"), {in: p.withFlags("R")}} }, true},
			{"ESP without answer", raw(h.pod, h.remote, protoESP), nil, true},
			{"ESP with an answer", raw(h.pod, h.remote, protoESP), func(_, q packet) []step {
				return []step{{direction: ingress, in: q.reply()}}
			}, false},
		}
		for _, tt := range tests {
			t.Run(tt.name+"/"+h.String(), func(t *testing.T) {
				d.forget(t, config{})
				outside := d.open(tt.first)
				if tt.then != nil {
					for _, s := range tt.then(tt.first, outside) {
						if s.do != nil {
							s.do(d)
						} else if got := d.run(s.direction, s.in.frame()); got.verdict != translated {
							t.Fatalf("%v: got %s", s.in, verdictName(got.verdict))
						}
					}
				}
				if ended := d.sweep(h, sweepUnassured, tt.first); (ended == 1) != tt.ends {
					t.Errorf("ended %d flows", ended)
				}
				if left := len(d.checkPairs()); (left == 0) != tt.ends {
					t.Errorf("%d flows left", left)
				}
			})
		}
	}
}

// An outside tuple whose flow somebody has deleted is nobody's, but it looks
// the same while a flow is being opened: one sweep suspects, the next one acts.
func TestSweepOfOrphans(t *testing.T) {
	c := config{ports: onlyPorts(50000, 50000)}
	d := borrow(t, c, sweepPrograms...)
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d.forget(t, c)
			p, second := udp(h.pod, 40000, h.remote, 53), udp(h.podB, 40000, h.remote, 53)
			q := d.open(p)
			sweep := func(want int) {
				t.Helper()
				if got := d.request(h, sweepOrphans, 1, []tuple{q.tuple().mirrored()}); got != want {
					t.Errorf("took %d tuples away, want %d", got, want)
				}
			}
			sweep(0)
			sweep(0)
			restore := d.deleteFlow(p)
			sweep(0)
			restore()
			sweep(0) // no suspicion is left of it
			d.deleteFlow(p)
			sweep(0)
			if got := d.run(egress, second.frame()); got.verdict != portExhausted {
				t.Errorf("the tuple was free already: %s", verdictName(got.verdict))
			}
			sweep(1)
			if got := d.open(second); got.sport != q.sport {
				t.Errorf("reopened as %v", got)
			}
			sweep(0)
		})
	}
}

// deleteFlow takes a flow away as somebody with bpftool would, and says how to
// bring it back.
func (d *datapath) deleteFlow(p packet) (restore func()) {
	d.Helper()
	m, key := d.FlowsV4, p.tuple().key()
	if p.src.Is6() {
		m = d.FlowsV6
	}
	value, err := m.LookupBytes(key)
	if err != nil || value == nil {
		d.Fatalf("flow of %v: %v", p, err)
	}
	if err := m.Delete(key); err != nil {
		d.Fatal(err)
	}
	return func() { d.put(m, key, value) }
}
