// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf/ringbuf"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// Trap 48: where no port is left, a new connection may have that of one that is
// closing, if the remote can take it for a new one.
func TestSYNTakesTheOnlyPortOfAClosingConnection(t *testing.T) {
	withSeq := func(p packet, seq uint32) packet { p.seq = seq; return p }
	tests := []struct {
		name  string
		state MasqFlowState
		flags string
		last  uint32 // sequence number of the first pod's last segment
		seq   uint32 // of the second pod's first
		taken bool
	}{
		{"TIME_WAIT, beyond", MasqFlowStateFLOW_TCP_TIME_WAIT, "S", 5000, 5001, true},
		{"CLOSE, beyond", MasqFlowStateFLOW_TCP_CLOSE, "S", 5000, 9000, true},
		{"beyond, around the corner", MasqFlowStateFLOW_TCP_TIME_WAIT, "S", 0xfffffff0, 5, true},
		{"not beyond", MasqFlowStateFLOW_TCP_TIME_WAIT, "S", 5000, 4000, false},
		{"the same", MasqFlowStateFLOW_TCP_TIME_WAIT, "S", 5000, 4999, false},
		{"LAST_ACK", MasqFlowStateFLOW_TCP_LAST_ACK, "S", 5000, 9000, false},
		{"ESTABLISHED", MasqFlowStateFLOW_TCP_ESTABLISHED, "S", 5000, 9000, false},
		{"no SYN", MasqFlowStateFLOW_TCP_TIME_WAIT, "A", 5000, 9000, false},
	}
	c := config{ports: onlyPorts(50000, 50000)}
	for _, tt := range tests {
		for _, h := range families {
			t.Run(tt.name+"/"+h.String(), func(t *testing.T) {
				d := borrow(t, c)
				first := withSeq(tcp(h.pod, 40000, h.remote, 80, "A"), tt.last)
				d.open(first)
				d.change(first, func(_, _ *uint64, state, _ *uint8) { *state = uint8(tt.state) })
				second := withSeq(tcp(h.podB, 40000, h.remote, 80, tt.flags), tt.seq)
				if !tt.taken {
					d.take("second", leaves(second, portExhausted))
					return
				}
				if got := reopened(d, second); got.sport != 50000 {
					t.Errorf("opened as %v", got)
				}
				if _, ok := d.flows()[first.tuple()]; ok {
					t.Error("the first flow is still there")
				}
			})
		}
	}
}

// What is sent again does not open the old connection's window to a new one.
func TestNoTakeoverInsideTheOldWindow(t *testing.T) {
	d := borrow(t, config{ports: onlyPorts(50000, 50000)})
	for _, h := range families {
		first := tcp(h.pod, 40000, h.remote, 80, "A")
		first.seq = 5000
		again := first
		again.seq = 3000
		outside := d.open(first)
		outside.seq = 3000
		d.take("sent again", leaves(again, translated, outside))
		d.change(first, func(_, _ *uint64, state, _ *uint8) { *state = uint8(MasqFlowStateFLOW_TCP_TIME_WAIT) })
		second := tcp(h.podB, 40000, h.remote, 80, "S")
		second.seq = 4000
		d.take("second", leaves(second, portExhausted))
	}
}

func TestNoTakeoverWhileThereArePorts(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		first, second := tcp(h.pod, 40000, h.remote, 80, "A"), tcp(h.podB, 40000, h.remote, 80, "S")
		d.open(first)
		d.change(first, func(_, _ *uint64, state, _ *uint8) { *state = uint8(MasqFlowStateFLOW_TCP_TIME_WAIT) })
		second.seq = 9000
		if got := d.open(second); got.sport == 40000 {
			t.Errorf("%v: port taken over", h)
		}
	}
}

// attempts are the new flows by the number of candidates before the one that
// they got; the last of all got none.
func (d *datapath) attempts() map[uint32]uint64 {
	d.Helper()
	all := map[uint32]uint64{}
	var perCPU []uint64
	for n := range d.Attempts.MaxEntries() {
		if err := d.Attempts.Lookup(n, &perCPU); err != nil {
			d.Fatal("read attempts:", err)
		}
		for _, count := range perCPU {
			if count > 0 {
				all[n] += count
			}
		}
	}
	return all
}

func TestAttemptsAreCounted(t *testing.T) {
	d := load(t, config{ports: onlyPorts(50000, 50000)})
	last := uint32(MasqLimitLIMIT_CANDIDATES)
	for _, h := range families {
		p := udp(h.pod, 50000, h.remote, 53)
		d.open(p)
		d.take("again", leaves(p, translated, p.from(h.node, 50000)))
		d.take("none left", leaves(p.from(h.podB, 50000), portExhausted))
	}
	if diff := cmp.Diff(map[uint32]uint64{0: 2, last: 2}, d.attempts()); diff != "" {
		t.Errorf("attempts (-want +got):\n%s", diff)
	}
	d = load(t, config{})
	for n := range 20 {
		d.outsidePort(udp(v4.podNumber(n), 40000, v4.remote, 53))
	}
	var more, all uint64
	for n, count := range d.attempts() {
		all += count
		if n > 0 {
			more += count
		}
	}
	if all != 20 || more != 19 {
		t.Errorf("%d flows took more than one candidate and %d any, want 19 and 20", more, all)
	}
}

// An event tells of drops that an operator should hear of, the first at once
// and then one a second.
func TestEvents(t *testing.T) {
	event := func(h hosts, verdict MasqVerdict) MasqEvent {
		return MasqEvent{
			Daddr: be128(h.remote), Dport: htons(53), Proto: 17, Verdict: uint8(verdict), Ifindex: loopbackIndex,
		}
	}
	none := &MasqPortPool{}
	for name, tt := range map[string]struct {
		c       config
		verdict MasqVerdict
	}{
		"no port":    {config{ports: none}, portExhausted},
		"no room":    {config{flows: 1}, tableFull},
		"no address": {config{noAddress: true}, noAddress},
	} {
		for _, h := range families {
			t.Run(name+"/"+h.String(), func(t *testing.T) {
				d := load(t, tt.c)
				if err := stayOnCPU(0); err != nil { // each CPU tells its own events
					t.Fatal(err)
				}
				reader, err := ringbuf.NewReader(d.Events)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { reader.Close() })
				if tt.verdict == tableFull {
					d.open(udp(h.pod, 40000, h.remote, 52))
				}
				for range 3 {
					d.take("drop", leaves(udp(h.pod, 40000, h.remote, 53), tt.verdict))
				}
				d.take("no event", leaves(tcp(h.pod, 40000, h.remote, 80, "R"), dropInvalid))
				if diff := cmp.Diff([]MasqEvent{event(h, tt.verdict)}, events(t, reader),
					cmpopts.IgnoreUnexported(MasqEvent{})); diff != "" {
					t.Errorf("events (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// events are those that wait to be read.
func events(t *testing.T, reader *ringbuf.Reader) (all []MasqEvent) {
	t.Helper()
	reader.SetDeadline(time.Now())
	for {
		record, err := reader.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return all
		}
		if err != nil {
			t.Fatal("read events:", err)
		}
		var event MasqEvent
		if _, err := binary.Decode(record.RawSample, binary.NativeEndian, &event); err != nil {
			t.Fatal("decode event:", err)
		}
		all = append(all, event)
	}
}

// Where a connection has got to does not go back with a segment sent again.
func TestTakeoverMindsTheNewestByte(t *testing.T) {
	d := borrow(t, config{ports: onlyPorts(50000, 50000)})
	first := tcp(v4.pod, 40000, v4.remote, 80, "A")
	first.seq = 5000
	outside := d.open(first)
	again, againOutside := first, outside
	again.seq, againOutside.seq = 3000, 3000
	d.take("sent again", leaves(again, translated, againOutside))
	d.change(first, func(_, _ *uint64, state, _ *uint8) { *state = uint8(MasqFlowStateFLOW_TCP_TIME_WAIT) })
	second := tcp(v4.podB, 40000, v4.remote, 80, "S")
	second.seq = 4000
	d.take("in the old window", leaves(second, portExhausted))
}
