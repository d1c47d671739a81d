// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// tcpStates are the states by the names of the table below.
var tcpStates = map[string]MasqFlowState{
	"SS": MasqFlowStateFLOW_TCP_SYN_SENT,
	"SR": MasqFlowStateFLOW_TCP_SYN_RECV,
	"ES": MasqFlowStateFLOW_TCP_ESTABLISHED,
	"FW": MasqFlowStateFLOW_TCP_FIN_WAIT,
	"CW": MasqFlowStateFLOW_TCP_CLOSE_WAIT,
	"LA": MasqFlowStateFLOW_TCP_LAST_ACK,
	"TW": MasqFlowStateFLOW_TCP_TIME_WAIT,
	"CL": MasqFlowStateFLOW_TCP_CLOSE,
	"UN": MasqFlowStateFLOW_TCP_UNACKNOWLEDGED,
}

// The next state by direction, flags and present state, as far as conntrack's
// table (nf_conntrack_proto_tcp.c) has one: where it says invalid or ignore,
// the state stays. An ACK after a RST asks for an answer again (trap 47).
const tcpTable = `
           SS SR ES FW CW LA TW CL UN
egress S   SS SR ES FW CW LA SS SS SS
egress SA  SS SR ES FW CW LA TW CL UN
egress F   SS FW FW LA LA LA TW CL FW
egress FA  SS FW FW LA LA LA TW CL FW
egress A   SS ES ES CW CW TW TW UN UN
egress AP  SS ES ES CW CW TW TW UN UN
egress R   CL CL CL CL CL CL CL CL CL
egress RA  CL CL CL CL CL CL CL CL CL
ingress S  SR SR ES FW CW LA SS CL UN
ingress SA SR SR ES FW CW LA TW CL ES
ingress F  SS FW FW LA LA LA TW CL FW
ingress FA SS FW FW LA LA LA TW CL FW
ingress A  SS SR ES CW CW TW TW CL ES
ingress AP SS SR ES CW CW TW TW CL ES
ingress R  CL CL CL CL CL CL CL CL CL
ingress RA CL CL CL CL CL CL CL CL CL`

func TestTCPStates(t *testing.T) {
	d := borrow(t, config{})
	p := tcp(v4.pod, 40000, v4.remote, 80, "S")
	outside := d.open(p)
	lines := strings.Split(strings.TrimSpace(tcpTable), "\n")
	from := strings.Fields(lines[0])
	for _, line := range lines[1:] {
		fields := strings.Fields(line)
		for i, want := range fields[2:] {
			t.Run(fmt.Sprintf("%s %s in %s", fields[0], fields[1], from[i]), func(t *testing.T) {
				d.TB = t
				d.change(p, func(_, _ *uint64, state, _ *uint8) { *state = uint8(tcpStates[from[i]]) })
				if fields[0] == "egress" {
					d.take("segment", leaves(p.withFlags(fields[1]), translated, outside.withFlags(fields[1])))
				} else {
					d.take("segment", arrives(outside.reply().withFlags(fields[1]), translated, p.reply().withFlags(fields[1])))
				}
				if got := d.flow(p).state; got != tcpStates[want] {
					t.Errorf("state %d, want %d", got, tcpStates[want])
				}
			})
		}
	}
}

func TestConversations(t *testing.T) {
	tests := []struct {
		name, talk string // direction, flags, state afterwards
	}{
		{"opened and closed by the pod", ">S SS, <SA SR, >A ES, <A ES, >FA FW, <A CW, <FA LA, >A TW, >S SS"},
		{"closed by the remote", ">S SS, <SA SR, >A ES, <FA FW, >A CW, >FA LA, <A TW"},
		{"refused", ">S SS, <RA CL, >S SS"},
		{"picked up in the middle", ">A UN, >AP UN, <A ES"},
		{"a blind RST, then data", ">S SS, <SA SR, >A ES, <R CL, >AP UN, <A ES"},
		{"a reset that holds", ">S SS, <SA SR, >A ES, >R CL, <A CL"},
		{"a SYN sent twice", ">S SS, >S SS, <SA SR, <SA SR, >A ES, >S ES"},
		{"opened from both ends", ">S SS, <S SR, >SA SR, <SA SR, >A ES"},
	}
	d := borrow(t, config{})
	for _, h := range families {
		for _, tt := range tests {
			t.Run(h.String()+"/"+tt.name, func(t *testing.T) {
				d.forget(t, config{})
				for i, word := range strings.Split(tt.talk, ", ") {
					flags, state, _ := strings.Cut(word[1:], " ")
					p := tcp(h.pod, 40000, h.remote, 80, flags)
					q := p.from(h.node, 40000)
					s := leaves(p, translated, q)
					if i == 0 {
						s.verdict = opened
					}
					if word[0] == '<' {
						s = arrives(q.reply().withFlags(flags), translated, p.reply().withFlags(flags))
					}
					d.take(word, s)
					if got := d.flow(p).state; got != tcpStates[state] {
						t.Fatalf("step %d: after %s state %d, want %d", i, word, got, tcpStates[state])
					}
				}
			})
		}
	}
}

func TestFirstStates(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		echo := MasqFlowStateFLOW_ICMP
		if h.v6 {
			echo = MasqFlowStateFLOW_ICMPV6
		}
		for state, p := range map[MasqFlowState]packet{
			MasqFlowStateFLOW_UDP: udp(h.pod, 40000, h.remote, 53), MasqFlowStateFLOW_SCTP: sctp(h.pod, 40000, h.remote, 80),
			MasqFlowStateFLOW_GENERIC: raw(h.pod, h.remote, protoESP), echo: h.ping(h.pod, h.remote, 7),
		} {
			outside := d.open(p)
			if f := d.flow(p); f.state != state || f.replied {
				t.Errorf("%v: %+v, want state %d and no reply", p, f, state)
			}
			d.take("reply", arrives(outside.reply(), translated, p.reply()))
			if f := d.flow(p); f.state != state || !f.replied {
				t.Errorf("%v: %+v, want state %d and a reply", p, f, state)
			}
		}
	}
}

// Trap 50: a stream is what is older than two seconds and was answered.
func TestUDPStream(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d.forget(t, config{})
			p := udp(h.pod, 40000, h.remote, 53)
			q := d.open(p)
			state := func(what string, want MasqFlowState) {
				t.Helper()
				if got := d.flow(p).state; got != want {
					t.Errorf("%s: state %d, want %d", what, got, want)
				}
			}
			d.age(p, 3*time.Second)
			d.take("old, not answered", leaves(p, translated, q))
			state("old, not answered", MasqFlowStateFLOW_UDP)
			d.change(p, func(created, _ *uint64, _, _ *uint8) { *created = monotonic() })
			d.take("young, answered", arrives(q.reply(), translated, p.reply()))
			state("young, answered", MasqFlowStateFLOW_UDP)
			d.age(p, 3*time.Second)
			d.take("old, answered", leaves(p, translated, q))
			state("old, answered", MasqFlowStateFLOW_UDP_STREAM)
			d.age(p, 119*time.Second)
			d.take("after two minutes", arrives(q.reply(), translated, p.reply()))
		})
	}
}

// A flow is dead a second after its timeout, since last_seen is up to a second
// old, and at once: lookups ignore it.
func TestTimeouts(t *testing.T) {
	d := borrow(t, config{})
	for state, seconds := range kernelTimeouts {
		if seconds == 0 {
			continue
		}
		for _, h := range families {
			t.Run(fmt.Sprintf("%v/state %d", h, state), func(t *testing.T) {
				d.forget(t, config{})
				p := udp(h.pod, 40000, h.remote, 53)
				if state <= int(MasqFlowStateFLOW_TCP_UNACKNOWLEDGED) {
					p = tcp(h.pod, 40000, h.remote, 80, "S")
				}
				q := d.open(p)
				idle := func(by time.Duration) {
					d.change(p, func(_, lastSeen *uint64, s, _ *uint8) {
						*s = uint8(state)
						*lastSeen = monotonic() - uint64(by)
					})
				}
				reply := q.reply().withFlags(p.tcpFlags) // a SYN changes hardly any state
				idle(time.Duration(seconds)*time.Second + 100*time.Millisecond)
				d.take("alive", arrives(reply, translated, p.reply().withFlags(p.tcpFlags)))
				idle(time.Duration(seconds)*time.Second + 1100*time.Millisecond)
				if got := d.run(ingress, reply.frame()); got.verdict == translated {
					t.Error("a dead flow translates replies")
				}
				reopened(d, p)
				if f := d.flow(p); f.created < monotonic()-uint64(time.Minute) || f.replied {
					t.Errorf("the dead flow goes on: %+v", f)
				}
			})
		}
	}
}

// Trap 37: never one uplink's address on another.
func TestFlowOnAnotherUplinkStartsAfresh(t *testing.T) {
	link := device(t)
	d := borrow(t, config{})
	for _, h := range families {
		d.ifindex = loopbackIndex
		p := tcp(h.pod, 40000, h.remote, 80, "A")
		d.open(p)
		d.change(p, func(_, _ *uint64, state, _ *uint8) { *state = uint8(MasqFlowStateFLOW_TCP_ESTABLISHED) })
		d.ifindex = uint32(link.Attrs().Index)
		reopened(d, p)
		if f := d.flow(p); f.ifindex != d.ifindex || f.state != MasqFlowStateFLOW_TCP_UNACKNOWLEDGED {
			t.Errorf("%v: %+v, want a flow that was opened on device %d", h, f, d.ifindex)
		}
		fin := tcp(h.pod, 40000, h.remote, 80, "FA")
		d.ifindex = loopbackIndex
		if got := d.run(egress, fin.frame()); got.verdict != dropInvalid || len(d.checkPairs()) != 0 {
			t.Errorf("%v: FIN on the first device again: %s", h, verdictName(got.verdict))
		}
	}
}

// last_seen is written at most once a second, or with a new state.
func TestLastSeenIsWrittenOnceASecond(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d.forget(t, config{})
			p := tcp(h.pod, 40000, h.remote, 80, "S")
			q := d.open(p)
			seen := d.flow(p).lastSeen
			d.take("at once", leaves(p, translated, q))
			if got := d.flow(p).lastSeen; got != seen && got-seen < uint64(time.Second) {
				t.Errorf("written after %v", time.Duration(got-seen))
			}
			d.age(p, 2*time.Second)
			d.take("after two seconds", leaves(p, translated, q))
			if idle := monotonic() - d.flow(p).lastSeen; idle > uint64(time.Second) {
				t.Errorf("not written for %v", time.Duration(idle))
			}
			seen = d.flow(p).lastSeen
			d.take("new state", arrives(q.reply(), translated, p.reply()))
			if d.flow(p).lastSeen == seen {
				t.Error("not written with a new state")
			}
			d.age(p, 2*time.Second)
			d.take("an answer after two seconds", arrives(q.reply(), translated, p.reply()))
			if idle := monotonic() - d.flow(p).lastSeen; idle > uint64(time.Second) {
				t.Errorf("not written for %v by what comes in", time.Duration(idle))
			}
		})
	}
}

// Who knows a session's addresses and ports, but not where it is, cannot end it.
func TestBlindSegmentsEndNothing(t *testing.T) {
	d := borrow(t, config{randomFully: true})
	for _, h := range families {
		for _, flags := range []string{"R", "RA", "FA"} {
			for name, tt := range map[string]struct {
				seq  uint32
				ends bool
			}{
				"where the pod waits": {5001, true},
				"in the window":       {5001 + 60000, true},
				"behind":              {5001 - 4000, false},
				"far ahead":           {5001 + 3<<20, false},
			} {
				t.Run(fmt.Sprint(h, " ", flags, " ", name), func(t *testing.T) {
					d.forget(t, config{randomFully: true})
					p := tcp(h.pod, 40000, h.remote, 80, "S")
					out := d.open(p)
					in := func(flags string, seq uint32) step {
						sent, got := out.withFlags(flags).reply(), p.withFlags(flags).reply()
						sent.seq, got.seq = seq, seq
						return arrives(sent, translated, got)
					}
					d.take("synack", in("SA", 5000))
					acked, ackedOut := p.withFlags("A"), out.withFlags("A")
					acked.ack, ackedOut.ack = 5001, 5001
					d.take("ack", leaves(acked, translated, ackedOut))
					d.take("the end", in(flags, tt.seq))
					state := d.flows()[p.tuple()].state
					if ended := state != MasqFlowStateFLOW_TCP_ESTABLISHED; ended != tt.ends {
						t.Errorf("state %v, ends %t, want %t", state, ended, tt.ends)
					}
				})
			}
		}
	}
}
