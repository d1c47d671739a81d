// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
)

const (
	notIP         = MasqVerdictVERDICT_NOT_IP
	exempt        = MasqVerdictVERDICT_EXEMPT
	foreign       = MasqVerdictVERDICT_FOREIGN
	keepCIDR      = MasqVerdictVERDICT_KEEP_CIDR
	keepNode      = MasqVerdictVERDICT_KEEP_NODE
	nodeOpened    = MasqVerdictVERDICT_NODE_OPENED
	keepReply     = MasqVerdictVERDICT_KEEP_REPLY
	keepDraining  = MasqVerdictVERDICT_KEEP_DRAINING
	closed        = MasqVerdictVERDICT_CLOSED
	passInvalid   = MasqVerdictVERDICT_PASS_INVALID
	noFlow        = MasqVerdictVERDICT_NO_FLOW
	inbound       = MasqVerdictVERDICT_INBOUND
	translated    = MasqVerdictVERDICT_TRANSLATED
	fastPath      = MasqVerdictVERDICT_FAST_PATH
	opened        = MasqVerdictVERDICT_OPENED
	icmpError     = MasqVerdictVERDICT_ICMP_ERROR
	portExhausted = MasqVerdictVERDICT_DROP_PORT_EXHAUSTED
	tableFull     = MasqVerdictVERDICT_DROP_TABLE_FULL
	dropFragment  = MasqVerdictVERDICT_DROP_FRAGMENT
	dropInvalid   = MasqVerdictVERDICT_DROP_INVALID
	unsupported   = MasqVerdictVERDICT_DROP_UNSUPPORTED
	noAddress     = MasqVerdictVERDICT_DROP_NO_ADDRESS
)

// step is a packet, its verdict, and what it looks like afterwards; or
// something that is done between packets.
type step struct {
	direction MasqDirection
	in        packet
	verdict   MasqVerdict
	out       packet
	do        func(*datapath)
}

func do(f func(*datapath)) step { return step{do: f} }

// leaves is a step at egress, arrives one at ingress. Without a packet to
// come out, what goes in comes out as it was.
func leaves(in packet, verdict MasqVerdict, out ...packet) step {
	return step{direction: egress, in: in, verdict: verdict, out: append(out, in)[0]}
}

func arrives(in packet, verdict MasqVerdict, out ...packet) step {
	if in.mac == ([6]uint8{}) {
		in.mac = routerMAC
	}
	s := step{direction: ingress, in: in, verdict: verdict, out: append(out, in)[0]}
	s.out.mac = in.mac
	return s
}

// take runs one step and holds its verdict, the packet with all checksums, and
// what it did to the maps: opening makes one flow, and nothing else does.
func (d *datapath) take(name string, s step) {
	d.Helper()
	if s.do != nil {
		s.do(d)
		return
	}
	flows, noted := len(d.flows()), len(d.inbounds())
	got := d.run(s.direction, s.in.frame())
	if got.verdict != s.verdict {
		d.Fatalf("%s: %v: got %s, want %s", name, s.in, verdictName(got.verdict), verdictName(s.verdict))
	}
	if want := s.out.frame(); !bytes.Equal(got.frame, want) {
		d.Fatalf("%s: %v became not %v: %s", name, s.in, s.out, difference(got.frame, want))
	}
	wantFlows, wantNoted := flows, noted
	if s.verdict == opened || s.verdict == nodeOpened {
		wantFlows++
	}
	if s.verdict == inbound {
		wantNoted++
	}
	if after := len(d.checkPairs()); after != wantFlows {
		d.Fatalf("%s: %d flows after %d, want %d", name, after, flows, wantFlows)
	}
	if after := len(d.inbounds()); after > wantNoted {
		d.Fatalf("%s: %d connections from outside noted after %d", name, after, noted)
	}
}

// difference shows where frames first differ.
func difference(got, want []byte) string {
	at := 0
	for at < min(len(got), len(want)) && got[at] == want[at] {
		at++
	}
	part := func(frame []byte) []byte { return frame[min(len(frame), max(0, at-8)):min(len(frame), at+40)] }
	return fmt.Sprintf("octet %d of %d:\n got …%x…\nwant …%x…", at, len(got), part(got), part(want))
}

// open lets a packet open a flow and returns the packet as it leaves.
func (d *datapath) open(p packet) packet {
	d.Helper()
	flows := len(d.flows())
	got := d.run(egress, p.frame())
	if got.verdict != opened {
		d.Fatalf("%v: got %s, want a flow opened", p, verdictName(got.verdict))
	}
	nat := d.flow(p).nat
	out := p.from(nat.Addr(), nat.Port())
	if want := out.frame(); !bytes.Equal(got.frame, want) {
		d.Fatalf("%v became not %v: %s", p, out, difference(got.frame, want))
	}
	if after := len(d.checkPairs()); after != flows+1 {
		d.Fatalf("%v: %d flows after %d", p, after, flows)
	}
	return out
}

// row is one case of a table, named after its outcome. trap is the number of
// the known mistake that it guards against, where it has one.
type row struct {
	name   string
	trap   int
	config config
	only   *hosts // one family
	steps  func(h hosts) []step
}

// ways are those in which a packet can be rewritten: in place or, as on a kernel
// that does not let us, by helpers; with its checksum in the header only, or with
// a sum over the whole packet beside it too, as devices give it.
var ways = []struct {
	name            string
	inPlace, summed bool
}{
	{"in place", true, false},
	{"in place, summed", true, true},
	{"by helpers", false, false},
	{"by helpers, summed", false, true},
}

// runTable runs each row in each family and way, on a datapath without a past.
func runTable(t *testing.T, rows []row) {
	t.Helper()
	for _, r := range rows {
		of := families
		if r.only != nil {
			of = []hosts{*r.only}
		}
		for _, h := range of {
			for _, way := range ways {
				r.config.ctinfo = way.inPlace
				t.Run(fmt.Sprintf("%s/%v/%s", r.name, h, way.name), func(t *testing.T) { r.run(t, h, way.summed) })
			}
		}
	}
}

func (r row) run(t *testing.T, h hosts, summed bool) {
	t.Helper()
	d := borrow(t, r.config)
	d.summed = summed && !r.config.noHeader // the kernel sums up what follows an Ethernet header
	for i, s := range r.steps(h) {
		d.take(fmt.Sprintf("step %d", i), s)
	}
}

// forget empties a datapath for a test and configures it anew.
func (d *datapath) forget(t testing.TB, c config) {
	t.Helper()
	d.TB = t
	d.endFlows()
	for _, m := range []*ebpf.Map{
		d.NonmasqV4, d.NonmasqV6, d.DrainingV4, d.DrainingV6, d.NodeV4, d.NodeV6, d.AddressesV4, d.AddressesV6,
	} {
		empty(t, m)
	}
	for _, is6 := range []bool{false, true} {
		d.sticky(is6, MasqSticky{})
		d.put(d.Moved, familyIndex(is6), uint64(0))
	}
	d.ifindex = loopbackIndex
	d.summed = false
	d.fill(c)
	d.counts()
}

// endFlows empties what the datapath itself writes.
func (d *datapath) endFlows() {
	d.Helper()
	for _, m := range []*ebpf.Map{
		d.FlowsV4, d.FlowsV6, d.ReverseV4, d.ReverseV6, d.InboundV4, d.InboundV6, d.FragmentsV4, d.FragmentsV6,
		d.TalkersV4, d.TalkersV6, d.WaysV4, d.WaysV6, d.PodLinks,
	} {
		empty(d, m)
	}
}

func empty(t testing.TB, m *ebpf.Map) {
	t.Helper()
	var keys [][]byte
	var key, value []byte
	entries := m.Iterate()
	for entries.Next(&key, &value) {
		keys = append(keys, bytes.Clone(key))
	}
	if err := entries.Err(); err != nil {
		t.Fatalf("read %s: %v", m, err)
	}
	for _, key := range keys {
		if err := m.Delete(key); err != nil {
			t.Fatalf("empty %s: %v", m, err)
		}
	}
}
