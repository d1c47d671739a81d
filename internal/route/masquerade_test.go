// SPDX-License-Identifier: Apache-2.0

package route

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// compare checks that the tracker would pick what MASQUERADE does pick for a
// pod's packet to dst, and returns it.
func (m *masquerader) compare(t *testing.T, tr *Tracker, dst string) string {
	t.Helper()
	a := netip.MustParseAddr(dst)
	hop := a
	r, err := tr.conn.route(a, podAddress(a), linkIndex(t, tr, "pod0"))
	if err != nil {
		t.Fatalf("route to %s: %v", dst, err)
	}
	if len(r.hops) > 0 && r.hops[0].gateway.Is4() {
		hop = r.hops[0].gateway
	}
	u := uplink(t, tr.Snapshot(), "up0")
	got, _ := u.Address4(hop)
	if a.Is6() {
		got, _ = u.Address6(a)
	}
	want := m.source(t, a)
	if a.Is6() && !reachable6(want) {
		want = netip.Addr{} // the kernel would even take ::1
	}
	if got != want {
		t.Errorf("to %s by %s: %s, the kernel takes %s\nIPv4 %v\nIPv6 %v", dst, hop, got, want, u.V4, u.V6)
	}
	if !want.IsValid() {
		return "none"
	}
	return want.String()
}

func linkIndex(t *testing.T, tr *Tracker, name string) int {
	t.Helper()
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for _, l := range tr.links {
		if l.name == name {
			return l.index
		}
	}
	t.Fatalf("no link %s", name)
	return 0
}

func TestAddressIsWhatMasqueradePicks(t *testing.T) {
	for _, tt := range []struct {
		name  string
		setup []string
		want  map[string]string // by destination
	}{
		{"one address", []string{"addr add 192.0.2.1/24 dev up0"},
			map[string]string{"8.8.8.8": "192.0.2.1", "192.0.2.9": "192.0.2.1", "2001:4860::1": "none"}},
		{"secondary address", []string{"addr add 192.0.2.1/24 dev up0", "addr add 192.0.2.2/24 dev up0"},
			map[string]string{"8.8.8.8": "192.0.2.1", "192.0.2.9": "192.0.2.1"}},
		{"several subnets", []string{"addr add 192.0.2.1/24 dev up0", "addr add 198.51.100.1/24 dev up0"},
			map[string]string{"8.8.8.8": "192.0.2.1", "192.0.2.9": "192.0.2.1", "198.51.100.9": "198.51.100.1"}},
		{"by the gateway", []string{"addr add 192.0.2.1/24 dev up0", "addr add 198.51.100.1/24 dev up0", "route add 8.0.0.0/8 via 198.51.100.9 dev up0 table 100"},
			map[string]string{"8.8.8.8": "198.51.100.1", "9.9.9.9": "192.0.2.1"}},
		{"not by the route's source", []string{"addr add 192.0.2.1/24 dev up0", "addr add 198.51.100.1/24 dev up0", "route add 8.0.0.0/8 dev up0 src 198.51.100.1 table 100"},
			map[string]string{"8.8.8.8": "192.0.2.1"}},
		{"IPv4 via IPv6", []string{"addr add 192.0.2.1/24 dev up0", "addr add 198.51.100.1/24 dev up0", "route add 198.51.100.0/24 via inet6 fe80::9 dev up0 table 100"},
			map[string]string{"198.51.100.9": "198.51.100.1"}},
		{"nested subnets, large one first", []string{"addr add 10.0.0.1/8 dev up0", "addr add 10.1.0.1/16 dev up0"},
			map[string]string{"10.1.0.9": "10.0.0.1", "10.2.0.9": "10.0.0.1", "8.8.8.8": "10.0.0.1"}},
		{"nested subnets, small one first", []string{"addr add 10.1.0.1/16 dev up0", "addr add 10.0.0.1/8 dev up0", "addr add 10.1.2.1/24 dev up0"},
			map[string]string{"10.1.0.9": "10.1.0.1", "10.1.2.9": "10.1.0.1", "10.2.0.9": "10.0.0.1", "8.8.8.8": "10.1.0.1"}},
		{"point to point", []string{"addr add 192.0.2.1 peer 198.51.100.2/32 dev up0", "addr add 10.0.0.1/8 dev up0"},
			map[string]string{"198.51.100.2": "192.0.2.1", "10.0.0.9": "10.0.0.1", "8.8.8.8": "192.0.2.1"}},
		{"peer's subnet", []string{"addr add 10.0.0.1/8 dev up0", "addr add 192.0.2.1 peer 198.51.100.2/24 dev up0"},
			map[string]string{"198.51.100.9": "192.0.2.1", "192.0.2.9": "10.0.0.1"}},
		{"host address", []string{"addr add 192.0.2.1/32 dev up0"},
			map[string]string{"8.8.8.8": "192.0.2.1"}},
		{"narrow scopes", []string{"addr add 192.0.2.1/24 dev up0 scope link", "addr add 198.51.100.1/24 dev up0 scope 200", "addr add 10.0.0.1/8 dev up0"},
			map[string]string{"192.0.2.9": "10.0.0.1", "198.51.100.9": "10.0.0.1"}},
		{"only narrow scopes", []string{"addr add 192.0.2.1/24 dev up0 scope link", "addr add 198.51.100.1/24 dev up0 scope host"},
			map[string]string{"8.8.8.8": "none"}},
		{"address on the loopback", []string{"addr add 192.0.2.1/32 dev lo"},
			map[string]string{"8.8.8.8": "192.0.2.1"}},
		{"loopback before others", []string{"addr add 10.0.0.1/8 dev pod0", "addr add 192.0.2.1/32 dev lo"},
			map[string]string{"8.8.8.8": "192.0.2.1"}},
		{"address on another link", []string{"addr add 10.0.0.1/8 dev pod0"},
			map[string]string{"8.8.8.8": "10.0.0.1"}},
		{"address on another link that is down", []string{"tuntap add t0 mode tun", "addr add 10.0.0.1/8 dev t0"},
			map[string]string{"8.8.8.8": "10.0.0.1"}},
		{"subnet of everything", []string{"addr add 10.0.0.1/8 dev up0", "addr add 192.0.2.1/0 dev up0"},
			map[string]string{"8.8.8.8": "192.0.2.1", "10.0.0.9": "10.0.0.1"}},
		{"no address", nil, map[string]string{"8.8.8.8": "none", "2001:4860::1": "none"}},

		{"IPv6", []string{"addr add 2001:db8::1/64 dev up0"},
			map[string]string{"2001:4860::1": "2001:db8::1", "2001:db8::9": "2001:db8::1", "8.8.8.8": "none"}},
		{"longest common prefix", []string{"addr add 2001:db8:1::1/64 dev up0", "addr add 2001:db8:2::1/64 dev up0", "addr add 2a00::1/64 dev up0"},
			map[string]string{"2001:db8:1::9": "2001:db8:1::1", "2001:db8:2:8::9": "2001:db8:2::1", "2a00:1::1": "2a00::1"}},
		{"common prefix no longer than the address's own", []string{"addr add 2001:db8::4444/48 dev up0", "addr add 2001:db8::1/64 dev up0"},
			map[string]string{"2001:db8::4445": "2001:db8::1", "2001:db8:0:1::9": "2001:db8::1"}},
		{"labels", []string{"addr add 2001:db8::1/64 dev up0", "addr add fd00::1/64 dev up0", "addr add 2002:101:101::1/64 dev up0", "addr add 2001:0:5::1/64 dev up0"},
			map[string]string{"2001:4860::1": "2001:db8::1", "fd12::1": "fd00::1", "2002:808::1": "2002:101:101::1", "2001:0:9::1": "2001:0:5::1", "3fff::1": "2001:db8::1"}},
		{"deprecated", []string{"addr add 2001:db8:1::1/64 dev up0 preferred_lft 0", "addr add 2001:db8:2::1/64 dev up0"},
			map[string]string{"2001:db8:1::9": "2001:db8:2::1"}},
		{"only a deprecated one", []string{"addr add 2001:db8:1::1/64 dev up0 preferred_lft 0"},
			map[string]string{"2001:db8:1::9": "2001:db8:1::1"}},
		{"outgoing link first", []string{"addr add fd00::1/64 dev up0", "addr add 2001:db8::1/64 dev pod0"},
			map[string]string{"2001:db8::9": "fd00::1"}},
		{"preferred one of another link", []string{"addr add 2001:db8::1/64 dev up0 preferred_lft 0", "addr add fd00::1/64 dev pod0"},
			map[string]string{"2001:db8::9": "fd00::1"}},
		{"address on the loopback, IPv6", []string{"addr add 2001:db8::1/128 dev lo", "addr add fe80::1/64 dev up0"},
			map[string]string{"2001:4860::1": "2001:db8::1"}},
		{"site-local destination", []string{"addr add 2001:db8::1/64 dev up0", "addr add fec0::1/64 dev up0"},
			map[string]string{"fec0:0:0:9::1": "fec0::1", "2001:4860::1": "2001:db8::1"}},
		{"point to point, IPv6", []string{"addr add 2001:db8::1 peer 2a00::1/64 dev up0", "addr add 2001:db8:1::1/64 dev up0"},
			map[string]string{"2001:db8::9": "2001:db8::1", "2a00::9": "2001:db8:1::1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := newMasquerader(t)
			ip(t, withoutDAD(tt.setup)...)
			tr := newTracker(t, Options{Interfaces: []string{"up0"}})
			for dst, want := range tt.want {
				if got := m.compare(t, tr, dst); got != want && want != "" {
					t.Errorf("to %s: %s, want %s", dst, got, want)
				}
			}
		})
	}
}

// withoutDAD makes IPv6 addresses usable at once.
func withoutDAD(lines []string) []string {
	var done []string
	for _, l := range lines {
		if strings.HasPrefix(l, "addr add ") && strings.Contains(l, ":") {
			l += " nodad"
		}
		done = append(done, l)
	}
	return done
}

// Whatever addresses the links have, and whatever the destination, the tracker
// agrees with the kernel.
func TestAddressIsWhatMasqueradePicksAtRandom(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	m := newMasquerader(t)
	tun(t, "other0")
	tr := newTracker(t, Options{Interfaces: []string{"up0"}})
	compared := 0
	for round := range 60 {
		only := []string{"0", "1"}[r.IntN(2)]
		sysctl(t, "net/ipv6/conf/up0/use_oif_addrs_only", only)
		var setup []string
		for _, link := range []string{"up0", "lo", "pod0", "other0"} {
			flush(t, link)
			for range r.IntN(5) {
				setup = append(setup, addRandomAddress(t, r, link))
			}
		}
		// The route went with the last IPv4 address.
		up := netlink.Route{LinkIndex: linkIndex(t, tr, "up0"), Table: 100, Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}}
		if err := netlink.RouteReplace(&up); err != nil {
			t.Fatal(err)
		}
		refreshUntil(t, tr, func() bool { return true })
		for range 20 {
			dst := randomAddress4(r)
			if r.IntN(2) == 0 {
				dst = randomAddress6(r)
			}
			route, err := tr.conn.route(dst, podAddress(dst), linkIndex(t, tr, "pod0"))
			own := has(dst, tr.Snapshot().Addresses) // the kernel makes the local routes of IPv6 a little later
			if own || err != nil || route.kind != unix.RTN_UNICAST || route.hops[0].link != linkIndex(t, tr, "up0") {
				continue
			}
			m.compare(t, tr, dst.String())
			compared++
		}
		if t.Failed() {
			t.Fatalf("seed %d, round %d, use_oif_addrs_only %s:\n%s", seed, round, only, strings.Join(setup, "\n"))
		}
	}
	if compared < 600 {
		t.Errorf("only %d destinations compared", compared)
	}
}

func TestTentativeAddress(t *testing.T) {
	m := newMasquerader(t)
	ip(t, "link add v0 type veth peer v1", "link set v1 up", "link set v0 up", "addr add fd00::1/128 dev lo nodad")
	sysctl(t, "net/ipv6/conf/v0/accept_dad", "1")
	sysctl(t, "net/ipv6/conf/v0/dad_transmits", "100")
	ip(t, "addr add 2001:db8::1/64 dev v0")
	tr := newTracker(t, Options{Interfaces: []string{"up0"}})
	if got, want := m.compare(t, tr, "2001:4860::1"), "fd00::1"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// RFC 8981 addresses are the better ones only where use_tempaddr says so.
func TestTemporaryAddress(t *testing.T) {
	m := newMasquerader(t)
	sysctl(t, "net/ipv6/conf/up0/use_tempaddr", "1")
	ip(t, "addr add 2001:db8::1/64 dev up0 mngtmpaddr nodad")
	tr := newTracker(t, Options{Interfaces: []string{"up0"}})
	refreshUntil(t, tr, func() bool {
		own := tr.addresses[linkIndex(t, tr, "up0")]
		return len(own) == 2 && usable6(own[0]) && usable6(own[1])
	})
	const public = "2001:db8::1"
	if got := m.compare(t, tr, "2001:4860::1"); got != public {
		t.Errorf("use_tempaddr 1: %s, want %s", got, public)
	}
	sysctl(t, "net/ipv6/conf/up0/use_tempaddr", "2")
	refreshUntil(t, tr, func() bool { return true })
	if got := m.compare(t, tr, "2001:4860::1"); got == public {
		t.Errorf("use_tempaddr 2: %s, want the temporary address", got)
	}
}

// refreshUntil lists everything again, until the tracker is as wanted.
func refreshUntil(t *testing.T, tr *Tracker, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		tr.invalidate(staleAll)
		if err := tr.refresh(); err != nil {
			t.Fatal(err)
		}
		if ok() {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("still %v", tr.addresses)
		}
	}
}

func flush(t *testing.T, name string) {
	t.Helper()
	link, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	addrs, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		// The kernel takes secondary addresses away with their primary one.
		if err := netlink.AddrDel(link, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			t.Fatalf("delete %s from %s: %v", a, name, err)
		}
	}
}

// addRandomAddress returns what it added.
func addRandomAddress(t *testing.T, r *rand.Rand, name string) string {
	t.Helper()
	link, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	a, bits := randomAddress4(r), []int{8, 16, 20, 24, 24, 28, 31, 32}[r.IntN(8)]
	if r.IntN(2) == 0 {
		a, bits = randomAddress6(r), []int{16, 32, 48, 63, 64, 64, 65, 128}[r.IntN(8)]
	}
	add := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, a.BitLen())}}
	if a.Is6() {
		add.Flags = unix.IFA_F_NODAD | unix.IFA_F_NOPREFIXROUTE
	}
	switch r.IntN(8) {
	case 0:
		add.Scope = []int{unix.RT_SCOPE_LINK, unix.RT_SCOPE_SITE, unix.RT_SCOPE_HOST}[r.IntN(3)]
	case 1, 2:
		add.ValidLft = 3600 // and no longer preferred
	case 3:
		peer := randomAddress4(r)
		if a.Is6() {
			peer = randomAddress6(r)
		}
		add.Peer = &net.IPNet{IP: peer.AsSlice(), Mask: net.CIDRMask(bits, a.BitLen())}
	}
	err = netlink.AddrAdd(link, add)
	// EINVAL: the subnet is there with another scope.
	if err != nil && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.EINVAL) {
		t.Fatalf("add %+v to %s: %v", *add, name, err)
	}
	return fmt.Sprintf("%s: %s/%d peer %v scope %d valid %d", name, a, bits, add.Peer, add.Scope, add.ValidLft)
}

// randomAddress4 is one of few enough to meet in a subnet.
func randomAddress4(r *rand.Rand) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(10 + r.IntN(2)), byte(r.IntN(2)), byte(r.IntN(3) * 8), byte(1 + r.IntN(40))})
}

// randomAddress6 has a prefix of any kind that the policy table knows.
func randomAddress6(r *rand.Rand) netip.Addr {
	starts := []string{"2001:db8::", "2001:db8::", "2a00::", "fd00::", "fc00::", "2002:808::", "2001:0:5::", "2001:10::", "3ffe::", "fec0::", "fe80::", "::"}
	b := netip.MustParseAddr(starts[r.IntN(len(starts))]).As16()
	b[5] ^= byte(r.IntN(2))
	b[7] ^= byte(r.IntN(4))
	b[12], b[15] = byte(r.IntN(2)), byte(2+r.IntN(8))
	return netip.AddrFrom16(b)
}
