// SPDX-License-Identifier: Apache-2.0

package route

import (
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

func TestFoundUplinks(t *testing.T) {
	for _, tt := range []struct {
		name  string
		setup []string
		want  string
	}{
		{"nothing", nil, ""},
		{"loopback never", []string{"route add 198.51.100.0/24 dev lo", "route add default dev lo"}, ""},
		{"tun with a subnet", []string{"tuntap add t0 mode tun", "link set t0 up", "addr add 192.0.2.1/24 dev t0"}, "t0"},
		{"link that is down", []string{"tuntap add t0 mode tun", "addr add 192.0.2.1/24 dev t0"}, ""},
		{"link without route", []string{"tuntap add t0 mode tun", "link set t0 up"}, ""},
		{"address without subnet", []string{"tuntap add t0 mode tun", "link set t0 up", "addr add 192.0.2.1/32 dev t0"}, ""},
		{"IPv6 subnet", []string{"tuntap add t0 mode tun", "link set t0 up", "addr add 2001:db8::1/64 dev t0 nodad"}, "t0"},
		{"route in another table", []string{"tuntap add t0 mode tun", "link set t0 up", "route add 198.51.100.0/24 dev t0 table 1234"}, "t0"},
		{"unreachable and blackhole routes", []string{"tuntap add t0 mode tun", "link set t0 up", "route add unreachable 198.51.100.0/24", "route add blackhole default"}, ""},
		{"veth with a subnet leads to a pod", []string{"link add v0 type veth peer v1", "link set v0 up", "link set v1 up", "addr add 10.1.0.1/24 dev v0", "route add 10.2.0.1/32 dev v0"}, ""},
		{"veth with a default route", []string{"link add v0 type veth peer v1", "link set v0 up", "link set v1 up", "route add default dev v0"}, "v0"},
		{"veth with an IPv6 default route", []string{"link add v0 type veth peer v1", "link set v0 up", "link set v1 up", "route add ::/0 dev v0"}, "v0"},
		{"veth with a gateway", []string{"link add v0 type veth peer v1", "link set v0 up", "link set v1 up", "addr add 10.1.0.1/24 dev v0", "route add 198.51.100.0/24 via 10.1.0.2"}, "v0"},
		{"veth with an IPv6 gateway for IPv4", []string{"link add v0 type veth peer v1", "link set v0 up", "link set v1 up", "route add 198.51.100.0/24 via inet6 fe80::1 dev v0"}, "v0"},
		{"veth with one hop of several", []string{
			"link add v0 type veth peer v1", "link set v0 up", "link set v1 up",
			"link add w0 type veth peer w1", "link set w0 up", "link set w1 up",
			"addr add 10.1.0.1/24 dev v0", "addr add 10.2.0.1/24 dev w1",
			"route add 198.51.100.0/24 nexthop via 10.1.0.2 nexthop via 10.2.0.2",
		}, "v0 w1"},
		{"bridge of pods", []string{"link add br0 type bridge", "link set br0 up", "addr add 10.1.0.1/24 dev br0"}, ""},
		{"bridge with a default route, but not its port", []string{
			"link add br0 type bridge", "link set br0 up", "addr add 10.1.0.1/24 dev br0", "route add default via 10.1.0.2",
			"link add v0 type veth peer v1", "link set v0 up", "link set v1 up", "route add 198.51.100.0/24 via 10.1.0.2 dev v0 onlink",
			"link set v0 master br0",
		}, "br0"},
		{"macvlan", []string{"link add v0 type veth peer v1", "link set v0 up", "link set v1 up", "link add link v0 name m0 type macvlan", "link set m0 up", "addr add 10.1.0.1/24 dev m0"}, "m0"},
		{"routes of nexthop objects", []string{
			"link add v0 type veth peer v1", "link set v0 up", "link set v1 up", "addr add 10.1.0.1/24 dev v0",
			"nexthop add id 7 via 10.1.0.2 dev v0", "route add 198.51.100.0/24 nhid 7",
		}, "v0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			enterNamespace(t)
			// From a listing, and from events alone.
			after := track(t, Options{})
			ip(t, append([]string{"link set lo up"}, tt.setup...)...)
			before := newTracker(t, Options{})
			if got := names(before.Snapshot()); got != tt.want {
				t.Errorf("listed: %q, want %q", got, tt.want)
			}
			barrier(t, after)
			if got := names(after.Snapshot()); got != tt.want {
				t.Errorf("followed: %q, want %q", got, tt.want)
			}
		})
	}
}

func TestServedLinkStaysServed(t *testing.T) {
	enterNamespace(t)
	ip(t, "tuntap add t0 mode tun", "link set t0 up", "addr add 192.0.2.1/24 dev t0", "addr add 2001:db8::1/64 dev t0 nodad")
	tr := track(t, Options{})
	if got, want := tr.Snapshot().String(), "t0 192.0.2.1 2001:db8::1, 2 addresses"; got != want {
		t.Fatalf("at first %s, want %s", got, want)
	}
	for _, step := range []struct{ do, want string }{
		{"addr del 192.0.2.1/24 dev t0", "t0 2001:db8::1, 1 addresses"},
		{"addr del 2001:db8::1/64 dev t0", "t0 without address, 0 addresses"},
		{"addr add 192.0.2.2/24 dev t0", "t0 192.0.2.2, 1 addresses"},
		{"link set t0 down", "t0 down, 1 addresses"},
		{"link set t0 name uplink", "uplink down, 1 addresses"},
		{"link set uplink up", "uplink 192.0.2.2, 1 addresses"},
		{"route flush dev uplink", "uplink 192.0.2.2, 1 addresses"},
		{"link del uplink", "0 addresses"},
		{"tuntap add t0 mode tun", "0 addresses"},
	} {
		ip(t, step.do)
		await(t, tr, step.want, func(s *Snapshot) bool { return s.String() == step.want })
	}
}

func TestLinkThatIsDownHasNoAddress(t *testing.T) {
	enterNamespace(t)
	ip(t, "tuntap add t0 mode tun", "addr add 192.0.2.1/24 dev t0", "addr add 2001:db8::1/64 dev t0 nodad")
	u := uplink(t, newTracker(t, Options{Interfaces: []string{"t0"}}).Snapshot(), "t0")
	if u.Up || u.V4 != nil || u.V6 != nil {
		t.Errorf("up %v, rules %v %v", u.Up, u.V4, u.V6)
	}
}

func TestBridgePortFallsOutOfService(t *testing.T) {
	enterNamespace(t)
	ip(t, "link add v0 type veth peer v1", "link set v0 up", "link set v1 up", "route add default dev v0", "link add br0 type bridge", "link set br0 up")
	tr := track(t, Options{})
	for _, step := range []struct{ do, want string }{
		{"link set v0 master br0", ""},
		{"link set v0 nomaster", "v0"},
	} {
		ip(t, step.do)
		await(t, tr, step.do, named(step.want))
	}
}

// Where the routes name only the ids of nexthop objects.

func TestNexthopObjects(t *testing.T) {
	enterNamespace(t)
	sysctl(t, "net/ipv4/nexthop_compat_mode", "0")
	var setup []string
	for i := range 5 {
		setup = append(setup, fmt.Sprintf("link add v%d type veth peer w%d", i, i), fmt.Sprintf("link set v%d up", i),
			fmt.Sprintf("link set w%d up", i), fmt.Sprintf("addr add 10.1.%d.1/24 dev v%d", i, i))
	}
	ip(t, append(setup, "nexthop add id 1 via 10.1.0.2 dev v0", "nexthop add id 2 via 10.1.1.2 dev v1",
		"nexthop add id 3 group 1/2", "nexthop add id 4 dev v2", "nexthop add id 5 via 10.1.4.2 dev v4")...)
	tr := track(t, Options{})
	ip(t, "route add 198.51.100.0/24 nhid 3", "route add 192.0.2.0/24 nhid 4")
	await(t, tr, "the group's links", named("v0 v1"))
	ip(t, "route add default nhid 4")
	await(t, tr, "the default route's link", named("v0 v1 v2"))
}

// When a link goes down the kernel drops its IPv4 routes without a word. They

// must not count when it comes back.

func TestNoUplinkOnOldEvidence(t *testing.T) {
	enterNamespace(t)
	ip(t, "link add v0 type veth peer v1", "link set v1 up", "link set v0 up", "link add br0 type bridge",
		"link set v0 master br0", "route add default dev v0")
	tr := track(t, Options{})
	ip(t, "link set v0 down", "link set v0 nomaster", "link set v0 up")
	barrier(t, tr)
	if got := names(tr.Snapshot()); got != "" {
		t.Errorf("uplinks %q, want none", got)
	}
}

func TestNewLinkWithTheNumberOfAnUplink(t *testing.T) {
	enterNamespace(t)
	ip(t, "link add v0 index 77 type veth peer v1", "link set v0 up", "link set v1 up", "route add default dev v0")
	tr := track(t, Options{})
	if got := names(tr.Snapshot()); got != "v0" {
		t.Fatalf("uplinks %q, want v0", got)
	}
	ip(t, "link del v0", "link add v0 index 77 type veth peer v1", "link set v0 up", "link set v1 up")
	barrier(t, tr)
	if got := names(tr.Snapshot()); got != "" {
		t.Errorf("uplinks %q, want none", got)
	}
}

func TestNamedUplinks(t *testing.T) {
	enterNamespace(t)
	log := newRecord()
	tr := track(t, Options{Interfaces: []string{"t0", "v[0-9]", "lo", "absent*"}, Log: log.logger()})
	if got := log.all("no such uplink"); len(got) != 4 {
		t.Errorf("warnings at first: %q, want 4", got)
	}
	ip(t, "link add v0 type veth peer v1", "link add vx type veth peer vy", "tuntap add t0 mode tun", "tuntap add t1 mode tun",
		"link set t1 up", "route add default dev t1")
	await(t, tr, "the named ones", named("v1 v0 t0"))
	ip(t, "link set v1 name other")
	await(t, tr, "one less", named("v0 t0"))
	ip(t, "link del t0")
	await(t, tr, "two less", named("v0"))
	barrier(t, tr)
	if got := log.all("no such uplink"); len(got) != 1 || !strings.Contains(got[0], "interface=t0") {
		t.Errorf("later warnings: %q, want one, of t0", got)
	}
}

func TestMalformedGlob(t *testing.T) {
	if _, err := NewTracker(Options{Interfaces: []string{"eth0", "eth["}}); err == nil || !strings.Contains(err.Error(), "eth[") {
		t.Errorf("error %v, want one that names the glob", err)
	}
}

func TestLinkHeader(t *testing.T) {
	enterNamespace(t)
	ip(t, "tuntap add t0 mode tun", "tuntap add t1 mode tap", "link set t0 up", "link set t1 up", "link set t1 address 02:00:00:00:00:01")
	s := newTracker(t, Options{Interfaces: []string{"*"}}).Snapshot()
	if u := uplink(t, s, "t0"); u.HeaderLen != 0 || u.MAC != nil || !u.Up {
		t.Errorf("tun: %d bytes, MAC %v, up %v", u.HeaderLen, u.MAC, u.Up)
	}
	if u := uplink(t, s, "t1"); u.HeaderLen != 14 || u.MAC.String() != "02:00:00:00:00:01" {
		t.Errorf("tap: %d bytes, MAC %v", u.HeaderLen, u.MAC)
	}
}

func TestAddresses(t *testing.T) {
	enterNamespace(t)
	ip(t, "tuntap add t0 mode tun", "link set t0 up",
		"addr add 192.0.2.2/24 dev t0", "addr add 192.0.2.1/24 dev t0", // the second one is secondary
		"addr add 10.0.0.1 peer 10.0.0.2/32 dev t0", "addr add 169.254.1.1/32 dev lo",
		"addr add 2001:db8::1/64 dev t0 nodad", "addr add fe80::1/64 dev t0 nodad",
		"addr add fd00::1/128 dev lo nodad", "addr add fd00::1/128 dev t0 nodad")
	got := fmt.Sprint(newTracker(t, Options{}).Snapshot().Addresses)
	if want := "[10.0.0.1 169.254.1.1 192.0.2.1 192.0.2.2 2001:db8::1 fd00::1]"; got != want {
		t.Errorf("addresses %s, want %s", got, want)
	}
}

// The kernel's own list of broadcasts is the local table.

func TestBroadcasts(t *testing.T) {
	enterNamespace(t)
	ip(t, "tuntap add t0 mode tun", "link set t0 up", "route add default dev t0",
		"addr add 192.0.2.1/24 dev t0", "addr add 192.0.2.2/24 dev t0", "addr add 192.0.2.66/26 dev t0",
		"addr add 198.51.100.1/31 dev t0", "addr add 198.51.100.7/32 dev t0", "addr add 10.9.0.1 peer 10.9.8.1/20 dev t0",
		"addr add 2001:db8::1/64 dev t0 nodad",
		"link add v0 type veth peer v1", "link set v0 up", "addr add 10.1.0.1/24 dev v0")
	tr := newTracker(t, Options{})
	out, err := exec.Command("ip", "-4", "-o", "route", "show", "table", "local", "type", "broadcast", "dev", "t0").Output()
	if err != nil {
		t.Fatal(err)
	}
	var want []netip.Addr
	for line := range strings.Lines(string(out)) {
		want = append(want, netip.MustParseAddr(strings.Fields(line)[1]))
	}
	slices.SortFunc(want, netip.Addr.Compare)
	if got := tr.Snapshot().Broadcasts; !slices.Equal(got, want) || len(want) != 3 {
		t.Errorf("got %v, the kernel has %v", got, want)
	}
}
