// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
)

// joiner joins fragments, to verify what the checksum in the first of them says
// about all. It holds those of packets that never became whole.
type joiner map[fragmentKey]*fragments

type fragmentKey struct {
	src, dst netip.Addr
	id       uint32
	proto    uint8 // IPv4; in IPv6 the first fragment has another one than the others behind extension headers
	outgoing bool
}

// fragments are those of one packet, by offset.
type fragments struct {
	parts []Packet
	mixed bool // two packets have one identifier at a time
}

// add takes a fragment, and verifies the transport checksum of the packet that it
// makes whole.
func (j joiner) add(p *Packet) error {
	key := fragmentKey{src: p.Src, dst: p.Dst, id: p.FragmentID, outgoing: p.Outgoing}
	if p.Src.Is4() {
		key.proto = p.Proto
	}
	if j[key] == nil {
		j[key] = &fragments{}
	}
	f := j[key]
	f.insert(p)
	if f.mixed || !f.whole() {
		return nil
	}
	delete(j, key)
	return f.verify()
}

func (f *fragments) insert(p *Packet) {
	at, found := slices.BinarySearchFunc(f.parts, p.FragmentAt, func(p Packet, at int) int { return cmp.Compare(p.FragmentAt, at) })
	if found {
		f.mixed = f.mixed || !bytes.Equal(f.parts[at].fragmentBody(), p.fragmentBody())
		return
	}
	kept := *p
	kept.Raw = bytes.Clone(p.Raw)
	f.parts = slices.Insert(f.parts, at, kept)
}

// whole reports whether there is no gap. What overlaps is never whole, as for the
// kernel.
func (f *fragments) whole() bool {
	end, more := 0, true
	for i := range f.parts {
		if p := &f.parts[i]; p.FragmentAt == end {
			end, more = end+len(p.fragmentBody()), p.More
			continue
		}
		return false
	}
	return !more
}

// verify makes one packet of all. In IPv6 it keeps a fragment header that says so
// (RFC 6946).
func (f *fragments) verify() error {
	first := &f.parts[0]
	joined := bytes.Clone(first.Raw[:first.body])
	for i := range f.parts {
		joined = append(joined, f.parts[i].fragmentBody()...)
	}
	if first.Src.Is4() {
		binary.BigEndian.PutUint16(joined[2:], uint16(len(joined)))
		binary.BigEndian.PutUint16(joined[6:], 0)
	} else {
		binary.BigEndian.PutUint16(joined[4:], uint16(len(joined)-40))
		binary.BigEndian.PutUint16(joined[first.body-6:], 0)
	}
	p, err := Parse(joined)
	if err == nil {
		err = p.verifyTransport()
	}
	if err != nil {
		return fmt.Errorf("joined from %d fragments: %w", len(f.parts), err)
	}
	return nil
}

// fragmentBody is the fragment's part of what was cut.
func (p *Packet) fragmentBody() []byte { return p.Raw[p.body:] }
