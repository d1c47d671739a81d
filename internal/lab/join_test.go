// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// join gives fragments to a joiner in some order, and what it says.
func join(t *testing.T, j joiner, pieces [][]byte) (errs []error) {
	t.Helper()
	for _, i := range rand.Perm(len(pieces)) {
		p, err := Parse(pieces[i])
		if err != nil {
			t.Fatal(err)
		}
		if err := j.add(&p); err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// The checksum of what was cut is verified, in whatever order it comes.
func TestChecksumOfFragments(t *testing.T) {
	t.Parallel()
	for _, is6 := range []bool{false, true} {
		from, to := netip.MustParseAddrPort("192.0.2.1:1000"), netip.MustParseAddrPort("198.51.100.2:53")
		if is6 {
			from, to = netip.MustParseAddrPort("[2001:db8::1]:1000"), netip.MustParseAddrPort("[2001:db8:1::2]:53")
		}
		payload := []byte(strings.Repeat("datagram", 40) + "odd")
		for name, packet := range map[string][]byte{
			"udp":  UDP(from, to, payload),
			"tcp":  TCP(from, to, ACK, 1, 2, payload),
			"icmp": EchoRequest(from.Addr(), to.Addr(), 1, 2, payload),
			"sctp": IP(from.Addr(), to.Addr(), unix.IPPROTO_SCTP, append(make([]byte, 12), payload...)),
		} {
			pieces, err := Fragment(packet, 7, 120)
			if err != nil || len(pieces) < 4 {
				t.Fatalf("%d pieces, %v", len(pieces), err)
			}
			j := make(joiner)
			if errs := join(t, j, pieces); len(errs) != 0 || len(j) != 0 {
				t.Errorf("%s, IPv6 %t: %v, %d packets in parts", name, is6, errs, len(j))
			}
			last := pieces[len(pieces)-1]
			last[len(last)-1] ^= 1
			if errs := join(t, j, pieces); len(errs) != 1 || len(j) != 0 {
				t.Errorf("%s changed, IPv6 %t: %v, %d packets in parts", name, is6, errs, len(j))
			}
		}
	}
}

// What is not all there, or is of two packets at a time, says nothing.
func TestFragmentsThatMakeNoPacket(t *testing.T) {
	t.Parallel()
	from, to := netip.MustParseAddrPort("192.0.2.1:1000"), netip.MustParseAddrPort("198.51.100.2:53")
	var pieces [2][][]byte
	for i, text := range []string{"one ", "two "} {
		var err error
		if pieces[i], err = Fragment(UDP(from, to, []byte(strings.Repeat(text, 80))), 7, 120); err != nil {
			t.Fatal(err)
		}
	}
	if errs := join(t, make(joiner), pieces[0][1:]); len(errs) != 0 {
		t.Errorf("without the first: %v", errs)
	}
	j := make(joiner)
	if errs := join(t, j, [][]byte{pieces[0][0], pieces[1][0], pieces[0][1], pieces[1][1], pieces[0][2], pieces[1][2]}); len(errs) != 0 {
		t.Errorf("of two packets: %v", errs)
	}
}
