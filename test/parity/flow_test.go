// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"ip-masq-agent/internal/lab"
)

const (
	tcp  = "tcp"
	udp  = "udp"
	icmp = "icmp"

	// service is the port that every host serves.
	service = 7777
)

// host is who sends or serves.
type host int

const (
	outside host = iota
	podA
	podB
	routedA
	hostNode
)

// bench is a lab with a subject at work.
type bench struct {
	*testing.T

	lab     *lab.Lab
	variant variant
	subject *subject
	wires   []*lab.Capture
	port    *atomic.Uint32 // the last one used by a row
	start   time.Time      // of the subtest

	earlier map[bool][]*sticky // by family: open before the subject was there
}

// with gives the same bench for a subtest.
func (b *bench) with(t *testing.T) *bench {
	c := *b
	c.T, c.start = t, time.Now()
	return &c
}

// freshPort gives a port that no other row uses, so that none meets what an
// earlier one left in the node.
func (b *bench) freshPort() uint16 {
	return uint16(b.port.Add(1))
}

func (b *bench) namespace(h host) *lab.Namespace {
	switch h {
	case podA:
		return b.lab.Pods[0].Namespace
	case podB:
		return b.lab.Pods[1].Namespace
	case routedA:
		return b.lab.RoutedPods[0].Namespace
	case hostNode:
		return b.lab.Node
	}
	return b.lab.Outside
}

// own is the address that a host uses by itself.
func (b *bench) own(h host) lab.Pair {
	switch h {
	case podA:
		return b.lab.Pods[0].Pair
	case podB:
		return b.lab.Pods[1].Pair
	case routedA:
		return b.lab.RoutedPods[0].Pair
	case hostNode:
		return b.lab.Addresses.Node
	}
	return b.lab.Client
}

// live is a flow that was opened.
type live struct {
	flow

	remote netip.AddrPort
	port   uint16 // as the client has it
	seen   netip.AddrPort
	ask    func() (netip.AddrPort, error)
	close  func() error
}

// check opens the flows of a row, uses them all at once and compares what the
// servers see.
func (b *bench) check(proto string, is6 bool, flows []flow) {
	b.Helper()
	port := b.freshPort()
	var open []*live
	for i, f := range flows {
		if f.port == 0 {
			f.port = port
		}
		l, err := b.open(proto, is6, f)
		if err != nil {
			b.Fatalf("flow %d: %v; on the wire:\n%s", i, err, b.wireLog(f.to(b.lab).Addr(is6)))
		}
		defer l.close()
		open = append(open, l)
	}
	for range 2 {
		for i, l := range open {
			seen, err := l.ask()
			if err != nil {
				b.Fatalf("flow %d, once open: %v; on the wire:\n%s", i, err, b.wireLog(l.remote.Addr()))
			}
			l.seen = seen
			b.checkSeen(i, proto, is6, l)
		}
	}
	b.checkDistinct(open)
	if b.Failed() {
		b.Logf("on the wire:\n%s%s", b.wireLog(open[0].remote.Addr()), b.translations(open[0].remote.Addr()))
	}
}

// translations is what the eBPF datapath holds towards an address.
func (b *bench) translations(remote netip.Addr) string {
	if b.variant.subject != ebpf {
		return ""
	}
	return "translations:\n" + lab.RunAgent(b, b.lab.Node, "nat", "list", "--dst="+remote.String()).Stdout
}

func (b *bench) checkSeen(i int, proto string, is6 bool, l *live) {
	b.Helper()
	want := b.own(l.from).Addr(is6)
	if l.flow.seen != nil {
		want = l.flow.seen(b.lab).Addr(is6)
	}
	if l.seen.Addr() != want {
		b.Errorf("flow %d comes from %s, want %s", i, l.seen, want)
	}
	first, last := portClass(proto, l.port)
	got := l.seen.Port()
	if got < first || got > last {
		b.Errorf("flow %d comes from port %d, not one from %d to %d", i, got, first, last)
	}
	mayDiffer, mayBeSame := l.mayDiffer(b.variant.randomFully)
	if got != l.port && !mayDiffer {
		mayDiffer = b.usedBefore(netip.AddrPortFrom(want, l.port), l.remote.Addr())
	}
	if got == l.port && !mayBeSame || got != l.port && !mayDiffer {
		b.Errorf("flow %d of port %d comes from port %d", i, l.port, got)
	}
}

// usedBefore reports whether a flow of an earlier row came from the same
// address and port: one whose port was chosen at random may have met that of a
// later row, which then must move.
func (b *bench) usedBefore(source netip.AddrPort, remote netip.Addr) bool {
	for _, wire := range b.wires {
		if len(wire.Select(func(p *lab.Packet) bool {
			return p.Dst == remote && p.Source() == source && p.At.Before(b.start)
		})) > 0 {
			return true
		}
	}
	return false
}

// mayDiffer says whether the port that is seen may be another than the
// client's, and whether it may be the same.
func (l *live) mayDiffer(randomFully bool) (another, own bool) {
	switch {
	case l.flow.seen == nil || l.ports == same:
		return false, true
	case l.ports == free:
		return randomFully, true
	case l.ports == taken:
		return true, randomFully // the other flow may have got yet another
	case l.ports == barred:
		return true, false
	}
	return true, true
}

// portClass is the range in which the kernel looks for a port in place of
// port, see nf_nat_l4proto_unique_tuple.
func portClass(proto string, port uint16) (first, last uint16) {
	switch {
	case proto == icmp:
		return 0, 65535
	case port < 512:
		return 1, 511
	case port < 1024:
		return 600, 1023
	}
	return 1024, 65535
}

func (b *bench) checkDistinct(open []*live) {
	b.Helper()
	for i, x := range open {
		for j, y := range open[:i] {
			if x.remote == y.remote && x.seen == y.seen {
				b.Errorf("flows %d and %d to %s both come from %s", j, i, x.remote, x.seen)
			}
		}
	}
}

func (b *bench) open(proto string, is6 bool, f flow) (*live, error) {
	l := &live{flow: f, port: f.port}
	source := b.own(f.from)
	if f.source != nil {
		source = f.source(b.lab)
	}
	local := netip.AddrPortFrom(source.Addr(is6), f.port)
	remotePort := f.service
	if remotePort == 0 {
		remotePort = service
	}
	l.remote = netip.AddrPortFrom(f.to(b.lab).Addr(is6), remotePort)
	if proto == icmp {
		return l, b.openPing(l, local)
	}
	conn, err := b.namespace(f.from).Dial(b.Context(), proto, local, l.remote)
	if err != nil {
		return nil, err
	}
	l.close, l.ask = conn.Close, conn.Ask
	if f.size > 0 {
		l.ask = func() (netip.AddrPort, error) { return conn.Exchange(strings.Repeat("x", f.size)) }
	}
	return l, nil
}

// openPing: what the remote sees of a ping is read off the wire, where the
// request is told by its payload.
func (b *bench) openPing(l *live, local netip.AddrPort) error {
	ping, err := b.namespace(l.from).NewPing(local.Addr(), l.remote.Addr(), local.Port())
	if err != nil {
		return err
	}
	l.port, l.close = ping.ID, ping.Close
	asked := 0
	l.ask = func() (netip.AddrPort, error) {
		asked++
		mark := fmt.Appendf(nil, "%s %d from %d, question %d|", b.Name(), local.Port(), l.from, asked)
		if err := ping.Echo(slices.Concat(mark, make([]byte, l.size))); err != nil || l.offWires {
			return local, err
		}
		return b.findRequest(l.remote.Addr(), mark)
	}
	_, err = l.ask()
	return err
}

func (b *bench) findRequest(to netip.Addr, mark []byte) (netip.AddrPort, error) {
	for _, wire := range b.wires {
		for _, p := range wire.Select(func(p *lab.Packet) bool {
			return p.Dst == to && (p.Type == 8 || p.Type == 128) && bytes.HasPrefix(p.Payload, mark)
		}) {
			return p.Source(), nil
		}
	}
	return netip.AddrPort{}, fmt.Errorf("no request to %s on the wire", to)
}

// wireLog is what passed the uplinks to and from an address in this subtest.
func (b *bench) wireLog(addr netip.Addr) string {
	var s strings.Builder
	for _, wire := range b.wires {
		packets := wire.Select(func(p *lab.Packet) bool {
			return p.At.After(b.start) && (p.Src == addr || p.Dst == addr)
		})
		for _, p := range packets[max(0, len(packets)-20):] {
			fmt.Fprintf(&s, "  %s %s\n", p.At.Format(time.StampMilli), &p)
		}
	}
	return s.String()
}
