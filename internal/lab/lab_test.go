// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// everyone are the hosts of the lab that an application may run on.
func (l *Lab) everyone() []*Pod {
	node := &Pod{Namespace: l.Node, Pair: l.Addresses.Node}
	return append(append([]*Pod{node}, l.Pods...), l.RoutedPods...)
}

func TestEveryoneReachesEveryoneUntranslated(t *testing.T) {
	for _, offloads := range []bool{true, false} {
		t.Run(fmt.Sprintf("offloads=%t", offloads), func(t *testing.T) {
			t.Parallel()
			l := New(t, Options{NoOffloads: !offloads, SecondUplink: true})
			for _, wire := range l.Wires {
				NewCapture(t, wire)
			}
			for _, remote := range l.outside() {
				for _, network := range []string{"tcp", "udp"} {
					at := l.Outside.Serve(t, network, netip.AddrPortFrom(remote, 0))
					for _, from := range l.everyone() {
						checkUntranslated(t, from, network, at)
					}
				}
			}
		})
	}
}

func checkUntranslated(t *testing.T, from *Pod, network string, at netip.AddrPort) {
	t.Helper()
	local := netip.AddrPortFrom(from.Addr(at.Addr().Is6()), 0)
	conn, err := from.Dial(t.Context(), network, local, at)
	if err != nil {
		t.Errorf("%s: %v", from.Name(), err)
		return
	}
	defer conn.Close()
	if want := conn.LocalAddr().String(); conn.Seen.String() != want {
		t.Errorf("%s saw %s of %s, want %s", at, conn.Seen, from.Name(), want)
	}
	ping, err := from.NewPing(local.Addr(), at.Addr(), 0)
	if err != nil {
		t.Error(err)
		return
	}
	defer ping.Close()
	if err := ping.Echo([]byte("are you there?")); err != nil {
		t.Errorf("%s: %v", from.Name(), err)
	}
}

func TestWireShowsPodAddressWhenNothingTranslates(t *testing.T) {
	t.Parallel()
	l := New(t, Options{RoutedPods: -1})
	wire := NewCapture(t, l.Wires[0])
	for _, is6 := range []bool{false, true} {
		pod := l.Pods[0]
		at := l.Outside.Serve(t, "udp", netip.AddrPortFrom(l.Remote.Addr(is6), 53))
		checkUntranslated(t, pod, "udp", at)
		wire.Await(t, "packet of the pod", func(p *Packet) bool {
			return p.Proto == unix.IPPROTO_UDP && !p.Outgoing && p.Src == pod.Addr(is6) && p.Destination() == at
		})
		wire.Await(t, "answer", func(p *Packet) bool {
			return p.Proto == unix.IPPROTO_UDP && p.Outgoing && p.Source() == at && p.Dst == pod.Addr(is6)
		})
	}
	failed := &recorder{TB: t}
	wire.NoPodAddress(failed)
	if len(failed.errors) == 0 {
		t.Error("NoPodAddress did not see the pod's address")
	}
	failed = &recorder{TB: t}
	wire.NoPodAddress(failed, netip.PrefixFrom(l.Remote.V4, 32), netip.PrefixFrom(l.Remote.V6, 128))
	if len(failed.errors) != 0 {
		t.Errorf("NoPodAddress does not make exceptions: %q", failed.errors)
	}
}

// recorder is a test that notes what it would fail for.
type recorder struct {
	testing.TB

	errors []string
}

func (r *recorder) Helper() {}

func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}

func TestCaptureFindsWrongChecksum(t *testing.T) {
	t.Parallel()
	l := New(t, Options{Pods: 1, RoutedPods: -1})
	wire := NewCapture(t, l.Wires[0])
	wire.AllowFaults()
	packet := UDP(netip.AddrPortFrom(l.Pods[0].V4, 1000), netip.AddrPortFrom(l.Remote.V4, 9), make([]byte, 200))
	packet[len(packet)-1] ^= 1
	pieces, err := Fragment(packet, 1, 120)
	if err != nil {
		t.Fatal(err)
	}
	for _, sent := range append(pieces, packet) {
		if err := l.Pods[0].Link.Send(sent); err != nil {
			t.Fatal(err)
		}
	}
	wire.Await(t, "packet", func(p *Packet) bool { return p.SPort == 1000 && !p.IsFragment() })
	wire.mu.Lock()
	defer wire.mu.Unlock()
	if len(wire.faults) != 2 || !strings.Contains(wire.faults[0].Error(), "joined") || !strings.Contains(wire.faults[1].Error(), "checksum") {
		t.Errorf("faults %v, want two about checksums", wire.faults)
	}
}

func TestConntrackOnlyWhereAskedFor(t *testing.T) {
	for _, on := range []bool{true, false} {
		t.Run(fmt.Sprintf("conntrack=%t", on), func(t *testing.T) {
			t.Parallel()
			l := New(t, Options{Pods: 1, RoutedPods: -1, Conntrack: on})
			at := l.Outside.Serve(t, "udp", netip.AddrPortFrom(l.Remote.V4, 53))
			checkUntranslated(t, l.Pods[0], "udp", at)
			n, err := l.TrackedConnections()
			if err != nil || n > 0 != on {
				t.Errorf("node tracks %d connections, %v", n, err)
			}
		})
	}
}

func TestOffloadsShowOnTheWire(t *testing.T) {
	for _, on := range []bool{true, false} {
		t.Run(fmt.Sprintf("offloads=%t", on), func(t *testing.T) {
			t.Parallel()
			l := New(t, Options{Pods: 1, RoutedPods: 1, NoOffloads: !on})
			wire := NewCapture(t, l.Wires[0])
			at := l.Outside.Serve(t, "tcp", netip.AddrPortFrom(l.Remote.V6, 0))
			for _, pod := range l.everyone() {
				conn, err := pod.Dial(t.Context(), "tcp", netip.AddrPort{}, at)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := conn.Exchange(strings.Repeat("x", 60000) + "\n"); err != nil {
					t.Error(err)
				}
				conn.Close()
				partial, long := 0, 0
				for _, p := range wire.Select(func(p *Packet) bool { return p.Src == pod.V6 }) {
					if p.Partial {
						partial++
					}
					if p.Length > defaultMTU {
						long++
					}
				}
				if partial > 0 != on || long > 0 != on {
					t.Errorf("%s: %d packets with partial checksums, %d longer than the MTU", pod.Name(), partial, long)
				}
			}
		})
	}
}

func TestForwardReachesPod(t *testing.T) {
	t.Parallel()
	l := New(t, Options{Pods: 1, RoutedPods: 1})
	for _, is6 := range []bool{false, true} {
		at := l.RoutedPods[0].Serve(t, "tcp", netip.AddrPortFrom(l.RoutedPods[0].Addr(is6), 80))
		for _, address := range []Pair{l.Addresses.Node, l.VIP} {
			service := netip.AddrPortFrom(address.Addr(is6), 30080)
			if err := l.Forward("tcp", service, at); err != nil {
				t.Fatal(err)
			}
			conn, err := l.Outside.Dial(t.Context(), "tcp", netip.AddrPortFrom(l.Client.Addr(is6), 0), service)
			if err != nil {
				t.Fatal(err)
			}
			if conn.Seen.Addr() != l.Client.Addr(is6) {
				t.Errorf("the pod sees %s", conn.Seen)
			}
			conn.Close()
		}
	}
}

func TestFragmentsAreJoinedByTheReceiver(t *testing.T) {
	t.Parallel()
	l := New(t, Options{Pods: 1, RoutedPods: 1})
	wire := NewCapture(t, l.Wires[0])
	for _, is6 := range []bool{false, true} {
		at := l.Outside.Serve(t, "udp", netip.AddrPortFrom(l.Remote.Addr(is6), 0))
		for i, pod := range []*Pod{l.Pods[0], l.RoutedPods[0]} {
			from := netip.AddrPortFrom(pod.Addr(is6), uint16(2000+i))
			fragments, err := Fragment(UDP(from, at, make([]byte, 4000)), 77, defaultMTU)
			if err != nil || len(fragments) != 3 {
				t.Fatalf("%d fragments, %v", len(fragments), err)
			}
			if err := pod.Link.Send(fragments...); err != nil {
				t.Fatal(err)
			}
			wire.Await(t, "last fragment of the answer", func(p *Packet) bool {
				return p.Src == at.Addr() && p.Dst == from.Addr() && p.FragmentAt > 0 && !p.More
			})
		}
	}
}

func TestDoPassesFailureOn(t *testing.T) {
	t.Parallel()
	l := New(t, Options{Pods: -1, RoutedPods: -1})
	for name, f := range map[string]func() error{
		"panic":   func() error { panic("in the namespace") },
		"FailNow": func() error { runtime.Goexit(); return nil },
	} {
		wentOn := false
		done := make(chan any)
		go func() {
			defer func() { done <- recover() }()
			_ = l.Node.Do(f)
			wentOn = true
		}()
		if r := <-done; wentOn || r != nil != (name == "panic") {
			t.Errorf("%s: recovered %v, caller went on: %t", name, r, wentOn)
		}
	}
}

func TestCommandEndsWithItsContext(t *testing.T) {
	t.Parallel()
	l := New(t, Options{Pods: -1, RoutedPods: -1})
	out, err := l.Node.Run(t.Context(), "ip", "-o", "link", "show", "eth0")
	if err != nil || !strings.Contains(out, "eth0@") {
		t.Errorf("%q, %v", out, err)
	}
	cmd := l.Node.Command(t.Context(), "sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || time.Since(start) > 5*time.Second {
		t.Errorf("ended after %v with %v", time.Since(start), err)
	}
	if _, err := l.Node.Run(t.Context(), "ls", "/nowhere"); err == nil || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("error %v does not say what the command said", err)
	}
}
