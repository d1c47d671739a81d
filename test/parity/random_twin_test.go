// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/lab"
)

// quiet has a host answer nothing: answers are the generator's to give. What
// finds neighbours goes on.
const quiet = `table inet quiet {
	chain %[1]s {
	type filter hook %[1]s priority %[2]d
	iif lo accept
	icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert, nd-router-solicit, nd-router-advert } accept
	drop
	}
}`

// twin is one of two labs that get the same packets.
type twin struct {
	*testing.T
	lab      *lab.Lab
	captures []*lab.Capture // pods, then the wire
	taken    []int          // how many packets of each were looked at
	senders  []*lab.Sender
	sockets  [2]int // of the node, by family
	ends     int

	opinion opinion         // netfilter's, of the last burst; the eBPF datapath's lab has none
	judge   bool            // ask for it
	sees    map[int][]sight // by number
	outer   map[*conversation]netip.AddrPort
	holder  map[string]*conversation
	left    map[*conversation]*lab.Packet // last forward packet on the wire
	arrived map[*conversation]*lab.Packet // last answer in the pod
}

func newTwin(t *testing.T, datapath string) *twin {
	t.Helper()
	l := lab.New(t, lab.Options{Conntrack: true, NoOffloads: true, RoutedPods: -1})
	w := &twin{T: t, lab: l, sees: make(map[int][]sight), judge: datapath == iptables}
	w.forget()
	// Nothing expires while packets are compared.
	for _, timeout := range []string{
		"udp_timeout", "icmp_timeout", "icmpv6_timeout", "gre_timeout", "sctp_timeout_cookie_wait", "tcp_timeout_close", "tcp_timeout_last_ack",
		"tcp_timeout_syn_recv", "tcp_timeout_close_wait", "tcp_timeout_time_wait", "tcp_timeout_fin_wait", "tcp_timeout_syn_sent",
	} {
		if err := l.Node.Sysctl("net/netfilter/nf_conntrack_"+timeout, "1000"); err != nil {
			t.Fatal(err)
		}
	}
	// What is in front of conntrack's confirmation leaves no trace on the node.
	for ns, hook := range map[*lab.Namespace]string{
		l.Node: "input", l.Router: "prerouting", l.Pods[0].Namespace: "prerouting", l.Pods[1].Namespace: "prerouting",
	} {
		if err := ns.NFT(fmt.Sprintf(quiet, hook, -200)); err != nil {
			t.Fatal(err)
		}
	}
	for _, link := range []*lab.Link{l.Pods[0].Link, l.Pods[1].Link, l.Wires[0]} {
		w.captures = append(w.captures, lab.NewCapture(t, link))
	}
	w.taken = make([]int, len(w.captures))
	startSubject(t, l, variant{subject: datapath, conntrack: true}, usualSettings())
	w.open()
	w.sync()
	return w
}

// open opens what packets are sent by, and what gives netfilter's opinion.
func (w *twin) open() {
	w.Helper()
	for _, link := range []*lab.Link{w.lab.Pods[0].Link, w.lab.Pods[1].Link, w.lab.Wires[0]} {
		sender, err := link.NewSender()
		if err != nil {
			w.Fatal(err)
		}
		w.Cleanup(func() { _ = sender.Close() })
		w.senders = append(w.senders, sender)
	}
	if w.judge {
		if err := w.lab.Node.NFT(opinionRules); err != nil {
			w.Fatal(err)
		}
	}
	// The node's own packets pass netfilter.
	if err := w.lab.Node.Do(func() (err error) {
		for i, family := range []int{unix.AF_INET, unix.AF_INET6} {
			if w.sockets[i], err = unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW); err != nil {
				return err
			}
			w.Cleanup(func() { _ = unix.Close(w.sockets[i]) })
		}
		return nil
	}); err != nil {
		w.Fatal(err)
	}
}

// forget begins an epoch, with other ports.
func (w *twin) forget() {
	w.outer, w.holder = make(map[*conversation]netip.AddrPort), make(map[string]*conversation)
	w.left, w.arrived = make(map[*conversation]*lab.Packet), make(map[*conversation]*lab.Packet)
}

// play sends a burst and waits until all of it has passed. On one CPU packets
// cannot overtake each other.
func (w *twin) play(packets []*sent) {
	w.Helper()
	if packets[0].number%epoch == 0 {
		w.forget()
	}
	unpin := w.pin()
	defer unpin()
	for _, s := range packets {
		for _, packet := range w.pieces(s) {
			if err := w.send(s.from, packet); err != nil {
				w.Fatalf("%s: %v", s, err)
			}
		}
	}
	w.sync()
	if w.judge {
		w.opinion = w.askOpinion()
	}
	for i := range w.captures {
		w.collect(i, packets)
	}
}

// pin keeps the calling goroutine on one CPU.
func (w *twin) pin() (unpin func()) {
	w.Helper()
	runtime.LockOSThread()
	var before, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		w.Fatal(err)
	}
	for cpu := 0; one.Count() == 0; cpu++ {
		if before.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		w.Fatal(err)
	}
	return func() {
		_ = unix.SchedSetaffinity(0, &before)
		runtime.UnlockOSThread()
	}
}

// pieces are the packet as it is sent in this lab.
func (w *twin) pieces(s *sent) [][]byte {
	w.Helper()
	source, to, payload := s.source, s.to, bytes.Repeat(s.mark(), 8)
	if s.from == sendOutside && (s.kind == kindAnswer || s.kind == kindError) {
		to = w.outer[s.of]
	}
	switch s.kind {
	case kindError:
		payload = quote(w.left[s.of], s.mark())
	case kindPodError:
		payload = quote(w.arrived[s.of], s.mark())
	}
	packet := s.build(source, to, payload)
	stamp(packet, s.number)
	if !s.pieces {
		return [][]byte{packet}
	}
	return w.cut(s, packet)
}

const (
	pieceCount = 3
	pieceSize  = 32 // bytes of what is cut, the last piece has what is left
)

// cut makes pieces, each with a mark of its own.
func (w *twin) cut(s *sent, packet []byte) (pieces [][]byte) {
	w.Helper()
	header := 20
	if packet[0]>>4 == 6 {
		header = 48
	}
	at := func(size int) [][]byte {
		cut, err := lab.Fragment(packet, uint32(uint16(s.number)), header+size)
		if err != nil {
			w.Fatalf("%s: %v", s, err)
		}
		return cut
	}
	whole := at(pieceSize)
	if len(whole) != pieceCount {
		w.Fatalf("%s: %d pieces", s, len(whole))
	}
	if s.laps {
		return slices.Insert(whole, 1, at(pieceSize - 8)[1])
	}
	if s.order == nil {
		return whole
	}
	for _, i := range s.order {
		pieces = append(pieces, whole[i])
	}
	return pieces
}

func (w *twin) send(from int, packet []byte) error {
	switch from {
	case sendOutside:
		return w.senders[2].Send(packet)
	case sendNode:
		if packet[0]>>4 == 4 {
			err := unix.Sendto(w.sockets[0], packet, 0, &unix.SockaddrInet4{Addr: [4]byte(packet[16:])})
			return passDropped(err)
		}
		err := unix.Sendto(w.sockets[1], packet, 0, &unix.SockaddrInet6{Addr: [16]byte(packet[24:])})
		return passDropped(err)
	}
	return w.senders[from].Send(packet)
}

// passDropped: the node's own socket is told of a drop.
func passDropped(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOBUFS) {
		return nil
	}
	return err
}

// sync sends what must pass, both ways and in both families, and waits for it.
func (w *twin) sync() {
	w.Helper()
	w.ends++
	mark := fmt.Appendf(nil, "end %d of burst", w.ends)
	for _, is6 := range []bool{false, true} {
		far := netip.AddrPortFrom(w.lab.Inside2.Addr(is6), 7)
		for i, pod := range w.lab.Pods {
			near := netip.AddrPortFrom(pod.Addr(is6), 7)
			for sender, packet := range map[int][]byte{i: lab.UDP(near, far, mark), 2: lab.UDP(far, near, mark)} {
				if err := w.senders[sender].Send(packet); err != nil {
					w.Fatal(err)
				}
			}
			w.captures[i].Await(w, "end of burst", func(p *lab.Packet) bool {
				return !p.Outgoing && p.Dst == near.Addr() && bytes.HasPrefix(p.Payload, mark)
			})
			w.captures[2].Await(w, "end of burst", func(p *lab.Packet) bool {
				return !p.Outgoing && p.Src == near.Addr() && bytes.HasPrefix(p.Payload, mark)
			})
		}
	}
}

// collect notes what one capture has seen of a burst.
func (w *twin) collect(capture int, burst []*sent) {
	all := w.captures[capture].Packets()
	for i := w.taken[capture]; i < len(all); i++ {
		p := &all[i]
		at := bytes.LastIndexByte(p.Raw, '#')
		if p.Outgoing || at < 0 || len(p.Raw) < at+9 {
			continue
		}
		number, err := strconv.Atoi(string(p.Raw[at+1 : at+9]))
		if err != nil || number < burst[0].number || number > burst[len(burst)-1].number {
			continue
		}
		w.sees[number] = append(w.sees[number], sight{capture, p})
	}
	w.taken[capture] = len(all)
}
