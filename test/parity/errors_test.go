// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/lab"
)

// closedPort is one that nobody serves.
const closedPort = 7

// icmpErrors: what is said about translated flows must reach who sent them, in
// their own terms.
func icmpErrors() []row {
	return []row{
		{name: "refusal of a closed TCP port", scenario: refusedTCP},
		{name: "refusal of a closed UDP port", scenario: refusedUDP},
		{name: "path MTU reaches the pod", scenario: pathMTU},
		{name: "path MTU towards the pod reaches the remote", scenario: podMTU},
		{name: "hop limit ends at the node", scenario: expired(1, remote)},
		{name: "hop limit ends at the router", scenario: expired(2, remote)},
		{name: "hop limit ends on the way to an exempt range", scenario: expired(2, inside)},
		{name: "pod refuses an answer", scenario: podRefuses},
	}
}

func (b *bench) closed(is6 bool) netip.AddrPort {
	return netip.AddrPortFrom(b.lab.Remote.Addr(is6), closedPort)
}

func refusedTCP(b *bench, is6 bool) {
	conn, err := b.namespace(podA).DialContext(b.Context(), tcp, netip.AddrPort{}, b.closed(is6).String())
	if err == nil {
		conn.Close()
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		b.Errorf("got %v, want a refusal", err)
	}
}

func refusedUDP(b *bench, is6 bool) {
	conn, err := b.namespace(podA).DialContext(b.Context(), udp, netip.AddrPort{}, b.closed(is6).String())
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "anyone?"); err != nil {
		b.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(lab.Patience(settleTime))); err != nil {
		b.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNREFUSED) {
		b.Errorf("got %v, want a refusal", err)
	}
}

// pathMTU: large datagrams are refused by the router, and the pod learns it.
func pathMTU(b *bench, is6 bool) {
	to := netip.AddrPortFrom(b.lab.Remote2.Addr(is6), service)
	conn, err := b.namespace(routedA).Dial(b.Context(), udp, netip.AddrPort{}, to)
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, strings.Repeat("x", 1400)); err != nil {
		b.Fatal(err)
	}
	var route string
	for deadline := time.Now().Add(lab.Patience(settleTime)); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if route, err = b.namespace(routedA).Run(b.Context(), "ip", "route", "get", to.Addr().String()); err != nil {
			b.Fatal(err)
		}
		if strings.Contains(route, "mtu 1300") {
			return
		}
	}
	b.Errorf("the pod does not know the path MTU: %s", route)
}

// podMTU: the node's way to the pod takes less than the remote sends. The node
// says so, about the flow as the remote knows it, and the data arrives.
func podMTU(b *bench, is6 bool) {
	pod := b.lab.RoutedPods[0]
	route := []string{"route", "replace", pod.Addr(is6).String(), "dev", pod.Host.Name}
	forget := []string{"route", "flush", "cache"}
	if is6 {
		route, forget = append([]string{"-6"}, route...), append([]string{"-6"}, forget...)
	}
	run := func(at host, args ...string) {
		b.Helper()
		if out, err := b.namespace(at).Run(context.WithoutCancel(b.Context()), "ip", args...); err != nil {
			b.Fatalf("%v: %s", err, out)
		}
	}
	run(hostNode, append(route, "mtu", "1300")...)
	defer func() {
		run(hostNode, route...)
		run(outside, forget...)
	}()
	wire := lab.NewCapture(b, b.lab.Wires[0])
	transferWith(b, is6, routedA, shortTransfer)
	news := wire.Await(b, "news of the MTU", func(p *lab.Packet) bool { return !p.Outgoing && p.Inner != nil })
	if want := b.lab.Addresses.Node.Addr(is6); news.Src != want || news.Inner.Dst != want {
		b.Errorf("the remote is told by %s", &news)
	}
}

// expired sends a datagram that dies on its way, and waits for the news.
func expired(hops uint8, dst place) func(*bench, bool) {
	return func(b *bench, is6 bool) { expire(b, is6, hops, dst(b.lab).Addr(is6)) }
}

func expire(b *bench, is6 bool, hops uint8, dst netip.Addr) {
	b.Helper()
	pod := b.lab.Pods[0]
	capture := lab.NewCapture(b, pod.Link)
	from, to := netip.AddrPortFrom(pod.Addr(is6), b.freshPort()), netip.AddrPortFrom(dst, 33434)
	packet := lab.UDP(from, to, []byte("how far?"))
	if is6 {
		packet[7] = hops
	} else {
		packet[8] = hops
		if err := lab.FixChecksums(packet); err != nil {
			b.Fatal(err)
		}
	}
	if err := pod.Link.Send(packet); err != nil {
		b.Fatal(err)
	}
	capture.Await(b, "time exceeded about the pod's own packet", func(p *lab.Packet) bool {
		return !p.Outgoing && p.Inner != nil && p.Dst == from.Addr() &&
			p.Inner.Source() == from && p.Inner.Destination() == to
	})
}

// podRefuses: nobody in the pod has a socket for the answer, so the pod says
// so to the remote, about the flow as the remote knows it.
func podRefuses(b *bench, is6 bool) {
	pod := b.lab.Pods[0]
	from := netip.AddrPortFrom(pod.Addr(is6), b.freshPort())
	to := netip.AddrPortFrom(b.lab.Remote.Addr(is6), service)
	wire := lab.NewCapture(b, b.lab.Wires[0])
	if err := pod.Link.Send(lab.UDP(from, to, []byte("question"))); err != nil {
		b.Fatal(err)
	}
	request := wire.Await(b, "request", func(p *lab.Packet) bool {
		return !p.Outgoing && p.Proto == unix.IPPROTO_UDP && p.Destination() == to
	})
	refusal := wire.Await(b, "refusal", func(p *lab.Packet) bool {
		return !p.Outgoing && p.Inner != nil && p.Inner.Source() == to
	})
	if want := b.lab.Addresses.Node.Addr(is6); refusal.Src != want || refusal.Inner.Destination() != request.Source() {
		b.Errorf("refusal %s of %s", &refusal, &request)
	}
}
