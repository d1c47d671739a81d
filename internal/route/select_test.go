// SPDX-License-Identifier: Apache-2.0

package route

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// The rules say what select4 says, of any addresses and next hop.
func TestRules4AreSelect4(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for range 2000 {
		var own []address
		for range 1 + r.IntN(6) {
			local := randomAddress4(r)
			subnet, err := randomAddress4(r).Prefix([]int{0, 8, 16, 20, 24, 27, 32}[r.IntN(7)])
			if err != nil {
				t.Fatal(err)
			}
			own = append(own, address{local: local, subnet: subnet})
		}
		u := Uplink{V4: compile4(own)}
		checkOrder(t, u.V4)
		for range 20 {
			hop := randomAddress4(r)
			got, ok := u.Address4(hop)
			if want := select4(own, hop); !ok || got != want {
				t.Fatalf("seed %d: next hop %s: %s, want %s\naddresses %v\nrules %v", seed, hop, got, want, own, u.V4)
			}
		}
	}
}

func TestSecondaryAddressesAreNotChosen(t *testing.T) {
	subnet := netip.MustParsePrefix("192.0.2.0/24")
	own := []address{
		{local: netip.MustParseAddr("192.0.2.2"), subnet: subnet, flags: unix.IFA_F_SECONDARY},
		{local: netip.MustParseAddr("192.0.2.1"), subnet: subnet},
	}
	u := Uplink{V4: node{}.rules4(link{index: 1}, map[int][]address{1: own})}
	if got, _ := u.Address4(netip.MustParseAddr("192.0.2.9")); got != own[1].local {
		t.Errorf("got %s, want %s", got, own[1].local)
	}
}

// The rules say what select6 says, of any candidates and destination. The
// candidates that candidates6 leaves out make no difference.
func TestRules6AreSelect6(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for range 500 {
		var all, usable []candidate6
		for range 1 + r.IntN(7) {
			c := randomCandidate(r)
			all = append(all, c)
			if reachable6(c.addr) {
				usable = append(usable, c)
			}
		}
		u := Uplink{V6: compile6(usable)}
		checkOrder(t, u.V6)
		for range 60 {
			dst := randomAddress6(r)
			if r.IntN(3) == 0 {
				dst = almost(r, all[r.IntN(len(all))].addr)
			}
			if !reachable6(dst) {
				continue
			}
			got, ok := u.Address6(dst)
			want, wantOK := select6(all, dst)
			if !reachable6(want) {
				want, wantOK = netip.Addr{}, false
			}
			if got != want || ok != wantOK {
				t.Fatalf("seed %d: to %s: %s, want %s\ncandidates %+v\nrules %v", seed, dst, got, want, all, u.V6)
			}
		}
	}
}

func randomCandidate(r *rand.Rand) candidate6 {
	flags := []uint8{0, 0, 0, unix.IFA_F_DEPRECATED, unix.IFA_F_TEMPORARY, unix.IFA_F_OPTIMISTIC}
	return candidate6{
		addr:     randomAddress6(r),
		bits:     []int{0, 1, 16, 32, 48, 64, 64, 64, 127, 128}[r.IntN(10)],
		flags:    flags[r.IntN(len(flags))],
		outgoing: r.IntN(2) == 0,
		sysctl:   ipv6Settings{preferTemporary: r.IntN(4) == 0, useOptimistic: r.IntN(4) == 0},
	}
}

// almost is the same but for one bit.
func almost(r *rand.Rand, a netip.Addr) netip.Addr {
	b := a.As16()
	bit := r.IntN(128)
	b[bit/8] ^= 1 << (bit % 8)
	return netip.AddrFrom16(b)
}

func checkOrder(t *testing.T, rules []AddressRule) {
	t.Helper()
	if !slices.IsSortedFunc(rules, func(a, b AddressRule) int {
		if a.Prefix.Bits() != b.Prefix.Bits() {
			return b.Prefix.Bits() - a.Prefix.Bits()
		}
		return a.Prefix.Addr().Compare(b.Prefix.Addr())
	}) {
		t.Fatalf("rules out of order: %v", rules)
	}
}

// There are as few rules as can be.
func TestRules6AreFew(t *testing.T) {
	for _, tt := range []struct {
		addrs []string
		want  string
	}{
		{nil, "[]"},
		{[]string{"2001:db8::1/64"}, "[{::/0 2001:db8::1}]"},
		{[]string{"2001:db8::1/64", "2001:db8::2/64"}, "[{::/0 2001:db8::1}]"},
		{[]string{"2001:db8::1/64", "fd00::1/64"}, "[{fe00::/9 2001:db8::1} {fc00::/6 fd00::1} {::/0 2001:db8::1}]"},
		{[]string{"2001:db8:1::1/64", "2001:db8:2::1/64"}, "[{2001:db8:2::/47 2001:db8:2::1} {::/0 2001:db8:1::1}]"},
		{[]string{"2001:db8::1/64", "2001:db8::2/128"}, "[{2001:db8::/65 2001:db8::2} {::/0 2001:db8::1}]"},
	} {
		var candidates []candidate6
		for _, text := range tt.addrs {
			p := netip.MustParsePrefix(text)
			candidates = append(candidates, candidate6{addr: p.Addr(), bits: p.Bits(), outgoing: true})
		}
		if got := fmt.Sprint(compile6(candidates)); got != tt.want {
			t.Errorf("%v: %s, want %s", tt.addrs, got, tt.want)
		}
	}
}

// Examples of RFC 6724, section 10.1, as far as they apply.
func TestSelect6Examples(t *testing.T) {
	for _, tt := range []struct {
		dst        string
		candidates []candidate6
		want       string
	}{
		{"2001:db8:1::1", []candidate6{on("2001:db8:3::1", 0), on("fe80::1", 0)}, "2001:db8:3::1"},
		{"fe80::2", []candidate6{on("2001:db8:3::1", 0), on("fe80::1", 0)}, "fe80::1"},
		{"2001:db8:1::d5e3", []candidate6{on("2001:db8:1::2", 0), on("2001:db8:3::2", 0)}, "2001:db8:1::2"},
		{"2002:c633:6401::d5e3", []candidate6{on("2002:c633:6401::2", unix.IFA_F_DEPRECATED), on("2001:db8:1::2", 0)}, "2001:db8:1::2"},
		{"2001:db8:1::d5e3", []candidate6{on("2001:db8:1::2", 0), on("2001:db8:1::3", unix.IFA_F_TEMPORARY)}, "2001:db8:1::2"},
		{"2001:db8:1::d5e3", []candidate6{on("2001:db8:1::2", unix.IFA_F_OPTIMISTIC), on("2001:db8:2::2", 0)}, "2001:db8:2::2"},
	} {
		if got, _ := select6(tt.candidates, netip.MustParseAddr(tt.dst)); got.String() != tt.want {
			t.Errorf("to %s: %s, want %s", tt.dst, got, tt.want)
		}
	}
}

func on(addr string, flags uint8) candidate6 {
	return candidate6{addr: netip.MustParseAddr(addr), bits: 64, flags: flags, outgoing: true}
}

func TestNoAddressForDestinationsThatStayOnTheLink(t *testing.T) {
	u := Uplink{V6: compile6([]candidate6{on("2001:db8::1", 0)})}
	for _, dst := range []string{"fe80::1", "fe80::1%eth0", "ff02::1", "ff0e::1", "::1", "::", "192.0.2.1"} {
		if got, ok := u.Address6(netip.MustParseAddr(dst)); ok {
			t.Errorf("to %s: %s", dst, got)
		}
	}
}

func TestAddressOfAnUplinkWithout(t *testing.T) {
	var u Uplink
	if got, ok := u.Address4(netip.MustParseAddr("192.0.2.1")); ok {
		t.Errorf("IPv4: %s", got)
	}
	if got, ok := u.Address6(netip.MustParseAddr("2001:db8::1")); ok {
		t.Errorf("IPv6: %s", got)
	}
}

// A node with IPVS has an address for each service.
func TestManyAddressesElsewhere(t *testing.T) {
	own := on("2001:db8::1", 0)
	candidates := []candidate6{own}
	for a := netip.MustParseAddr("fd00::1"); len(candidates) < 5000; a = a.Next() {
		candidates = append(candidates, candidate6{addr: a, bits: 128})
	}
	if got, want := fmt.Sprint(compile6(candidates)), "[{::/0 2001:db8::1}]"; got != want {
		t.Errorf("rules %s, want %s", got, want)
	}
	if got := len(compile6(candidates[1:])); got == 0 || got > maxBorrowed {
		t.Errorf("%d rules of borrowed addresses", got)
	}
}

func BenchmarkCompile6(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, n := range []int{1, 10, 100} {
		var candidates []candidate6
		for range n {
			candidates = append(candidates, candidate6{addr: randomAddress6(r), bits: 64, outgoing: true})
		}
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			for b.Loop() {
				compile6(candidates)
			}
		})
	}
}
