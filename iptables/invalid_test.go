// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"net/netip"
	"testing"
	"time"

	"ip-masq-agent/internal/lab"
	"ip-masq-agent/internal/prefix"
)

// labPolicy is the list of a lab's cluster, with an exception.
func labPolicy() *prefix.Policy {
	return prefix.New(prefix.Lists{
		LinkLocal:     linkLocal(),
		NonMasquerade: prefixes("10.0.0.0/8", "192.168.0.0/16", "fd00::/8"),
		Masquerade:    prefixes("10.99.0.0/16", "fd00:99::/32"),
	})
}

// TestInvalidIsDropped: a packet of no known flow leaves an uplink with a pod's
// address only towards exempt destinations. With --invalid=pass it always does,
// as with the classic agent.
func TestInvalidIsDropped(t *testing.T) {
	eachMode(t, func(t *testing.T, _ *node, m mode) {
		for _, drop := range []bool{true, false} {
			for _, f := range families() {
				name := f.String() + map[bool]string{true: " drop", false: " pass"}[drop]
				t.Run(name, func(t *testing.T) { testInvalid(t, m, f, drop) })
			}
		}
	})
}

func testInvalid(t *testing.T, m mode, f family, drop bool) {
	l := lab.New(t, lab.Options{Pods: 1, RoutedPods: -1})
	n := nodeOf(t, l)
	n.prefer(m)
	options := n.options()
	options.DropInvalid = drop
	d := n.datapath(options)
	n.sync(d, labPolicy())
	is6 := f == ipv6
	pod := l.Pods[0]
	wire := lab.NewCapture(t, l.Wires[0])
	reset := func(to netip.Addr) []byte {
		return lab.TCP(netip.AddrPortFrom(pod.Addr(is6), 4000), netip.AddrPortFrom(to, 80), lab.RST, 1, 0, nil)
	}
	destinations := []struct {
		to     netip.Addr
		exempt bool
	}{{l.Remote.Addr(is6), false}, {l.Exception.Addr(is6), false}, {l.Inside.Addr(is6), true}}
	for _, dst := range destinations {
		if err := pod.Link.Send(reset(dst.to)); err != nil {
			t.Fatal(err)
		}
	}
	for _, dst := range destinations {
		want := dst.exempt || !drop
		_, seen := wire.Wait(map[bool]time.Duration{true: 5 * time.Second, false: 300 * time.Millisecond}[want], func(p *lab.Packet) bool {
			return p.Dst == dst.to && p.Src == pod.Addr(is6)
		})
		if seen != want {
			t.Errorf("RST to %s left with the pod's address: %t, want %t\n%s", dst.to, seen, want, wire)
		}
	}
	want := uint64(0)
	if drop {
		want = 2
	}
	if got := n.stats(d).Drops["invalid"]; got != want {
		t.Errorf("%d drops counted, want %d", got, want)
	}
	n.sync(d, labPolicy())
	n.sync(d, prefix.New(prefix.Lists{}))
	if got := n.stats(d).Drops["invalid"]; got != want {
		t.Errorf("%d drops counted after a rewrite, want %d", got, want)
	}
}

// TestKnownFlowsAreNotHarmed: connections from and to pods go on with
// --invalid=drop, their closing included.
func TestKnownFlowsAreNotHarmed(t *testing.T) {
	eachMode(t, func(t *testing.T, _ *node, m mode) {
		l := lab.New(t, lab.Options{Pods: 1, RoutedPods: -1})
		n := nodeOf(t, l)
		n.prefer(m)
		options := n.options()
		options.DropInvalid = true
		d := n.datapath(options)
		n.sync(d, labPolicy())
		pod := l.Pods[0]
		for _, is6 := range []bool{false, true} {
			out := l.Outside.Serve(t, "tcp", netip.AddrPortFrom(l.Remote.Addr(is6), 0))
			conn, err := pod.Dial(t.Context(), "tcp", netip.AddrPort{}, out)
			if err != nil {
				t.Fatal(err)
			}
			if conn.Seen.Addr() != l.Addresses.Node.Addr(is6) {
				t.Errorf("seen as %s, want %s", conn.Seen.Addr(), l.Addresses.Node.Addr(is6))
			}
			if _, err := conn.Ask(); err != nil {
				t.Error(err)
			}
			if err := conn.Close(); err != nil {
				t.Error(err)
			}
			in := pod.Serve(t, "tcp", netip.AddrPortFrom(pod.Addr(is6), 0))
			conn, err = l.Outside.Dial(t.Context(), "tcp", netip.AddrPortFrom(l.Client.Addr(is6), 0), in)
			if err != nil {
				t.Fatal(err)
			}
			if err := conn.Close(); err != nil {
				t.Error(err)
			}
		}
		if got := n.stats(d); got.Drops["invalid"] != 0 || got.TranslationsV4 == 0 || got.TranslationsV6 == 0 {
			t.Errorf("got %+v", got)
		}
	})
}
