// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"bytes"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/lab"
)

// histories: what one packet leaves behind for the next.
func histories() []row {
	return []row{
		{
			name:     "connections from outside that were open before the agent",
			only:     func(v variant) bool { return v.conntrack },
			scenario: func(b *bench, is6 bool) { b.checkSticky(b.earlier[is6]) },
		},
		{name: "stray segment from outside does not make the next connection a reply", scenario: phantom},
		{name: "connection on the ports of one that was reset", scenario: reconnect},
		{name: "two first datagrams at once", scenario: twoAtOnce},
		{name: "ICMP error that quotes eight bytes", scenario: shortQuote},
		{name: "answer in fragments", scenario: func(b *bench, is6 bool) { fragmentedAnswer(b, is6, false) }},
		{name: "answer in fragments, last one first", scenario: func(b *bench, is6 bool) { fragmentedAnswer(b, is6, true) }},
		{name: "DHCP request of the node", only4: true, scenario: dhcp},
		{
			name: "multicast of a secondary address", only4: true, only: inIPTables,
			scenario: func(b *bench, _ bool) { multicast(b, b.lab.Addresses.Node.V4) },
		},
		{
			name: "multicast of a secondary address keeps it", only4: true, only: inEBPF,
			deviation: "the eBPF datapath never touches multicast",
			scenario:  func(b *bench, _ bool) { multicast(b, b.lab.Secondary.V4) },
		},
	}
}

// openEarlier opens connections from outside to a pod.
func (b *bench) openEarlier(is6 bool) {
	b.Helper()
	if b.earlier == nil {
		b.earlier = make(map[bool][]*sticky)
	}
	for _, proto := range []string{tcp, udp} {
		at := netip.AddrPortFrom(b.own(podA).Addr(is6), service)
		local := netip.AddrPortFrom(b.lab.Client.Addr(is6), b.freshPort())
		b.earlier[is6] = append(b.earlier[is6], b.stick(outside, proto, local, at))
	}
}

func phantom(b *bench, is6 bool) {
	at := netip.AddrPortFrom(b.lab.Remote.Addr(is6), service)
	local := netip.AddrPortFrom(b.own(podA).Addr(is6), b.freshPort())
	arrival := lab.NewCapture(b, b.lab.Pods[0].Link)
	if err := b.lab.End.Send(lab.TCP(at, local, lab.FIN|lab.ACK, 1, 1, nil)); err != nil {
		b.Fatal(err)
	}
	// The kernel's own conntrack may drop the stray: its arrival proves
	// nothing, but a later one proves that it has passed the node.
	later := lab.EchoRequest(b.lab.Client.Addr(is6), local.Addr(), local.Port(), 1, nil)
	if err := b.lab.End.Send(later); err != nil {
		b.Fatal(err)
	}
	arrival.Await(b, "later packet", func(p *lab.Packet) bool { return !p.Outgoing && p.ID == local.Port() })
	conn, err := b.namespace(podA).Dial(b.Context(), tcp, local, at)
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	if want := b.lab.Addresses.Node.Addr(is6); conn.Seen.Addr() != want {
		b.Errorf("connection comes from %s, want %s", conn.Seen, want)
	}
}

func reconnect(b *bench, is6 bool) {
	at := netip.AddrPortFrom(b.lab.Remote.Addr(is6), service)
	local := netip.AddrPortFrom(b.own(podA).Addr(is6), b.freshPort())
	for range 2 {
		conn, err := b.namespace(podA).Dial(b.Context(), tcp, local, at)
		if err != nil {
			b.Fatal(err)
		}
		if want := b.lab.Addresses.Node.Addr(is6); conn.Seen.Addr() != want {
			b.Errorf("connection comes from %s, want %s", conn.Seen, want)
		}
		if err := conn.Conn.(*net.TCPConn).SetLinger(0); err != nil {
			b.Fatal(err)
		}
		conn.Close()
	}
}

// twoAtOnce sends the second datagram before the answer to the first, as
// resolvers do.
func twoAtOnce(b *bench, is6 bool) {
	at := netip.AddrPortFrom(b.lab.Remote.Addr(is6), service)
	conn, err := b.namespace(podA).DialContext(b.Context(), udp, netip.AddrPort{}, at.String())
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	for _, question := range []string{"A", "AAAA"} {
		if _, err := io.WriteString(conn, question); err != nil {
			b.Fatal(err)
		}
	}
	if err := conn.SetReadDeadline(time.Now().Add(lab.Patience(settleTime))); err != nil {
		b.Fatal(err)
	}
	var seen []string
	for range 2 {
		answer := make([]byte, 200)
		n, err := conn.Read(answer)
		if err != nil {
			b.Fatal(err)
		}
		source, _, _ := strings.Cut(string(answer[:n]), "\n")
		seen = append(seen, source)
	}
	if seen[0] != seen[1] {
		b.Errorf("datagrams of one socket come from %s", seen)
	}
}

// exchanged is a flow of a pod that has been answered, as the wire shows it.
func (b *bench) exchanged(is6 bool, to place) (conn *lab.Conn, local, outer, remote netip.AddrPort) {
	b.Helper()
	local = netip.AddrPortFrom(b.own(podA).Addr(is6), b.freshPort())
	remote = netip.AddrPortFrom(to(b.lab).Addr(is6), service)
	conn, err := b.namespace(podA).Dial(b.Context(), udp, local, remote)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { conn.Close() })
	return conn, local, conn.Seen, remote
}

// shortQuote: an IPv4 host may quote no more than the header and eight bytes.
func shortQuote(b *bench, is6 bool) {
	_, local, outer, remote := b.exchanged(is6, remote)
	capture := lab.NewCapture(b, b.lab.Pods[0].Link)
	kind, code, length := uint8(3), uint8(1), 28
	if is6 {
		kind, code, length = 1, 3, 48
	}
	quote := lab.UDP(outer, remote, make([]byte, 100))[:length]
	if err := b.lab.End.Send(lab.ICMP(b.lab.Remote2.Addr(is6), outer.Addr(), kind, code, 0, quote)); err != nil {
		b.Fatal(err)
	}
	capture.Await(b, "error about the pod's own packet", func(p *lab.Packet) bool {
		return !p.Outgoing && p.Inner != nil && p.Dst == local.Addr() &&
			p.Inner.Source() == local && p.Inner.Destination() == remote
	})
}

// fragmentedAnswer: only one pod talks to that remote, which is the case that
// both datapaths can serve in any order.
func fragmentedAnswer(b *bench, is6, reversed bool) {
	conn, _, outer, remote := b.exchanged(is6, viaSubnet2)
	payload := bytes.Repeat([]byte("fragment"), 500)
	fragments, err := lab.Fragment(lab.UDP(remote, outer, payload), uint32(outer.Port()), 1500)
	if err != nil {
		b.Fatal(err)
	}
	if reversed {
		slices.Reverse(fragments)
	}
	if err := b.lab.End.Send(fragments...); err != nil {
		b.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(lab.Patience(settleTime))); err != nil {
		b.Fatal(err)
	}
	got := make([]byte, 2*len(payload))
	n, err := conn.Read(got)
	if err != nil || !bytes.Equal(got[:n], payload) {
		b.Errorf("got %d bytes of %d, %v; on the wire:\n%s", n, len(payload), err, b.wireLog(remote.Addr()))
	}
}

// dhcp: a client that has no address yet sends past the IP stack.
func dhcp(b *bench, _ bool) {
	from := netip.AddrPortFrom(netip.IPv4Unspecified(), 68)
	to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{255, 255, 255, 255}), 67)
	if err := b.lab.Uplinks[0].Send(lab.UDP(from, to, []byte("discover"))); err != nil {
		b.Fatal(err)
	}
	b.wires[0].Await(b, "request as it was sent", func(p *lab.Packet) bool {
		return !p.Outgoing && p.Source() == from && p.Destination() == to
	})
}

func multicast(b *bench, want netip.Addr) {
	local := netip.AddrPortFrom(b.lab.Secondary.V4, b.freshPort())
	group := netip.AddrPortFrom(netip.AddrFrom4([4]byte{224, 0, 0, 251}), local.Port())
	conn, err := b.lab.Node.DialContext(b.Context(), udp, local, group.String())
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "who is there?"); err != nil {
		b.Fatal(err)
	}
	p := b.wires[0].Await(b, "multicast", func(p *lab.Packet) bool {
		return p.Proto == unix.IPPROTO_UDP && p.Destination() == group
	})
	if p.Src != want {
		b.Errorf("comes from %s, want %s", p.Src, want)
	}
}
