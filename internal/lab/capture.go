// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	ethernetLen = 14
	keptPayload = 256 // bytes kept of a TCP segment's payload
	waitTimeout = 5 * time.Second
)

// Capture holds the IP packets that pass an interface, from its making on.
// Outgoing packets are seen as they leave, incoming ones as they arrive: on a
// node's uplink that is after and before the translation.
type Capture struct {
	link *Link
	file *os.File
	conn syscall.RawConn

	mu       sync.Mutex
	packets  []Packet
	faults   []error
	joins    joiner
	tolerant bool
	changed  chan struct{}
	ring     *ring // nil once the capture is closed
}

// NewCapture captures on link until the test ends. It then fails the test if
// a packet was malformed or had a wrong checksum, be it in fragments, or if packets
// were lost.
func NewCapture(tb testing.TB, link *Link) *Capture {
	tb.Helper()
	c := &Capture{link: link, changed: make(chan struct{}), joins: make(joiner)}
	if err := link.NS.Do(c.open); err != nil {
		tb.Fatalf("capture on %s in %s: %v", link.Name, link.NS.name, err)
	}
	go func() {
		_ = c.conn.Read(func(uintptr) bool { // ends when the file is closed
			c.drain()
			return false
		})
	}()
	tb.Cleanup(func() {
		if err := c.close(); err != nil {
			tb.Errorf("capture on %s in %s: %v", link.Name, link.NS.name, err)
		}
	})
	return c
}

func (c *Capture) open() error {
	fd, err := packetSocket(0)
	if err != nil {
		return err
	}
	c.file = os.NewFile(uintptr(fd), "capture")
	if c.ring, err = newRing(fd, c.link.Index); err != nil {
		return errors.Join(err, c.file.Close())
	}
	c.conn, err = c.file.SyscallConn()
	return err
}

// Packets are those that passed until now. They are not to be changed.
func (c *Capture) Packets() []Packet {
	packets, _ := c.current()
	return packets
}

// current gives also what is closed when more packets come.
func (c *Capture) current() ([]Packet, <-chan struct{}) {
	c.drain()
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clip(c.packets), c.changed
}

// Select are the packets until now for which match holds.
func (c *Capture) Select(match func(*Packet) bool) []Packet {
	var selected []Packet
	packets := c.Packets()
	for i := range packets {
		if match(&packets[i]) {
			selected = append(selected, packets[i])
		}
	}
	return selected
}

// Wait waits until a packet has come for which match holds, from the making of
// the capture on, and reports whether one came within timeout.
func (c *Capture) Wait(timeout time.Duration, match func(*Packet) bool) (Packet, bool) {
	deadline := time.After(timeout)
	looked, late := 0, false
	for {
		packets, changed := c.current()
		for ; looked < len(packets); looked++ {
			if match(&packets[looked]) {
				return packets[looked], true
			}
		}
		if late {
			return Packet{}, false
		}
		select {
		case <-changed:
		case <-deadline:
			late = true
		}
	}
}

// Await is Wait for five seconds. If no packet comes, it fails the test and
// shows what came.
func (c *Capture) Await(tb testing.TB, what string, match func(*Packet) bool) Packet {
	tb.Helper()
	p, ok := c.Wait(Patience(waitTimeout), match)
	if !ok {
		tb.Fatalf("no %s on %s in %s; seen:\n%s", what, c.link.Name, c.link.NS.name, c)
	}
	return p
}

// NoPodAddress fails the test if a packet had a pod's address as its source,
// or quoted one in an ICMP error, on its way to anyone but except. Captures on
// a node's uplink or on the wire behind it can ask this.
func (c *Capture) NoPodAddress(tb testing.TB, except ...netip.Prefix) {
	tb.Helper()
	leaks := c.Select(func(p *Packet) bool {
		if slices.ContainsFunc(except, func(e netip.Prefix) bool { return e.Contains(p.Dst) }) || IsPod(p.Dst) {
			return false
		}
		return IsPod(p.Src) || p.Inner != nil && (IsPod(p.Inner.Src) || IsPod(p.Inner.Dst))
	})
	if len(leaks) > 0 {
		tb.Errorf("%d packets with a pod's address on %s in %s:\n%s", len(leaks), c.link.Name, c.link.NS.name, list(leaks))
	}
}

// AllowFaults has the capture accept malformed packets and wrong checksums,
// for tests that send such.
func (c *Capture) AllowFaults() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tolerant = true
}

// String lists the packets until now.
func (c *Capture) String() string { return list(c.Packets()) }

func list(packets []Packet) string {
	const most = 40
	var s strings.Builder
	if n := len(packets) - most; n > 0 {
		fmt.Fprintf(&s, "  (%d earlier ones)\n", n)
		packets = packets[n:]
	}
	for i := range packets {
		fmt.Fprintf(&s, "  %s\n", &packets[i])
	}
	return s.String()
}

// drain takes what the kernel holds.
func (c *Capture) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ring == nil {
		return
	}
	before := len(c.packets)
	for {
		more, err := c.ring.take(c.record)
		if err != nil {
			c.fault(err)
		}
		if !more {
			break
		}
	}
	if len(c.packets) != before {
		close(c.changed)
		c.changed = make(chan struct{})
	}
}

func (c *Capture) record(f frame) {
	if len(f.bytes) < ethernetLen {
		return
	}
	kind := binary.BigEndian.Uint16(f.bytes[12:])
	if kind != unix.ETH_P_IP && kind != unix.ETH_P_IPV6 {
		return
	}
	p, err := Parse(f.bytes[ethernetLen:])
	p.At, p.Outgoing, p.Partial = f.at, f.outgoing, f.partial
	if err == nil {
		err = p.verifyChecksums(!c.link.offloads)
	}
	if err == nil && p.IsFragment() {
		err = c.joins.add(&p)
	}
	if err != nil {
		c.fault(fmt.Errorf("%s: %w", &p, err))
	}
	c.packets = append(c.packets, p.detach())
}

// fault keeps the first faults: one is as good as thousands.
func (c *Capture) fault(err error) {
	if len(c.faults) < 20 {
		c.faults = append(c.faults, err)
	}
}

// detach gives a copy that does not refer to the buffer of the capture.
func (p *Packet) detach() Packet {
	raw := p.Raw
	if cut := len(p.Payload) - keptPayload; p.Proto == unix.IPPROTO_TCP && cut > 0 {
		raw = raw[:len(raw)-cut]
	}
	kept, _ := parse(slices.Clone(raw), true)
	kept.At, kept.Outgoing, kept.Partial = p.At, p.Outgoing, p.Partial
	return kept
}

func (c *Capture) close() error {
	c.drain()
	errs := []error{c.closeRing(), c.file.Close()} // Close waits for the reader, who may wait for mu
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.tolerant {
		errs = append(errs, c.faults...)
	}
	return errors.Join(errs...)
}

func (c *Capture) closeRing() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	lost, err := c.ring.lost()
	if lost > 0 {
		err = fmt.Errorf("%d packets were lost", lost)
	}
	err = errors.Join(err, c.ring.close())
	c.ring = nil
	return err
}
