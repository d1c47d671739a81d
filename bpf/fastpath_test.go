// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/gopacket/gopacket/layers"
)

const (
	actionRedirect = 7 // TC_ACT_REDIRECT

	token = 0x1234567890abcdef
	hours = uint64(time.Hour)
)

var (
	outMACs  = [12]uint8{2, 0, 0, 0, 0, 0xa1, 2, 0, 0, 0, 0, 0xa2}
	backMACs = [12]uint8{2, 0, 0, 0, 0, 0xb1, 2, 0, 0, 0, 0, 0xb2}
)

// fullSKB is struct __sk_buff as far as Program.Run takes it and tests set it.
type fullSKB struct {
	_              [6]uint32
	VlanTCI        uint32
	_              [2]uint32
	IngressIfindex uint32
	Ifindex        uint32
	_              uint32
	CB             [5]uint32
	_              [24]uint32
	GSOSegs        uint32
	_              [2]uint32
	GSOSize        uint32
	_              uint32
}

// fastFlow is a flow that is under way, with ways past the stack.
type fastFlow struct {
	*datapath
	pod     packet // as the pod sends it
	outside packet // as the uplink does
	ways    MasqWays
	config  MasqFastPathConfig
}

// newFastFlow opens a flow by the stack's way, has it answered, and notes ways.
func newFastFlow(t *testing.T, h hosts, proto layers.IPProtocol) *fastFlow {
	t.Helper()
	d := borrow(t, config{ctinfo: true, fastPath: true}, MasqProgMasqFastPath)
	f := &fastFlow{datapath: d}
	if proto == layers.IPProtocolTCP {
		syn := tcp(h.pod, 40000, h.remote, 80, "S")
		f.outside = d.open(syn)
		d.take("SYN+ACK", arrives(f.outside.reply(), translated, syn.reply()))
		f.pod, f.outside = syn.withFlags("A"), f.outside.withFlags("A")
		d.take("ACK", leaves(f.pod, translated, f.outside))
	} else {
		f.pod = udp(h.pod, 40000, h.remote, 53)
		f.outside = d.open(f.pod)
		d.take("answer", arrives(f.outside.reply(), translated, f.pod.reply()))
	}
	now := monotonic()
	f.ways = MasqWays{PodLink: d.ifindex, Uplink: d.ifindex, Generation: 7}
	f.ways.Out.Macs, f.ways.Out.Mtu, f.ways.Out.Until = outMACs, 1500, now+hours
	f.ways.Back.Macs, f.ways.Back.Mtu, f.ways.Back.Until = backMACs, 1500, now+hours
	f.config = MasqFastPathConfig{Token: token, Generation: 7, Flags: uint32(MasqFastPathFlagFAST_PATH_ON)}
	f.write()
	return f
}

// write has the maps say what f does.
func (f *fastFlow) write() {
	f.Helper()
	f.put(f.FastPath, uint32(0), f.config)
	if f.pod.src.Is4() {
		f.put(f.WaysV4, f.pod.tuple().key(), f.ways)
	} else {
		f.put(f.WaysV6, f.pod.tuple().key(), f.ways)
	}
}

// toHost is a frame for the link that it comes in by, which the loopback device
// stands for: its address is 0.
func toHost(p packet) []byte {
	frame := p.frame()
	copy(frame[:6], make([]byte, 6))
	return frame
}

// onward is the frame of a packet that has been forwarded by a way.
func onward(p packet, macs [12]uint8) []byte {
	frame := p.frame()
	copy(frame, macs[:])
	if p.src.Is6() {
		frame[21]--
		return frame
	}
	frame[22]--
	sum := uint32(binary.BigEndian.Uint16(frame[24:])) + 0x0100
	binary.BigEndian.PutUint16(frame[24:], uint16(sum+sum>>16))
	return frame
}

func (f *fastFlow) through(p *ebpf.Program, frame []byte, ctx fullSKB) (uint32, []byte) {
	f.Helper()
	ctx.Ifindex = f.ifindex
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+64), Context: &ctx}
	action, err := p.Run(&opts)
	if err != nil {
		f.Fatalf("run: %v", err)
	}
	return action, opts.DataOut
}

// fromPod sends a frame through the program at the pod's link.
func (f *fastFlow) fromPod(frame []byte, ctx fullSKB) (uint32, []byte) {
	f.Helper()
	return f.through(f.coll.Programs[MasqProgMasqFastPath], frame, ctx)
}

// holdStack has a frame from the pod left to the stack, as it was.
func (f *fastFlow) holdStack(frame []byte, ctx fullSKB) {
	f.Helper()
	action, out := f.fromPod(frame, ctx)
	if action != actionPass || !bytes.Equal(out, frame) {
		f.Errorf("action %#x, want it left to the stack; %s", action, difference(out, frame))
	}
	if moved := f.moved(0); len(moved) > 0 {
		f.Errorf("counted: %v", moved)
	}
}

// eachFastFlow runs a test for each family and protocol.
func eachFastFlow(t *testing.T, test func(t *testing.T, f *fastFlow)) {
	t.Helper()
	for _, h := range families {
		for _, proto := range []layers.IPProtocol{layers.IPProtocolTCP, layers.IPProtocolUDP} {
			t.Run(fmt.Sprintf("%v/%v", h, proto), func(t *testing.T) { test(t, newFastFlow(t, h, proto)) })
		}
	}
}

// A packet is as the stack and the uplink's program would have made it, and is
// counted where it leaves.
func TestFastPathOut(t *testing.T) {
	eachFastFlow(t, func(t *testing.T, f *fastFlow) {
		action, out := f.fromPod(toHost(f.pod), fullSKB{})
		if want := onward(f.outside, outMACs); action != actionRedirect || !bytes.Equal(out, want) {
			t.Fatalf("action %#x, %s", action, difference(out, want))
		}
		if moved := f.moved(0); len(moved) > 0 {
			t.Errorf("counted before it leaves: %v", moved)
		}
		leaving := fullSKB{CB: [5]uint32{token & 0xffffffff, token >> 32}}
		action, again := f.through(f.programs[egress], out, leaving)
		if action != actionPass || !bytes.Equal(again, out) {
			t.Errorf("at the uplink: action %#x, %s", action, difference(again, out))
		}
		if moved := f.moved(uint64(len(out))); len(moved) != 1 || moved[0].verdict != fastPath || moved[0].direction != egress {
			t.Errorf("counted %v, want one packet out by the fast path", moved)
		}
	})
}

// Without the token it is a packet of the node's own that clashes with a pod's.
func TestFastPathTokenIsNotGuessed(t *testing.T) {
	eachFastFlow(t, func(t *testing.T, f *fastFlow) {
		for _, cb := range [][5]uint32{{}, {token & 0xffffffff}, {token & 0xffffffff, token>>32 + 1}, {0, token >> 32}} {
			frame := f.outside.frame()
			f.through(f.programs[egress], frame, fullSKB{CB: cb})
			if moved := f.moved(uint64(len(frame))); len(moved) != 1 || moved[0].verdict == fastPath {
				t.Errorf("%v: counted %v", cb, moved)
			}
		}
	})
}

func TestFastPathBack(t *testing.T) {
	eachFastFlow(t, func(t *testing.T, f *fastFlow) {
		frame := toHost(f.outside.reply())
		action, out := f.through(f.programs[ingress], frame, fullSKB{})
		if want := onward(f.pod.reply(), backMACs); action != actionRedirect || !bytes.Equal(out, want) {
			t.Fatalf("action %#x, %s", action, difference(out, want))
		}
		if moved := f.moved(uint64(len(frame))); len(moved) != 1 || moved[0].verdict != fastPath || moved[0].direction != ingress {
			t.Errorf("counted %v, want one packet back by the fast path", moved)
		}
	})
}

// What makes a packet take the stack's way, in both directions.
func TestFastPathLeavesToTheStack(t *testing.T) {
	long := bytes.Repeat([]byte("long"), 400)
	for _, c := range []struct {
		name   string
		change func(f *fastFlow) // what the maps say
		packet func(p packet) packet
		frame  func(frame []byte)
		ctx    fullSKB
		proto  layers.IPProtocol // 0: both
	}{
		{name: "switched off", change: func(f *fastFlow) { f.config.Flags = 0 }},
		{name: "network changed", change: func(f *fastFlow) { f.config.Generation++ }},
		{name: "way too old", change: func(f *fastFlow) {
			f.ways.Out.Until, f.ways.Back.Until = monotonic(), monotonic()
		}},
		{name: "another link", change: func(f *fastFlow) { f.ways.PodLink++; f.ways.Uplink++ }},
		{name: "longer than the MTU", packet: func(p packet) packet { return p.withBody(long) }},
		{name: "segments longer than the MTU", packet: func(p packet) packet { return p.withBody(long) }, ctx: fullSKB{GSOSegs: 2, GSOSize: 1490}},
		{name: "last hop", frame: func(frame []byte) {
			if frame[14]>>4 == 4 {
				frame[22] = 1
			} else {
				frame[21] = 1
			}
		}},
		{name: "less than its header says", packet: func(p packet) packet { return p.withBody([]byte("more than enough")) }, frame: func(frame []byte) {
			if frame[14]>>4 == 4 {
				frame[17]++
			} else {
				frame[19]++
			}
		}},
		{name: "another host's", frame: func(frame []byte) { copy(frame, routerMAC[:]) }},
		{name: "fragment", packet: func(p packet) packet {
			return p.withBody(long).withFrag(fragment{id: 9, length: 800})
		}},
		{name: "options", packet: func(p packet) packet {
			if p.src.Is4() {
				p.options = []byte{1, 1, 1, 1}
			} else {
				p.extensions = []extension{{layers.IPProtocolIPv6HopByHop, []byte{0, 1, 4, 0, 0, 0, 0}}}
			}
			return p
		}},
		{name: "FIN", proto: layers.IPProtocolTCP, packet: func(p packet) packet { return p.withFlags("FA") }},
		{name: "RST", proto: layers.IPProtocolTCP, packet: func(p packet) packet { return p.withFlags("R") }},
		{name: "SYN", proto: layers.IPProtocolTCP, packet: func(p packet) packet { return p.withFlags("S") }},
		{name: "closing", proto: layers.IPProtocolTCP, change: func(f *fastFlow) {
			f.change(f.pod, func(_, _ *uint64, state, _ *uint8) { *state = uint8(MasqFlowStateFLOW_TCP_FIN_WAIT) })
		}},
		{name: "flow dead", change: func(f *fastFlow) { f.age(f.pod, 121*time.Hour) }},
		{name: "flow dying", change: func(f *fastFlow) {
			f.change(f.pod, func(_, _ *uint64, _, dying *uint8) { *dying = 1 })
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			eachFastFlow(t, func(t *testing.T, f *fastFlow) {
				if c.proto != 0 && c.proto != f.pod.proto {
					return
				}
				pod, reply := f.pod, f.outside.reply()
				if c.packet != nil {
					pod, reply = c.packet(pod), c.packet(reply)
				}
				if c.change != nil {
					c.change(f)
					f.write()
				}
				there, back := toHost(pod), toHost(reply)
				if c.frame != nil {
					c.frame(there)
					c.frame(back)
				}
				f.holdStack(there, c.ctx)
				if action, _ := f.through(f.programs[ingress], back, c.ctx); action != actionPass {
					t.Errorf("reply: action %#x, want %#x", action, actionPass)
				}
				if moved := f.moved(uint64(len(back))); len(moved) != 1 || moved[0].verdict == fastPath {
					t.Errorf("reply counted %v", moved)
				}
			})
		})
	}
}

// A way is of one pair of links: the address of a pod on another pod's link is
// for the stack to judge.
func TestFastPathIsBetweenTwoLinks(t *testing.T) {
	for name, move := range map[string]func(*MasqWays){
		"from another link": func(w *MasqWays) { w.PodLink++ },
		"to another uplink": func(w *MasqWays) { w.Uplink++ },
	} {
		t.Run(name, func(t *testing.T) {
			eachFastFlow(t, func(_ *testing.T, f *fastFlow) {
				move(&f.ways)
				f.write()
				f.holdStack(toHost(f.pod), fullSKB{})
			})
		})
	}
}

// Other kinds of packets never take it, whatever the maps say.
func TestFastPathIsForTCPAndUDP(t *testing.T) {
	for _, h := range families {
		f := newFastFlow(t, h, layers.IPProtocolUDP)
		for _, p := range []packet{h.ping(h.pod, h.remote, 7), raw(h.pod, h.remote, protoESP), sctp(h.pod, 3868, h.remote, 3868)} {
			outside := f.open(p)
			f.take("answer", arrives(outside.reply(), translated, p.reply()))
			f.pod, f.ways.PodLink = p, f.ifindex
			f.write()
			f.holdStack(toHost(p), fullSKB{})
		}
	}
}

// Nobody has answered yet: conntrack and we do not know what it will become.
func TestFastPathWaitsForAnAnswer(t *testing.T) {
	for _, h := range families {
		f := newFastFlow(t, h, layers.IPProtocolUDP)
		f.pod = udp(h.pod, 40001, h.remote, 53)
		f.outside = f.open(f.pod)
		f.write()
		f.holdStack(toHost(f.pod), fullSKB{})
	}
}

// Segments that fit may be as many as they like.
func TestFastPathTakesSegments(t *testing.T) {
	eachFastFlow(t, func(t *testing.T, f *fastFlow) {
		body := bytes.Repeat([]byte("long"), 700)
		action, out := f.fromPod(toHost(f.pod.withBody(body)), fullSKB{GSOSegs: 2, GSOSize: 1400})
		if want := onward(f.outside.withBody(body), outMACs); action != actionRedirect || !bytes.Equal(out, want) {
			t.Errorf("action %#x, %s", action, difference(out, want))
		}
	})
}

// The sequence numbers that a connection's end is judged by go on.
func TestFastPathNotesSequence(t *testing.T) {
	for _, h := range families {
		f := newFastFlow(t, h, layers.IPProtocolTCP)
		far := f.pod
		far.seq, far.ack = 50_000_000, 90_000_000
		if action, _ := f.fromPod(toHost(far), fullSKB{}); action != actionRedirect {
			t.Fatalf("%v: action %#x", h, action)
		}
		rst := f.outside.reply().withFlags("R")
		rst.seq = far.ack
		f.run(ingress, rst.frame())
		if got := f.flow(f.pod).state; got != MasqFlowStateFLOW_TCP_CLOSE {
			t.Errorf("%v: state %v after the other side's RST", h, got)
		}
	}
}

// A packet that takes the stack's way shows the link that it came from, for the
// agent to attach there; the node's own does not.
func TestFastPathAnnouncesLinks(t *testing.T) {
	eachFastFlow(t, func(t *testing.T, f *fastFlow) {
		f.through(f.programs[egress], f.pod.frame(), fullSKB{})
		if got := f.podLinks(); len(got) > 0 {
			t.Errorf("links %v after a packet from none", got)
		}
		f.through(f.programs[egress], f.pod.frame(), fullSKB{IngressIfindex: f.ifindex + 1})
		if got := f.podLinks(); !slices.Equal(got, []uint32{f.ifindex + 1}) {
			t.Errorf("links %v, want %d", got, f.ifindex+1)
		}
	})
}

func (d *datapath) podLinks() (all []uint32) {
	d.Helper()
	each(d, d.PodLinks, func(index *uint32, _ *uint64) { all = append(all, *index) })
	return all
}
