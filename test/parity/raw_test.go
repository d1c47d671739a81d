// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/lab"
)

// builder makes a packet that carries mark somewhere.
type builder func(from, to netip.AddrPort, mark []byte) []byte

const settleTime = 5 * time.Second

// raw: packets that sockets do not make.
func raw() []row {
	return []row{
		{name: "stray RST is dropped", scenario: dropped(segment(lab.RST))},
		{name: "stray FIN is dropped", scenario: dropped(segment(lab.FIN | lab.ACK))},
		{name: "stray SYN+ACK is dropped", scenario: dropped(segment(lab.SYN | lab.ACK))},
		{name: "segment without flags is dropped", scenario: dropped(segment(0))},
		{name: "stray echo reply is dropped", scenario: dropped(strayReply)},
		{name: "ICMP error about an unknown flow is dropped", scenario: dropped(strayError)},
		{name: "datagram that names more octets than it has is dropped", scenario: dropped(longDatagram)},
		{name: "SCTP data of no association is dropped", scenario: dropped(sctpChunk(0, 7))},
		{name: "stray SCTP ABORT is dropped", scenario: dropped(sctpChunk(6, 7))},
		{name: "SCTP INIT with a tag is dropped", scenario: dropped(sctpChunk(1, 7))},
		{name: "SCTP HEARTBEAT", scenario: translated(sctpChunk(4, 7))},
		{
			name: "UDP-Lite of two pods", only: inEBPF, deviation: "the eBPF datapath takes UDP-Lite for what it is",
			scenario: translatedOfTwo(udpLite),
		},
		{name: "SYN", scenario: translated(segment(lab.SYN))},
		{name: "segment of a connection that is under way", scenario: translated(segment(lab.ACK))},
		{name: "datagram without checksum", only4: true, scenario: translated(zeroChecksum)},
		{name: "IP options", only4: true, scenario: translated(ipOptions)},
		{name: "extension header", only6: true, scenario: translated(destinationOptions)},
		{name: "ESP", scenario: translated(protocol(unix.IPPROTO_ESP))},
		{name: "SCTP", scenario: translated(sctpInit)},
		{name: "unknown protocol has room for one pod per remote", scenario: onePodPerRemote},
		{name: "fragments cut by the sender", scenario: sentFragments},
	}
}

// send sends one packet of a pod from a fresh port to remote and gives the
// mark that tells it.
func (b *bench) send(from host, is6 bool, build builder) []byte {
	b.Helper()
	port := b.freshPort()
	mark := fmt.Appendf(nil, "%s, port %d|", b.Name(), port)
	mark = append(mark, 0)[:(len(mark)+1)&^1]
	pod := b.lab.Pods[0]
	if from == podB {
		pod = b.lab.Pods[1]
	}
	packet := build(netip.AddrPortFrom(pod.Addr(is6), port), netip.AddrPortFrom(b.lab.Remote.Addr(is6), 9), mark)
	if err := pod.Link.Send(packet); err != nil {
		b.Fatal(err)
	}
	return mark
}

// onWire are the packets with a mark that leave the node.
func (b *bench) onWire(mark []byte) []lab.Packet {
	return b.wires[0].Select(func(p *lab.Packet) bool { return !p.Outgoing && bytes.Contains(p.Raw, mark) })
}

// await gives the first packet with a mark that leaves the node.
func (b *bench) await(mark []byte) lab.Packet {
	b.Helper()
	return b.wires[0].Await(b, fmt.Sprintf("packet with %q", mark), func(p *lab.Packet) bool {
		return !p.Outgoing && bytes.Contains(p.Raw, mark)
	})
}

// checkDropped waits for a later packet of the same pod: what is not there
// before it will not come.
func (b *bench) checkDropped(from host, is6 bool, mark []byte) {
	b.Helper()
	b.await(b.send(from, is6, lab.UDP))
	for _, p := range b.onWire(mark) {
		b.Errorf("seen outside: %s", &p)
	}
}

func dropped(build builder) func(*bench, bool) {
	return func(b *bench, is6 bool) { b.checkDropped(podA, is6, b.send(podA, is6, build)) }
}

func translated(build builder) func(*bench, bool) {
	return func(b *bench, is6 bool) {
		p := b.await(b.send(podA, is6, build))
		if want := b.lab.Addresses.Node.Addr(is6); p.Src != want {
			b.Errorf("comes from %s, want %s: %s", p.Src, want, &p)
		}
	}
}

// translatedOfTwo lets two pods send from the same port.
func translatedOfTwo(build builder) func(*bench, bool) {
	return func(b *bench, is6 bool) {
		port := b.freshPort()
		for _, from := range []host{podA, podB} {
			same := func(src, dst netip.AddrPort, mark []byte) []byte {
				return build(netip.AddrPortFrom(src.Addr(), port), dst, mark)
			}
			p := b.await(b.send(from, is6, same))
			if want := b.lab.Addresses.Node.Addr(is6); p.Src != want {
				b.Errorf("of %v comes from %s, want %s: %s", from, p.Src, want, &p)
			}
		}
	}
}

func onePodPerRemote(b *bench, is6 bool) {
	build := protocol(253)
	translated(build)(b, is6)
	b.checkDropped(podB, is6, b.send(podB, is6, build))
	translated(build)(b, is6)
}

// sentFragments needs the server's answer, which needs all fragments whole.
func sentFragments(b *bench, is6 bool) {
	pod := b.lab.Pods[0]
	from := netip.AddrPortFrom(pod.Addr(is6), b.freshPort())
	to := netip.AddrPortFrom(b.lab.Remote.Addr(is6), service)
	fragments, err := lab.Fragment(lab.UDP(from, to, make([]byte, 4000)), uint32(from.Port()), 1500)
	if err != nil {
		b.Fatal(err)
	}
	capture := lab.NewCapture(b, pod.Link)
	if err := pod.Link.Send(fragments...); err != nil {
		b.Fatal(err)
	}
	last := capture.Await(b, "last fragment of the answer", func(p *lab.Packet) bool {
		return !p.Outgoing && p.Src == to.Addr() && p.FragmentAt > 0 && !p.More
	})
	if last.Dst != from.Addr() {
		b.Errorf("answer goes to %s", last.Dst)
	}
}

func segment(flags uint8) builder {
	return func(from, to netip.AddrPort, mark []byte) []byte { return lab.TCP(from, to, flags, 1000, 2000, mark) }
}

func protocol(number uint8) builder {
	return func(from, to netip.AddrPort, mark []byte) []byte { return lab.IP(from.Addr(), to.Addr(), number, mark) }
}

func strayReply(from, to netip.AddrPort, mark []byte) []byte {
	return lab.EchoReply(from.Addr(), to.Addr(), from.Port(), 1, mark)
}

func strayError(from, to netip.AddrPort, mark []byte) []byte {
	kind, code := uint8(3), uint8(3)
	if from.Addr().Is6() {
		kind, code = 1, 4
	}
	return lab.ICMP(from.Addr(), to.Addr(), kind, code, 0, lab.UDP(to, from, mark))
}

func zeroChecksum(from, to netip.AddrPort, mark []byte) []byte {
	packet := lab.UDP(from, to, mark)
	packet[26], packet[27] = 0, 0
	return packet
}

// ipOptions makes room for four no-operation options in an IPv4 header.
func ipOptions(from, to netip.AddrPort, mark []byte) []byte {
	plain := lab.UDP(from, to, mark)
	packet := append(append(bytes.Clone(plain[:20]), 1, 1, 1, 1), plain[20:]...)
	packet[0] = 4<<4 | 6
	binary.BigEndian.PutUint16(packet[2:], uint16(len(packet)))
	_ = lab.FixChecksums(packet)
	return packet
}

// destinationOptions puts an empty destination options header before UDP.
func destinationOptions(from, to netip.AddrPort, mark []byte) []byte {
	udp := lab.UDP(from, to, mark)[40:]
	header := []byte{unix.IPPROTO_UDP, 0, 1, 4, 0, 0, 0, 0}
	return lab.IP(from.Addr(), to.Addr(), unix.IPPROTO_DSTOPTS, append(header, udp...))
}

func longDatagram(from, to netip.AddrPort, mark []byte) []byte {
	packet := lab.UDP(from, to, mark)
	binary.BigEndian.PutUint16(packet[len(packet)-len(mark)-4:], uint16(8+len(mark)+1))
	_ = lab.FixChecksums(packet)
	return packet
}

// udpLite covers all of the packet with its checksum, RFC 3828.
func udpLite(from, to netip.AddrPort, mark []byte) []byte {
	datagram := lab.UDP(from, to, mark)[headerLength(from):]
	binary.BigEndian.PutUint16(datagram[4:], 0)
	return lab.IP(from.Addr(), to.Addr(), unix.IPPROTO_UDPLITE, datagram)
}

func headerLength(from netip.AddrPort) int {
	if from.Addr().Is6() {
		return 40
	}
	return 20
}

// sctpChunk is a common header with a tag and one chunk that holds the mark.
func sctpChunk(kind uint8, tag uint32) builder {
	return func(from, to netip.AddrPort, mark []byte) []byte {
		b := binary.BigEndian.AppendUint16(nil, from.Port())
		b = binary.BigEndian.AppendUint16(b, to.Port())
		b = binary.BigEndian.AppendUint32(b, tag)
		b = append(b, 0, 0, 0, 0, kind, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(4+len(mark)))
		b = append(b, mark...)
		return lab.IP(from.Addr(), to.Addr(), unix.IPPROTO_SCTP, append(b, make([]byte, -len(mark)&3)...))
	}
}

// sctpInit is a common header and an INIT chunk, RFC 9260, section 3.3.2, with
// the mark in a parameter that a receiver skips.
func sctpInit(from, to netip.AddrPort, mark []byte) []byte {
	mark = append(bytes.Clone(mark), make([]byte, -len(mark)&3)...)
	b := binary.BigEndian.AppendUint16(nil, from.Port())
	b = binary.BigEndian.AppendUint16(b, to.Port())
	b = append(b, make([]byte, 8)...)
	b = append(b, 1, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(20+4+len(mark)))
	b = binary.BigEndian.AppendUint32(b, 77)    // initiate tag
	b = binary.BigEndian.AppendUint32(b, 65535) // window
	b = binary.BigEndian.AppendUint32(b, 1<<16|1)
	b = binary.BigEndian.AppendUint32(b, 1)
	b = binary.BigEndian.AppendUint16(b, 0x8001)
	b = binary.BigEndian.AppendUint16(b, uint16(4+len(mark)))
	return lab.IP(from.Addr(), to.Addr(), unix.IPPROTO_SCTP, append(b, mark...))
}
