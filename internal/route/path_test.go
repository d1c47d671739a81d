// SPDX-License-Identifier: Apache-2.0

package route

import (
	"net/netip"
	"testing"
)

func TestPath(t *testing.T) {
	enterNamespace(t)
	sysctl(t, "net/ipv4/ip_forward", "1")
	sysctl(t, "net/ipv6/conf/all/forwarding", "1") // which makes subnet router addresses
	ip(t, "tuntap add t0 mode tun", "link set t0 up", "addr add 192.0.2.1/24 dev t0", "addr add 2001:db8::1/64 dev t0 nodad",
		"tuntap add t1 mode tun", "link set t1 up", "addr add 198.51.100.1/24 dev t1",
		"link add v0 type veth peer v1", "link set v0 up", "link set v1 up", "route add 10.1.0.2/32 dev v0",
		"route add default via 192.0.2.254", "route add ::/0 via 2001:db8::fe",
		"route add 203.0.113.0/24 via inet6 2001:db8::fe dev t0",
		"route add prohibit 203.0.113.128/25",
		"rule add iif v0 lookup 100", "rule add from 198.51.100.1 lookup 100", "route add default via 198.51.100.254 table 100")
	tr := newTracker(t, Options{})
	await(t, tr, "the local route of IPv6, which the kernel makes later", func(*Snapshot) bool {
		p, err := tr.Path(netip.MustParseAddr("2001:db8::1"), netip.Addr{})
		return err == nil && p.Local
	})
	for _, tt := range []struct{ name, dst, src, want string }{
		{"gateway", "8.8.8.8", "", "t0 192.0.2.254"},
		{"on the link", "192.0.2.7", "", "t0 192.0.2.7"},
		{"own address", "198.51.100.1", "", "local"},
		{"loopback", "127.0.0.1", "", "local"},
		{"own address as source", "8.8.8.8", "198.51.100.1", "t1 198.51.100.254"},
		{"pod's address as source", "8.8.8.8", "10.1.0.2", "t1 198.51.100.254"},
		{"source of the other family", "8.8.8.8", "2001:db8::1", "t0 192.0.2.254"},
		{"IPv6", "2001:4860::8888", "", "t0 2001:db8::fe"},
		{"own IPv6 address", "2001:db8::1", "", "local"},
		{"IPv6 with a foreign source", "2001:4860::8888", "fd00::7", "t0 2001:db8::fe"},
		{"IPv4 via IPv6", "203.0.113.1", "", "t0 2001:db8::fe"},
		{"broadcast", "192.0.2.255", "", "broadcast t0 192.0.2.255"},
		{"broadcast, the node's source", "192.0.2.255", "192.0.2.1", "broadcast t0 192.0.2.255"},
		{"broadcast, a pod's source", "192.0.2.255", "10.1.0.2", "broadcast local"},
		{"limited broadcast", "255.255.255.255", "192.0.2.1", "broadcast t0 255.255.255.255"},
		{"no broadcast", "192.0.2.0", "", "t0 192.0.2.0"},
		{"IPv6 subnet router", "2001:db8::", "", "local"},
		{"prohibited", "203.0.113.129", "", "find route to 203.0.113.129: permission denied"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var src netip.Addr
			if tt.src != "" {
				src = netip.MustParseAddr(tt.src)
			}
			p, err := tr.Path(netip.MustParseAddr(tt.dst), src)
			got := p.LinkName + " " + p.NextHop.String()
			if p.Local {
				got = "local"
			}
			if p.Broadcast {
				got = "broadcast " + got
			}
			if err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

func TestMasqueradeByPath(t *testing.T) {
	enterNamespace(t)
	ip(t, "tuntap add t0 mode tun", "link set t0 up",
		"addr add 192.0.2.1/24 dev t0", "addr add 198.51.100.1/24 dev t0", "addr add 2001:db8::1/64 dev t0 nodad",
		"route add default via 198.51.100.254", "route add 203.0.113.0/24 via inet6 2001:db8::fe dev t0",
		"route add ::/0 via 2001:db8::fe",
		"link add v0 type veth peer v1", "link set v0 up", "link set v1 up", "route add 10.1.0.2/32 dev v0")
	tr := newTracker(t, Options{})
	for dst, want := range map[string]string{
		"8.8.8.8":         "198.51.100.1", // by its gateway
		"192.0.2.9":       "192.0.2.1",
		"203.0.113.9":     "192.0.2.1", // by itself, and in no subnet
		"10.1.0.2":        "none",      // through no uplink
		"2001:4860::8888": "2001:db8::1",
		"192.0.2.1":       "none", // local
	} {
		p, err := tr.Path(netip.MustParseAddr(dst), netip.Addr{})
		if err != nil {
			t.Fatal(err)
		}
		got := "none"
		if a, ok := tr.Snapshot().Masquerade(p, netip.MustParseAddr(dst)); ok {
			got = a.String()
		}
		if got != want {
			t.Errorf("to %s: %s, want %s", dst, got, want)
		}
	}
}
