// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/lab"
)

// gone is the outcome of what neither left the node nor came to a pod.
const gone = "gone"

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

	out   map[int]*lab.Packet // on the wire, by number
	sees  map[int][]string    // outcomes, by number
	flows map[string]netip.AddrPort
	owner map[string]string
}

func newTwin(t *testing.T, datapath string) *twin {
	t.Helper()
	l := lab.New(t, lab.Options{Conntrack: true, NoOffloads: true, RoutedPods: -1})
	w := &twin{
		T: t, lab: l, out: make(map[int]*lab.Packet), sees: make(map[int][]string),
		flows: make(map[string]netip.AddrPort), owner: make(map[string]string),
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
		sender, err := link.NewSender()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = sender.Close() })
		w.senders = append(w.senders, sender)
	}
	w.taken = make([]int, len(w.captures))
	startSubject(t, l, variant{subject: datapath, conntrack: true}, usualSettings())
	w.open()
	w.sync()
	return w
}

// open opens the node's sockets for whole packets, which pass netfilter.
func (w *twin) open() {
	w.Helper()
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

// play sends a burst and waits until all of it has passed. On one CPU packets
// cannot overtake each other.
func (w *twin) play(packets []*sent) {
	w.Helper()
	if packets[0].number%epoch == 0 { // older flows expire, and their ports are free again
		clear(w.flows)
		clear(w.owner)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
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
	defer func() { _ = unix.SchedSetaffinity(0, &before) }()
	for _, s := range packets {
		raw, err := s.bytes(w)
		if err != nil {
			w.Fatal(err)
		}
		for _, packet := range raw {
			if err := w.send(s.from, packet); err != nil {
				w.Fatalf("%s: %v", s, err)
			}
		}
	}
	w.sync()
	for i := range w.captures {
		w.collect(i, packets)
	}
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
		text := w.describe(capture, p, burst[number-burst[0].number])
		if before := w.sees[number]; len(before) == 0 || before[len(before)-1] != text {
			w.sees[number] = append(before, text)
		}
	}
	w.taken[capture] = len(all)
}

// describe tells where a packet is, in terms that both labs share.
func (w *twin) describe(capture int, p *lab.Packet, s *sent) string {
	if capture < 2 {
		text := fmt.Sprintf("pod %d gets %s > %s", capture, p.Source(), p.Destination())
		if p.Inner != nil {
			text += fmt.Sprintf(" quoting %s > %s", p.Inner.Source(), p.Inner.Destination())
		}
		return text
	}
	if p.FragmentAt != 0 { // has no port
		return fmt.Sprintf("leaves from %s to %s", p.Src, p.Dst)
	}
	w.out[s.number] = p
	text := fmt.Sprintf("leaves from %s to %s", p.Src, p.Dst)
	translated := p.Src != s.source.Addr() || s.from == sendNode
	if !translated && p.Source().Port() != 0 && p.Source() != s.source && s.proto != "icmp-other" {
		text += fmt.Sprintf(" with port %d", p.Source().Port())
	}
	if translated && (s.proto == "tcp" || s.proto == "udp" || s.proto == "icmp") {
		text += w.account(s, p)
	}
	return text
}

// account says what is wrong with the port of a flow: it must stay, and be
// that flow's alone.
func (w *twin) account(s *sent, p *lab.Packet) string {
	to := s.to
	if s.proto == "icmp" {
		to = netip.AddrPortFrom(to.Addr(), 0)
	}
	flow, tuple := fmt.Sprint(s.proto, s.source, to), fmt.Sprint(s.proto, p.Source(), to)
	if was, ok := w.flows[flow]; ok && was != p.Source() {
		return fmt.Sprintf(", port moved from %s to %s", was, p.Source())
	}
	if owner, ok := w.owner[tuple]; ok && owner != flow {
		return fmt.Sprintf(", port of %s is that of %s", p.Source(), owner)
	}
	w.flows[flow], w.owner[tuple] = p.Source(), flow
	return ""
}

func (w *twin) outcome(s *sent) string {
	if len(w.sees[s.number]) == 0 {
		return gone
	}
	return fmt.Sprint(w.sees[s.number])
}
