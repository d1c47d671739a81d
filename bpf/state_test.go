// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"
)

func htons(port uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, port))
}

func htonl(number uint32) uint32 {
	return binary.NativeEndian.Uint32(binary.BigEndian.AppendUint32(nil, number))
}

func be32(a netip.Addr) uint32 {
	octets := a.As4()
	return binary.NativeEndian.Uint32(octets[:])
}

func be128(a netip.Addr) (words [4]uint32) {
	octets := a.As16()
	for i := range words {
		words[i] = binary.NativeEndian.Uint32(octets[4*i:])
	}
	return words
}

func from32(word uint32) netip.Addr {
	return netip.AddrFrom4([4]byte(binary.NativeEndian.AppendUint32(nil, word)))
}

func from128(words [4]uint32) netip.Addr {
	var octets []byte
	for _, word := range words {
		octets = binary.NativeEndian.AppendUint32(octets, word)
	}
	return netip.AddrFrom16([16]byte(octets))
}

// monotonic is the datapath's clock.
func monotonic() uint64 {
	var now unix.Timespec
	must(unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
	return uint64(now.Nano())
}

// tuple is a key of the flow tables.
type tuple struct {
	src, dst netip.AddrPort
	proto    layers.IPProtocol
}

func tuple4(k *MasqTupleV4) tuple {
	return tuple{
		netip.AddrPortFrom(from32(k.Saddr), htons(k.Sport)),
		netip.AddrPortFrom(from32(k.Daddr), htons(k.Dport)),
		layers.IPProtocol(k.Proto),
	}
}

func tuple6(k *MasqTupleV6) tuple {
	return tuple{
		netip.AddrPortFrom(from128(k.Saddr), htons(k.Sport)),
		netip.AddrPortFrom(from128(k.Daddr), htons(k.Dport)),
		layers.IPProtocol(k.Proto),
	}
}

// key is the tuple as the maps have it.
func (t tuple) key() any {
	sport, dport, proto := htons(t.src.Port()), htons(t.dst.Port()), uint8(t.proto)
	if t.src.Addr().Is4() {
		return &MasqTupleV4{Saddr: be32(t.src.Addr()), Daddr: be32(t.dst.Addr()), Sport: sport, Dport: dport, Proto: proto}
	}
	return &MasqTupleV6{Saddr: be128(t.src.Addr()), Daddr: be128(t.dst.Addr()), Sport: sport, Dport: dport, Proto: proto}
}

func (t tuple) mirrored() tuple { return tuple{t.dst, t.src, t.proto} }

// tuple is the key of the flow that a packet belongs to as it leaves.
func (p packet) tuple() tuple {
	sport, dport := p.sport, p.dport
	if p.isICMP() {
		sport, dport = p.icmpID, uint16(p.icmpType)
	}
	return tuple{netip.AddrPortFrom(p.src, sport), netip.AddrPortFrom(p.dst, dport), p.proto}
}

// flow is a translated flow as the maps have it.
type flow struct {
	nat               netip.AddrPort
	state             MasqFlowState
	replied, dying    bool
	ifindex           uint32
	created, lastSeen uint64
}

func flow4(m *MasqMappingV4) flow {
	return flow{
		netip.AddrPortFrom(from32(m.NatAddr), htons(m.Flow.NatPort)), MasqFlowState(m.Flow.State),
		m.Flow.Replied != 0, m.Flow.Dying != 0,
		m.Flow.Ifindex, m.Flow.Created, m.Flow.LastSeen,
	}
}

func flow6(m *MasqMappingV6) flow {
	return flow{
		netip.AddrPortFrom(from128(m.NatAddr), htons(m.Flow.NatPort)), MasqFlowState(m.Flow.State),
		m.Flow.Replied != 0, m.Flow.Dying != 0,
		m.Flow.Ifindex, m.Flow.Created, m.Flow.LastSeen,
	}
}

// each is called with every entry of a map.
func each[K, V any](t testing.TB, m *ebpf.Map, f func(*K, *V)) {
	t.Helper()
	var key K
	var value V
	entries := m.Iterate()
	for entries.Next(&key, &value) {
		f(&key, &value)
	}
	if err := entries.Err(); err != nil {
		t.Fatalf("read %s: %v", m, err)
	}
}

// flows are the translated flows of both families.
func (d *datapath) flows() map[tuple]flow {
	d.Helper()
	all := map[tuple]flow{}
	each(d, d.FlowsV4, func(k *MasqTupleV4, m *MasqMappingV4) { all[tuple4(k)] = flow4(m) })
	each(d, d.FlowsV6, func(k *MasqTupleV6, m *MasqMappingV6) { all[tuple6(k)] = flow6(m) })
	return all
}

// reverses are the pods' sides behind the tuples of replies.
func (d *datapath) reverses() map[tuple]netip.AddrPort {
	d.Helper()
	all := map[tuple]netip.AddrPort{}
	each(d, d.ReverseV4, func(k *MasqTupleV4, r *MasqReverseV4) {
		all[tuple4(k)] = netip.AddrPortFrom(from32(r.Addr), htons(r.Port))
	})
	each(d, d.ReverseV6, func(k *MasqTupleV6, r *MasqReverseV6) {
		all[tuple6(k)] = netip.AddrPortFrom(from128(r.Addr), htons(r.Port))
	})
	return all
}

// inbounds are the noted connections from outside, by the tuple of replies.
func (d *datapath) inbounds() map[tuple]bool {
	d.Helper()
	all := map[tuple]bool{}
	each(d, d.InboundV4, func(k *MasqTupleV4, _ *MasqInbound) { all[tuple4(k)] = true })
	each(d, d.InboundV6, func(k *MasqTupleV6, _ *MasqInbound) { all[tuple6(k)] = true })
	return all
}

// checkPairs holds that each flow has its way back, and each way back its flow.
func (d *datapath) checkPairs() map[tuple]flow {
	d.Helper()
	flows, reverses := d.flows(), d.reverses()
	for t, f := range flows {
		back := tuple{t.dst, f.nat, t.proto}
		if got, ok := reverses[back]; !ok || got != t.src {
			d.Errorf("flow %v behind %v: way back leads to %v", t, f.nat, got)
		}
	}
	if len(flows) != len(reverses) {
		d.Errorf("%d flows, %d ways back: %v, %v", len(flows), len(reverses), flows, reverses)
	}
	return flows
}

// flow is the flow of a packet as it leaves; the test ends without one.
func (d *datapath) flow(p packet) flow {
	d.Helper()
	f, ok := d.flows()[p.tuple()]
	if !ok {
		d.Fatalf("no flow of %v", p)
	}
	return f
}

// change writes a flow back as a test wants it: older, say.
func (d *datapath) change(p packet, f func(created, lastSeen *uint64, state, dying *uint8)) {
	d.Helper()
	key := p.tuple().key()
	if p.src.Is4() {
		var m MasqMappingV4
		if err := d.FlowsV4.Lookup(key, &m); err != nil {
			d.Fatalf("flow of %v: %v", p, err)
		}
		f(&m.Flow.Created, &m.Flow.LastSeen, &m.Flow.State, &m.Flow.Dying)
		d.put(d.FlowsV4, key, &m)
		return
	}
	var m MasqMappingV6
	if err := d.FlowsV6.Lookup(key, &m); err != nil {
		d.Fatalf("flow of %v: %v", p, err)
	}
	f(&m.Flow.Created, &m.Flow.LastSeen, &m.Flow.State, &m.Flow.Dying)
	d.put(d.FlowsV6, key, &m)
}

// age lets a flow have been made and seen so long ago.
func (d *datapath) age(p packet, by time.Duration) {
	d.Helper()
	d.change(p, func(created, lastSeen *uint64, _, _ *uint8) {
		*created -= uint64(by)
		*lastSeen -= uint64(by)
	})
}

// skb is the beginning of struct __sk_buff, as Program.Run takes it.
type skb struct {
	_       [10]uint32
	Ifindex uint32
	_       [5]uint32
}

// result is what became of a packet.
type result struct {
	verdict MasqVerdict
	frame   []byte
}

// exec sends a frame through a program: the kernel's word on it, no checks but
// that of a sum over the packet, if it has one, which has to be right afterwards.
func (d *datapath) exec(direction MasqDirection, frame, out []byte) (uint32, []byte, error) {
	opts := ebpf.RunOptions{Data: frame, DataOut: out}
	if d.ifindex != loopbackIndex {
		opts.Context = &skb{Ifindex: d.ifindex}
	}
	if d.summed {
		opts.Flags = unix.BPF_F_TEST_SKB_CHECKSUM_COMPLETE // since 6.17
	}
	action, err := d.programs[direction].Run(&opts)
	return action, opts.DataOut, err
}

// run sends a frame through a program and holds that exactly one counter
// tells, by one packet and its length, and that the action is the verdict's.
func (d *datapath) run(direction MasqDirection, frame []byte) result {
	d.Helper()
	got, ok := d.try(direction, frame)
	if !ok {
		d.Fatalf("the kernel runs no program on %d octets: %x", len(frame), frame)
	}
	return got
}

// try is run for frames that the kernel may refuse to make a packet of.
func (d *datapath) try(direction MasqDirection, frame []byte) (result, bool) {
	d.Helper()
	action, out, err := d.exec(direction, frame, d.out)
	if errors.Is(err, unix.EINVAL) {
		return result{}, false
	}
	if errors.Is(err, unix.EBADMSG) {
		d.Fatalf("the sum over the packet is wrong afterwards (%d octets: %x)", len(frame), frame)
	}
	if err != nil {
		d.Fatalf("run on %d octets: %v", len(frame), err)
	}
	moved := d.moved(uint64(len(frame)))
	if len(moved) > 1 {
		d.Fatalf("one packet moved the counters %v", moved)
	}
	if len(moved) == 0 {
		if action != actionPass {
			d.Fatalf("action %#x without a verdict", action)
		}
		return result{frame: bytes.Clone(out)}, true
	}
	if moved[0].direction != direction {
		d.Fatalf("counted in the wrong direction: %v", moved)
	}
	want := uint32(actionPass)
	if moved[0].verdict >= MasqVerdictVERDICT_DROP_FIRST {
		want = actionDrop
	}
	if action != want {
		d.Fatalf("%v: action %#x, want %#x", moved[0], action, want)
	}
	return result{moved[0].verdict, bytes.Clone(out)}, true
}

// moved are the counters that went up since the last time: by one packet.
func (d *datapath) moved(size uint64) []fate {
	d.Helper()
	var moved []fate
	before := d.counted
	for f, now := range d.counts() {
		packets, octets := now.Packets-before[f].Packets, now.Bytes-before[f].Bytes
		if packets == 0 && octets == 0 {
			continue
		}
		if packets != 1 || octets != size {
			d.Fatalf("%v counted %d packets of %d octets, want 1 of %d", f, packets, octets, size)
		}
		moved = append(moved, f)
	}
	return moved
}

// counts reads the counters, for the next time too.
func (d *datapath) counts() map[fate]MasqCounter {
	d.Helper()
	d.counted = map[fate]MasqCounter{}
	cpus, index := ebpf.MustPossibleCPU(), 0
	keys := make([]uint32, d.Counters.MaxEntries())
	values := make([]MasqCounter, len(keys)*cpus)
	_, err := d.Counters.BatchLookup(new(ebpf.MapBatchCursor), keys, values, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		d.Fatalf("read counters: %v", err)
	}
	for direction := range MasqDirectionDIRECTION_COUNT {
		for family := range MasqFamilyFAMILY_COUNT {
			for verdict := range MasqVerdictVERDICT_COUNT {
				var sum MasqCounter
				for _, counter := range values[index*cpus:][:cpus] {
					sum.Packets += counter.Packets
					sum.Bytes += counter.Bytes
				}
				index++
				d.counted[fate{direction, family == MasqFamilyFAMILY_V6, verdict}] = sum
			}
		}
	}
	return d.counted
}
