// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Traps 64 and 65: what others have masqueraded, and tunnels, take no entry.
func TestNodesOwnPacketsStay(t *testing.T) {
	runTable(t, []row{{name: "kept without state", trap: 65, steps: func(h hosts) []step {
		return []step{
			leaves(udp(h.node, 40000, h.remote, 53), keepNode),
			leaves(tcp(h.node, 40000, h.remote, 80, "S"), keepNode),
			leaves(tcp(h.node, 40000, h.remote, 80, "FA"), keepNode),
			leaves(udp(h.node, 4789, h.remote, 4789), keepNode),
		}
	}}, {name: "kept with state where no socket guards its tuple", trap: 45, steps: func(h hosts) []step {
		steps := []step{}
		for _, own := range []packet{h.ping(h.node, h.remote, 7), raw(h.node, h.remote, protoESP), sctp(h.node, 3868, h.remote, 3868)} {
			steps = append(steps,
				leaves(own, nodeOpened),
				arrives(own.reply(), noFlow),
				leaves(own, keepNode),
			)
		}
		return steps
	}}, {name: "kept when pods get random ports", trap: 65, config: config{randomFully: true}, steps: func(h hosts) []step {
		return []step{
			leaves(udp(h.node, 40000, h.remote, 53), keepNode),
			leaves(h.ping(h.node, h.remote, 7), nodeOpened),
			leaves(h.ping(h.node, h.remote, 7), keepNode),
		}
	}}, {name: "safe from a pod that would take its tuple", trap: 45, steps: func(h hosts) []step {
		own := raw(h.node, h.remote, protoESP)
		return []step{
			leaves(own, nodeOpened),
			leaves(raw(h.pod, h.remote, protoESP), unsupported),
			arrives(own.reply(), noFlow),
			leaves(own, keepNode),
		}
	}}, {name: "kept beside a pod's flow to another port or host", trap: 5, steps: func(h hosts) []step {
		p := udp(h.pod, 40000, h.remote, 53)
		return []step{
			leaves(p, opened, p.from(h.node, 40000)),
			leaves(udp(h.node, 40000, h.remote, 54), keepNode),
			leaves(udp(h.node, 40000, h.remoteB, 53), keepNode),
			leaves(udp(h.node, 40001, h.remote, 53), keepNode),
			leaves(tcp(h.node, 40000, h.remote, 53, "S"), keepNode),
		}
	}}, {name: "kept when the pod's flow with its tuple is dead", trap: 5, steps: func(h hosts) []step {
		p := udp(h.pod, 40000, h.remote, 53)
		return []step{
			leaves(p, opened, p.from(h.node, 40000)),
			do(func(d *datapath) { d.age(p, 32*time.Second) }),
			leaves(p.from(h.node, 40000), keepNode),
		}
	}}, {name: "dropped when it clashes and has no port to change", trap: 45, steps: func(h hosts) []step {
		p := raw(h.pod, h.remote, protoESP)
		return []step{leaves(p, opened, p.from(h.node, 0)), leaves(p.from(h.node, 0), unsupported)}
	}}})
}

// A note that a connection came from outside, here to one of several addresses,
// does not excuse a clash.
func TestNodesOwnPacketThatClashesIsMovedThoughNoted(t *testing.T) {
	c := config{byRule: true}
	d := borrow(t, c)
	for _, h := range families {
		d.forget(t, c)
		d.addressRule(netip.PrefixFrom(h.node, 0).Masked(), h.node)
		p, own := udp(h.pod, 40000, h.remote, 53), udp(h.node, 40000, h.remote, 53)
		d.take("to the node", arrives(own.reply(), inbound))
		d.take("pod", leaves(p, opened, own))
		if moved := d.open(own); moved.sport == own.sport {
			t.Errorf("%v: not moved", h)
		}
	}
}

// As netfilter moves it: trap 5.
func TestNodesOwnPacketThatClashesIsMoved(t *testing.T) {
	d := borrow(t, config{})
	for _, h := range families {
		for _, p := range []packet{
			udp(h.pod, 40000, h.remote, 53), tcp(h.pod, 40000, h.remote, 80, "S"), h.ping(h.pod, h.remote, 7),
		} {
			t.Run(h.String()+"/"+p.proto.String(), func(t *testing.T) {
				d.forget(t, config{})
				outside := d.open(p)
				own := p.from(outside.src, max(outside.sport, outside.icmpID))
				moved := d.open(own)
				if moved.sport == own.sport && moved.icmpID == own.icmpID {
					t.Fatalf("%v left unmoved", own)
				}
				d.take("again", leaves(own, translated, moved))
				d.take("reply to the node", arrives(moved.reply(), translated, own.reply()))
				d.take("reply to the pod", arrives(outside.reply(), translated, p.reply()))
			})
		}
	}
}

func TestSecondaryAddressIsRewritten(t *testing.T) {
	runTable(t, []row{{name: "opened and the reply restored", trap: 40, steps: func(h hosts) []step {
		p, ping := udp(h.secondary, 40000, h.remote, 53), h.ping(h.secondary, h.remote, 7)
		return []step{
			leaves(p, opened, p.from(h.node, 40000)),
			arrives(p.from(h.node, 40000).reply(), translated, p.reply()),
			leaves(ping, opened, ping.from(h.node, 7)),
			arrives(ping.from(h.node, 7).reply(), translated, ping.reply()),
		}
	}}, {name: "kept in replies to connections from outside", trap: 2, steps: func(h hosts) []step {
		syn := tcp(h.remote, 50000, h.secondary, 80, "S")
		return []step{arrives(syn, inbound), leaves(syn.reply(), keepReply)}
	}}})
}

func TestPortsOfTheNodesSocketsAreNotHandedOut(t *testing.T) {
	device(t)
	d := borrow(t, config{})
	listen := func(t *testing.T, network, address string) {
		var l net.ListenConfig
		var err error
		var socket interface{ Close() error }
		if network[:3] == "tcp" {
			socket, err = l.Listen(context.Background(), network, address)
		} else {
			socket, err = l.ListenPacket(context.Background(), network, address)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { socket.Close() })
	}
	tests := []struct {
		name     string
		h        hosts
		udp      bool
		socket   func(t *testing.T)
		kept     bool
		testPort uint16
	}{
		{"TCP listener", v4, false, func(t *testing.T) { listen(t, "tcp4", ":40000") }, false, 40000},
		{"TCP listener", v6, false, func(t *testing.T) { listen(t, "tcp6", ":40000") }, false, 40000},
		{"TCP listener of both families", v4, false, func(t *testing.T) { listen(t, "tcp", ":40000") }, false, 40000},
		{"UDP socket", v4, true, func(t *testing.T) { listen(t, "udp4", ":8472") }, false, 8472},
		{"UDP socket", v6, true, func(t *testing.T) { listen(t, "udp6", ":8472") }, false, 8472},
		{"UDP socket on the address", v4, true, func(t *testing.T) { listen(t, "udp4", "203.0.113.10:40000") }, false, 40000},
		{"UDP socket on another address", v4, true, func(t *testing.T) { listen(t, "udp4", "203.0.113.11:40000") }, true, 40000},
		{"TCP listener for a datagram", v4, true, func(t *testing.T) { listen(t, "tcp4", ":40000") }, true, 40000},
		{"TCP listener on another port", v4, false, func(t *testing.T) { listen(t, "tcp4", ":40001") }, true, 40000},
		{"TCP connection to the same remote", v4, false, func(t *testing.T) { connecting(t, v4, 40000, 80) }, false, 40000},
		{"TCP connection to the same remote", v6, false, func(t *testing.T) { connecting(t, v6, 40000, 80) }, false, 40000},
		{"TCP connection to another port", v4, false, func(t *testing.T) { connecting(t, v4, 40000, 81) }, true, 40000},
	}
	for _, tt := range tests {
		t.Run(tt.name+"/"+tt.h.String(), func(t *testing.T) {
			d.forget(t, config{})
			tt.socket(t)
			p := tcp(tt.h.pod, tt.testPort, tt.h.remote, 80, "S")
			if tt.udp {
				p = udp(tt.h.pod, tt.testPort, tt.h.remote, 80)
			}
			if got := d.open(p).sport; (got == tt.testPort) != tt.kept {
				t.Errorf("port %d became %d, kept should be %v", tt.testPort, got, tt.kept)
			}
		})
	}
}

// connecting makes a socket of the node's that waits for an answer.
func connecting(t *testing.T, h hosts, sport, dport int) {
	t.Helper()
	family := unix.AF_INET
	var local, remote unix.Sockaddr = &unix.SockaddrInet4{Port: sport, Addr: v4.node.As4()},
		&unix.SockaddrInet4{Port: dport, Addr: v4.remote.As4()}
	if h.v6 {
		family = unix.AF_INET6
		local = &unix.SockaddrInet6{Port: sport, Addr: v6.node.As16()}
		remote = &unix.SockaddrInet6{Port: dport, Addr: v6.remote.As16()}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, local); err != nil {
		t.Fatal("bind:", err)
	}
	if err := unix.Connect(fd, remote); !errors.Is(err, syscall.EINPROGRESS) {
		t.Fatal("connect:", err)
	}
}

// device makes a link with the node's addresses and a default route.
func device(t *testing.T) netlink.Link {
	t.Helper()
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "uplink", MTU: 1280}, PeerName: "outside"}
	steps := []error{netlink.LinkAdd(link)}
	t.Cleanup(func() {
		if err := netlink.LinkDel(link); err != nil {
			t.Error("remove uplink:", err)
		}
	})
	peer, err := netlink.LinkByName(link.PeerName)
	if err != nil {
		t.Fatal("make uplink:", errors.Join(append(steps, err)...))
	}
	steps = append(steps, netlink.LinkSetUp(link), netlink.LinkSetUp(peer),
		os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)) // or the kernel looks up no route
	for _, prefix := range []string{
		"203.0.113.10/24", "203.0.113.11/24", "198.51.100.10/24", "2001:db8:1::10/64",
	} {
		address, err := netlink.ParseAddr(prefix)
		steps = append(steps, err)
		if address.IP.To4() == nil {
			address.Flags = unix.IFA_F_NODAD
		}
		steps = append(steps, netlink.AddrAdd(link, address))
	}
	for to, via := range map[string]netip.Addr{
		"0.0.0.0/0": v4.router, "9.9.9.0/24": addr("198.51.100.1"), "9.9.8.0/24": addr("198.51.100.2"), "::/0": v6.router,
	} {
		_, destination, err := net.ParseCIDR(to)
		steps = append(steps, err, netlink.RouteAdd(&netlink.Route{
			LinkIndex: link.Index, Dst: destination, Gw: via.AsSlice(),
		}))
	}
	// One neighbour is known, so that the kernel goes on to compare the MTU.
	steps = append(steps, netlink.NeighSet(&netlink.Neigh{
		LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT,
		IP: addr("198.51.100.1").AsSlice(), HardwareAddr: routerMAC[:],
	}))
	if err := errors.Join(steps...); err != nil {
		t.Fatal("make uplink:", err)
	}
	made, err := netlink.LinkByName(link.Name)
	if err != nil {
		t.Fatal("find uplink:", err)
	}
	return made
}

// Trap 39: the address follows from the next hop in IPv4, as MASQUERADE has it.
func TestAddressIsThatOfTheNextHop(t *testing.T) {
	link := device(t)
	d := borrow(t, config{byRule: true})
	second := addr("198.51.100.10")
	tests := []struct {
		name     string
		dst, src netip.Addr
		size     int
	}{
		{"by the default route", v4.remote, v4.node, 8},
		{"on the second subnet", addr("198.51.100.7"), second, 8},
		{"through a gateway on the second subnet", addr("9.9.9.9"), second, 8},
		{"through a gateway that is no neighbour yet", addr("9.9.8.9"), second, 8},
		{"larger than the MTU", addr("9.9.9.9"), second, 1400},
		{"IPv6 by the default rule", v6.remote, v6.node, 8},
		{"IPv6 by destination", v6.remoteB, v6.secondary, 8},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d.forget(t, config{byRule: true})
			d.ifindex = uint32(link.Attrs().Index)
			d.uplink(0, config{byRule: true})
			d.addressRule(netip.MustParsePrefix("0.0.0.0/0"), v4.node)
			d.addressRule(netip.MustParsePrefix("198.51.100.0/24"), second)
			d.addressRule(netip.MustParsePrefix("::/0"), v6.node)
			d.addressRule(host(v6.remoteB), v6.secondary)
			src := v4.pod
			if tt.dst.Is6() {
				src = v6.pod
			}
			p := udp(src, 40000, tt.dst, 53).withBody(make([]byte, tt.size))
			d.take("pod", leaves(p, opened, p.from(tt.src, 40000)))
			if f := d.flow(p); f.ifindex != d.ifindex {
				t.Errorf("flow is on device %d, want %d", f.ifindex, d.ifindex)
			}
			own := udp(tt.src, 40001, tt.dst, 53)
			d.take("the node's own", leaves(own, keepNode))
		})
	}
	t.Run("dropped where no rule has one", func(t *testing.T) {
		d.forget(t, config{byRule: true})
		d.take("pod", leaves(udp(v4.pod, 40000, v4.remote, 53), noAddress))
		d.take("pod", leaves(udp(v6.pod, 40000, v6.remote, 53), noAddress))
	})
}
