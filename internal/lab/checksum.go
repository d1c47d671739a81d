// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"golang.org/x/sys/unix"
)

// VerifyChecksums checks every checksum of the packet that can be checked:
// IPv4 header, TCP, UDP (0 is none in IPv4), UDP-Lite, ICMP, ICMPv6, SCTP, and those of
// a packet quoted in an ICMP error as far as the quote goes. Where p.Partial,
// the transport checksum must be that of the pseudo header alone, which is
// what the device or the receiver completes.
func (p *Packet) VerifyChecksums() error { return p.verifyChecksums(true) }

// verifyChecksums can leave out the transport checksum of a quoted packet: a
// host that has not finished it quotes it as it is, and who translates the
// error cannot know.
func (p *Packet) verifyChecksums(quotedTransport bool) error {
	errs := []error{p.verifyHeader()}
	if !p.IsFragment() && !p.truncated {
		errs = append(errs, p.verifyTransport())
	}
	if p.Inner != nil {
		if err := p.Inner.verifyHeader(); err != nil {
			errs = append(errs, fmt.Errorf("quoted packet: %w", err))
		}
		if quotedTransport && !p.Inner.IsFragment() && !p.Inner.truncated {
			if err := p.Inner.verifyTransport(); err != nil {
				errs = append(errs, fmt.Errorf("quoted packet: %w", err))
			}
		}
	}
	return errors.Join(errs...)
}

func (p *Packet) verifyHeader() error {
	if p.Src.Is4() && sum(p.Raw[:p.header], 0) != 0xffff {
		return fmt.Errorf("IPv4 header checksum %#04x is wrong", binary.BigEndian.Uint16(p.Raw[10:]))
	}
	return nil
}

func (p *Packet) verifyTransport() error {
	at, ok := checksumAt(p.Proto)
	if !ok {
		return p.verifySCTP()
	}
	segment := p.Raw[p.header:]
	have := binary.BigEndian.Uint16(segment[at:])
	switch {
	case p.Proto == unix.IPPROTO_UDP && have == 0 && p.Src.Is4():
		return nil
	case p.Proto == unix.IPPROTO_UDP && have == 0:
		return errors.New("UDP checksum is zero in IPv6")
	case p.Partial && have != p.pseudoSum():
		return fmt.Errorf("partial checksum %#04x of protocol %d is not that of the pseudo header, %#04x", have, p.Proto, p.pseudoSum())
	case !p.Partial && sum(segment, uint32(p.pseudoSum())) != 0xffff:
		return fmt.Errorf("checksum %#04x of protocol %d is wrong", have, p.Proto)
	}
	return nil
}

// verifySCTP checks the CRC32c of RFC 9260, appendix A.
func (p *Packet) verifySCTP() error {
	if p.Proto != unix.IPPROTO_SCTP || p.Partial {
		return nil
	}
	segment := append([]byte(nil), p.Raw[p.header:]...)
	have := binary.LittleEndian.Uint32(segment[8:])
	clear(segment[8:12])
	if want := crc32.Checksum(segment, crc32.MakeTable(crc32.Castagnoli)); have != want {
		return fmt.Errorf("SCTP checksum %#08x is wrong, want %#08x", have, want)
	}
	return nil
}

// FixChecksums writes the checksums of the IPv4 header and of the transport
// header of a whole packet.
func FixChecksums(packet []byte) error {
	p, err := Parse(packet)
	if err != nil {
		return err
	}
	if p.Src.Is4() {
		binary.BigEndian.PutUint16(packet[10:], 0)
		binary.BigEndian.PutUint16(packet[10:], ^sum(packet[:p.header], 0))
	}
	segment := p.Raw[p.header:]
	if p.Proto == unix.IPPROTO_SCTP {
		clear(segment[8:12])
		binary.LittleEndian.PutUint32(segment[8:], crc32.Checksum(segment, crc32.MakeTable(crc32.Castagnoli)))
		return nil
	}
	at, ok := checksumAt(p.Proto)
	if !ok || p.IsFragment() {
		return nil
	}
	binary.BigEndian.PutUint16(segment[at:], 0)
	value := ^sum(segment, uint32(p.pseudoSum()))
	if value == 0 && p.Proto == unix.IPPROTO_UDP {
		value = 0xffff // RFC 768: zero means none
	}
	binary.BigEndian.PutUint16(segment[at:], value)
	return nil
}

// checksumAt is the place of the checksum in the transport header.
func checksumAt(proto uint8) (int, bool) {
	switch proto {
	case unix.IPPROTO_TCP:
		return 16, true
	case unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE: // UDP-Lite: as if all were covered
		return 6, true
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		return 2, true
	}
	return 0, false
}

// pseudoSum is the sum of the pseudo header, zero where the protocol has none.
func (p *Packet) pseudoSum() uint16 {
	if p.Proto == unix.IPPROTO_ICMP {
		return 0
	}
	length := len(p.Raw) - p.header
	return sum(append(p.Src.AsSlice(), p.Dst.AsSlice()...), uint32(p.Proto)+uint32(length&0xffff)+uint32(length>>16))
}

// sum is the ones' complement sum of RFC 1071, not inverted.
func sum(b []byte, initial uint32) uint16 {
	s := uint64(initial)
	for ; len(b) >= 4; b = b[4:] {
		s += uint64(binary.BigEndian.Uint32(b))
	}
	if len(b) >= 2 {
		s += uint64(binary.BigEndian.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		s += uint64(b[0]) << 8
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}
