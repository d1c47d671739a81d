// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/lab"
	"ip-masq-agent/internal/route"
)

// Trap 38: flows of an address that is removed end at once, and new ones use what is
// there now (law of nf_nat_masquerade.c).
func TestAddressRemoved(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{}, testOptions(t))
	server := n.serve("udp", n.Remote.V4)
	stays := []*lab.Conn{n.dial("udp", n.serve("udp", n.ViaSubnet2.V4)), n.dial("udp", n.serve("udp", n.Remote.V6))}
	conn := n.dial("udp", server)
	if conn.Seen.Addr() != n.Addresses.Node.V4 {
		t.Fatalf("seen from %s", conn.Seen)
	}

	// The secondary address goes, too, unless promote_secondaries is set.
	n.run("ip", "addr", "del", "203.0.113.10/24", "dev", "eth0")
	n.run("ip", "addr", "add", "203.0.113.77/24", "dev", "eth0")
	n.run("ip", "route", "replace", "default", "via", "203.0.113.1")
	n.sync()
	if n.natAddresses()[n.Addresses.Node.V4] {
		t.Errorf("left: %+v", n.translations())
	}
	now := netip.MustParseAddr("203.0.113.77")
	if seen, err := conn.Ask(); err != nil || seen.Addr() != now {
		t.Errorf("seen from %s, want %s; %v", seen, now, err)
	}
	if fresh := n.dial("udp", server); fresh.Seen.Addr() != now {
		t.Errorf("a new one is seen from %s, want %s", fresh.Seen, now)
	}
	for _, c := range stays {
		n.goesOn(c)
	}
	n.wholePairs()
}

// Without any address nothing leaks, and the drops are counted.
func TestNoAddress(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{}, testOptions4(t))
	wire := lab.NewCapture(t, n.Wires[0])
	n.run("ip", "addr", "flush", "dev", "eth0", "scope", "global")
	n.run("ip", "addr", "add", "203.0.113.10/24", "scope", "link", "dev", "eth0") // routes, but masquerades nothing
	n.run("ip", "addr", "flush", "dev", "cbr0", "scope", "global")
	n.run("ip", "route", "replace", "10.244.0.0/24", "dev", "cbr0")
	n.run("ip", "route", "replace", "default", "via", "203.0.113.1")
	n.sync()
	status := n.status()
	if len(status.Interfaces) != 1 || status.Interfaces[0].SNATv4.IsValid() || len(status.Warnings) == 0 {
		t.Errorf("status %+v", status)
	}
	pod := n.Pods[0]
	if err := pod.Link.Send(lab.UDP(netip.AddrPortFrom(pod.V4, 1), netip.AddrPortFrom(n.Remote.V4, 2), nil)); err != nil {
		t.Fatal(err)
	}
	n.await("a drop", func() bool {
		stats, err := n.d.Stats()
		return err == nil && stats.Drops["no_address"] == 1
	})
	wire.NoPodAddress(t)
}

// An uplink that is served later, leaves and comes back.
func TestUplinkComesAndGoes(t *testing.T) {
	for attach, noTCX := range attachments() {
		t.Run(attach, func(t *testing.T) {
			t.Parallel()
			opts := testOptions4(t)
			opts.noTCX = noTCX
			n := newNode(t, lab.Options{SecondUplink: true}, opts)
			names := func() string {
				var names []string
				for _, i := range n.status().Interfaces {
					names = append(names, i.Name+"/"+i.Attach)
				}
				return strings.Join(names, " ")
			}
			both := "eth0/" + attach + " eth1/" + attach
			if got := names(); got != both {
				t.Errorf("served: %s", got)
			}
			conn := n.dial("udp", n.serve("udp", n.ViaUplink2.V4))
			other := n.dial("tcp", n.serve("tcp", n.Remote.V4))
			if conn.Seen.Addr() != n.Uplink2.V4 {
				t.Errorf("seen from %s", conn.Seen)
			}

			n.interfaces = []string{"eth*"} // an agent goes on with a link that is down
			n.run("ip", "link", "set", "eth1", "down")
			n.sync()
			if got := names(); got != both || n.natAddresses()[n.Uplink2.V4] {
				t.Errorf("down, served: %s, and left: %+v", got, n.translations())
			}
			n.run("ip", "link", "set", "eth1", "up")
			n.run("ip", "route", "replace", n.ViaUplink2.V4.String(), "via", "192.0.2.1")
			n.sync()
			if seen, err := conn.Ask(); err != nil || seen.Addr() != n.Uplink2.V4 {
				t.Errorf("up again: seen from %s, %v", seen, err)
			}

			n.run("ip", "link", "del", "eth1")
			n.sync()
			if got := names(); got != "eth0/"+attach || n.natAddresses()[n.Uplink2.V4] {
				t.Errorf("gone, but served: %s, and left: %+v", got, n.translations())
			}
			if pins := n.pins(); !noTCX && strings.Count(pins, "gress") != 2 {
				t.Errorf("pins\n%s", pins)
			}

			n.run("ip", "link", "add", "eth1", "type", "veth", "peer", "name", "wire")
			n.run("ip", "addr", "add", "192.0.2.20/24", "dev", "eth1")
			n.run("ip", "link", "set", "wire", "up")
			n.run("ip", "link", "set", "eth1", "up")
			n.run("ip", "route", "add", "192.88.99.0/24", "via", "192.0.2.1")
			n.sync()
			if got := names(); got != both {
				t.Errorf("back, but served: %s", got)
			}
			n.goesOn(other)
		})
	}
}

// A slot is given to the next link, not lost.
func TestSlots(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{Pods: -1, RoutedPods: -1}, testOptions4(t))
	slots := func() []int {
		t.Helper()
		have, err := n.d.readSlots()
		if err != nil {
			t.Fatal(err)
		}
		var used []int
		for slot := range have {
			used = append(used, slot)
		}
		slices.Sort(used)
		return used
	}
	for range 2 {
		n.run("ip", "tuntap", "add", "t0", "mode", "tun")
		n.run("ip", "link", "set", "t0", "up")
		n.run("ip", "route", "add", "192.88.99.0/24", "dev", "t0")
		n.sync()
		if got := slots(); !slices.Equal(got, []int{0, 1}) {
			t.Errorf("slots %v, want two", got)
		}
		n.run("ip", "link", "del", "t0")
		n.sync()
		if got := slots(); !slices.Equal(got, []int{0}) {
			t.Errorf("slots %v, want one", got)
		}
	}
}

// Subnet broadcasts are never touched, also where one address goes with every
// next hop.
func TestSubnetBroadcast(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{Pods: -1, RoutedPods: -1}, testOptions4(t))
	n.run("ip", "addr", "del", "198.51.100.10/24", "dev", "eth0")
	n.sync()
	wire := lab.NewCapture(t, n.Wires[0])
	conn, err := n.Node.ListenPacket(t.Context(), "udp", netip.AddrPortFrom(n.Secondary.V4, 0))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	to := netip.MustParseAddrPort("203.0.113.255:9")
	if _, err := conn.WriteTo([]byte("to all"), net.UDPAddrFromAddrPort(to)); err != nil {
		t.Fatal(err)
	}
	got := wire.Await(t, "the broadcast", func(p *lab.Packet) bool { return p.Dst == to.Addr() })
	if got.Src != n.Secondary.V4 {
		t.Errorf("seen from %s, want %s", got.Src, n.Secondary.V4)
	}
}

// An address that new flows do not get any more still serves its flows.
func TestDeprecatedAddressKeepsItsFlows(t *testing.T) {
	n := newNode(t, lab.Options{}, testOptions(t))
	c := n.dial("tcp", n.serve("tcp", n.Remote.V6))
	n.goesOn(c)
	n.run("ip", "address", "add", "2001:db8:113::99/64", "dev", "eth0")
	n.run("ip", "address", "change", n.Addresses.Node.V6.String()+"/64", "dev", "eth0", "preferred_lft", "0")
	n.sync()
	n.goesOn(c)
}

// The uplink's MAC changes before the agent hears of it.
func TestAnotherMACDoesNotLeak(t *testing.T) {
	n := newNode(t, lab.Options{}, testOptions(t))
	wire := lab.NewCapture(t, n.Wires[0])
	n.run("ip", "link", "set", "eth0", "address", "02:00:00:aa:bb:cc")
	pod, remote := n.Pods[0], n.Remote.V4
	sent := lab.UDP(netip.AddrPortFrom(pod.V4, 4000), netip.AddrPortFrom(remote, 53), []byte("datagram"))
	if err := pod.Link.Send(sent); err != nil {
		t.Fatal(err)
	}
	wire.Await(t, "the datagram", func(p *lab.Packet) bool { return p.Dst == remote })
	wire.NoPodAddress(t)
}

// Where the IP header is in a link's frames has to be known: what is not is
// refused, and the others are served.
func TestUnknownFramesAreRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{}, testOptions4(t))
	network := route.Snapshot{Uplinks: []route.Uplink{
		{Index: n.Pods[0].Host.Index, Name: "ib0", Type: unix.ARPHRD_INFINIBAND, HeaderLen: route.UnknownHeader, Up: true},
		{Index: n.Uplinks[0].Index, Name: "eth0", Type: unix.ARPHRD_ETHER, HeaderLen: 14, MAC: n.Uplinks[0].MAC[:], Up: true},
	}}
	err := n.Node.Do(func() error { return n.d.Sync(t.Context(), n.policy, &network) })
	if err == nil || !strings.Contains(err.Error(), "ib0") || !strings.Contains(err.Error(), "link type 32") {
		t.Errorf("got %v", err)
	}
	if status := n.status(); len(status.Interfaces) != 1 || status.Interfaces[0].Name != "eth0" {
		t.Errorf("serves %+v", status.Interfaces)
	}
}
