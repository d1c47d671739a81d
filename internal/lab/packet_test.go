// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// built has one packet of every kind that the builders make.
func built(t *testing.T, is6 bool) map[string][]byte {
	t.Helper()
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("198.51.100.2")
	if is6 {
		a, b = netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8:1::2")
	}
	from, to := netip.AddrPortFrom(a, 1234), netip.AddrPortFrom(b, 53)
	unreachable := uint8(3)
	if is6 {
		unreachable = 1
	}
	udp := UDP(from, to, []byte("odd"))
	fragments, err := Fragment(UDP(from, to, make([]byte, 100)), 9, 100)
	if err != nil {
		t.Fatal(err)
	}
	return map[string][]byte{
		"udp":       udp,
		"tcp":       TCP(from, to, SYN|ACK, 7, 8, []byte("hello")),
		"echo":      EchoRequest(a, b, 99, 1, []byte("data")),
		"reply":     EchoReply(a, b, 99, 1, []byte("data")),
		"error":     ICMP(b, a, unreachable, 1, 0, udp),
		"truncated": ICMP(b, a, unreachable, 1, 0, TCP(from, to, ACK, 7, 8, nil)[:len(udp)-3]),
		"sctp":      IP(a, b, unix.IPPROTO_SCTP, make([]byte, 16)),
		"other":     IP(a, b, 253, []byte("anything")),
		"fragment":  fragments[0],
	}
}

func TestBuiltPacketsHaveRightChecksums(t *testing.T) {
	t.Parallel()
	for _, is6 := range []bool{false, true} {
		for name, packet := range built(t, is6) {
			p, err := Parse(packet)
			if err != nil {
				t.Errorf("%s, IPv6 %t: %v", name, is6, err)
				continue
			}
			if err := p.VerifyChecksums(); err != nil {
				t.Errorf("%s, IPv6 %t: %v", name, is6, err)
			}
		}
	}
}

// Every byte that a checksum covers must matter, else a wrong translation
// could pass for a right one.
func TestEveryCoveredByteMatters(t *testing.T) {
	t.Parallel()
	for _, is6 := range []bool{false, true} {
		for name, packet := range built(t, is6) {
			first, last := 0, len(packet)
			if is6 {
				first = 8 // the IPv6 header's own fields have no checksum
			}
			if is6 && (name == "other" || name == "fragment") {
				continue
			}
			switch {
			case name == "sctp" && is6:
				first = 40 // its checksum has no pseudo header
			case name == "other" || name == "fragment":
				last = first + 20 // nothing but the IPv4 header
			}
			for i := first; i < last; i++ {
				packet[i] ^= 0x10
				p, err := Parse(packet)
				if err == nil {
					err = p.VerifyChecksums()
				}
				if err == nil {
					t.Errorf("%s, IPv6 %t: byte %d can change unnoticed", name, is6, i)
				}
				packet[i] ^= 0x10
			}
		}
	}
}

func TestParseReadsQuotes(t *testing.T) {
	t.Parallel()
	for _, is6 := range []bool{false, true} {
		for _, name := range []string{"error", "truncated"} {
			p, err := Parse(built(t, is6)[name])
			if err != nil {
				t.Fatal(err)
			}
			if p.Inner == nil || p.Inner.SPort != 1234 || p.Inner.DPort != 53 || p.Inner.Src != p.Dst {
				t.Errorf("%s, IPv6 %t: %s", name, is6, &p)
			}
		}
	}
}

func TestPartialChecksumIsThatOfThePseudoHeader(t *testing.T) {
	t.Parallel()
	p, err := Parse(built(t, false)["udp"])
	if err != nil {
		t.Fatal(err)
	}
	p.Partial = true
	if p.VerifyChecksums() == nil {
		t.Error("a whole checksum passes for a partial one")
	}
	s := p.pseudoSum()
	p.Raw[p.header+6], p.Raw[p.header+7] = byte(s>>8), byte(s)
	if err := p.VerifyChecksums(); err != nil {
		t.Error(err)
	}
}
