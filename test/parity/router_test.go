// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/lab"
)

// routers: what the RFCs on NAT ask and the node's own kernel answers, since
// the outside address is the node's and the node is a router.
func routers() []row {
	return []row{
		{name: "outside port of another pod is the node's", scenario: hairpin},
		{name: "unexpected SYN is refused by the node", scenario: unexpectedSYN},
		{name: "MTU of the uplink reaches the pod", scenario: uplinkMTU},
	}
}

// hairpin: a pod sends to the outside tuple of another. That is the node's
// address, so the node refuses, and the other pod gets nothing.
func hairpin(b *bench, is6 bool) {
	_, local, outer, _ := b.exchanged(is6, remote)
	arrival := lab.NewCapture(b, b.lab.Pods[0].Link)
	conn, err := b.namespace(podB).DialContext(b.Context(), udp, netip.AddrPort{}, outer.String())
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
	if got := arrival.Select(func(p *lab.Packet) bool { return !p.Outgoing && p.Destination() == local }); len(got) > 0 {
		b.Errorf("reached the pod: %s", &got[0])
	}
}

// unexpectedSYN: nobody listens there, and no pod has opened anything.
func unexpectedSYN(b *bench, is6 bool) {
	to := netip.AddrPortFrom(b.lab.Addresses.Node.Addr(is6), b.freshPort())
	from := netip.AddrPortFrom(b.lab.Client.Addr(is6), b.freshPort())
	if err := b.lab.End.Send(lab.TCP(from, to, lab.SYN, 1, 0, nil)); err != nil {
		b.Fatal(err)
	}
	answer := b.wires[0].Await(b, "answer to the SYN", func(p *lab.Packet) bool {
		return !p.Outgoing && p.Proto == unix.IPPROTO_TCP && p.Source() == to && p.Destination() == from
	})
	if answer.Flags&lab.RST == 0 {
		b.Errorf("answer %s is no refusal", &answer)
	}
}

// uplinkMTU: the node itself is where the path becomes narrow. It refuses what
// must not be cut, and tells the pod.
func uplinkMTU(b *bench, is6 bool) {
	to := b.lab.ViaUplink2.Addr(is6)
	uplink := b.lab.Uplinks[1]
	setMTU := func(mtu string) {
		b.Helper()
		if out, err := b.namespace(hostNode).Run(b.Context(), "ip", "link", "set", uplink.Name, "mtu", mtu); err != nil {
			b.Fatalf("%v: %s", err, out)
		}
	}
	setMTU("1300")
	defer setMTU("1500")
	pod := b.lab.Pods[1]
	arrival := lab.NewCapture(b, pod.Link)
	from := netip.AddrPortFrom(pod.Addr(is6), b.freshPort())
	packet := lab.UDP(from, netip.AddrPortFrom(to, service), bytes.Repeat([]byte("x"), 1400))
	if !is6 {
		packet[6] |= 0x40 // don't fragment
		if err := lab.FixChecksums(packet); err != nil {
			b.Fatal(err)
		}
	}
	if err := pod.Link.Send(packet); err != nil {
		b.Fatal(err)
	}
	news := arrival.Await(b, "news of the MTU", func(p *lab.Packet) bool {
		return !p.Outgoing && p.Inner != nil && p.Inner.Source() == from
	})
	if want := b.lab.PodGate.Addr(is6); news.Src != want || news.MTU != 1300 || news.Inner.Dst != to {
		b.Errorf("the pod is told of %d by %s", news.MTU, &news)
	}
}
