// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
)

var sweepPrograms = []string{MasqProgSweepV4, MasqProgSweepV6}

// sweep runs a sweep program on the flows of some packets and returns how many
// it says to have ended.
func (d *datapath) sweep(h hosts, all bool, flows ...packet) int {
	d.Helper()
	var tuples []tuple
	for _, p := range flows {
		tuples = append(tuples, p.tuple())
	}
	return d.request(h, all, uint32(len(tuples)), tuples)
}

func (d *datapath) request(h hosts, all bool, count uint32, tuples []tuple) int {
	d.Helper()
	name := MasqProgSweepV4
	if h.v6 {
		name = MasqProgSweepV6
	}
	head := MasqSweepRequest{Count: count}
	if all {
		head.All = 1
	}
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
			if ended := d.sweep(h, false, append(flows, unknown)...); ended != 1 {
				t.Errorf("ended %d flows, want 1", ended)
			}
			left := d.checkPairs()
			if _, ok := left[flows[3].tuple()]; ok || len(left) != 3 {
				t.Errorf("left: %v", left)
			}
			if ended := d.sweep(h, true, append(flows, unknown)...); ended != 3 || len(d.checkPairs()) != 0 {
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
			if ended := d.sweep(h, true, flows...); ended != int(MasqLimitLIMIT_SWEEP) {
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
			if ended := d.request(h, true, 0, tuples); ended != 0 {
				t.Errorf("asked for none: ended %d", ended)
			}
			if ended := d.request(h, true, 2, tuples); ended != 1 {
				t.Errorf("asked for one twice: ended %d", ended)
			}
			if ended := d.request(h, true, 1<<31, tuples); ended != 1 {
				t.Errorf("asked for more than there are: ended %d", ended)
			}
			if ended := d.request(h, true, 1, []tuple{tuples[0].mirrored()}); ended != 0 || len(d.checkPairs()) != 0 {
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
			if ended := d.sweep(h, false, a, b); ended != 0 {
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
			if ended := d.sweep(h, true, p); ended != 0 || !slices.Equal(flowsDying(d), []bool{true}) {
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
