// SPDX-License-Identifier: Apache-2.0

package route

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"
)

// masquerader is a node of its own namespace that forwards a pod's packets
// through the uplink "up0" with the kernel's MASQUERADE. The pod and the outside
// are the other ends of tun devices.
type masquerader struct {
	pod, up *os.File
	port    uint16 // of the next packet, so that each is a flow of its own
}

// Packets to these leave with the pod's address: they show that the ones before
// have been dealt with.
const (
	unmasked4 = "198.18.255.255"
	unmasked6 = "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff"
)

func newMasquerader(t *testing.T) *masquerader {
	t.Helper()
	enterNamespace(t)
	m := &masquerader{pod: tun(t, "pod0"), up: tun(t, "up0"), port: 1024}
	sysctl(t, "net/ipv4/ip_forward", "1")
	sysctl(t, "net/ipv6/conf/all/forwarding", "1")
	sysctl(t, "net/ipv4/conf/all/rp_filter", "0")
	ip(t,
		"link set pod0 addrgenmode none", "link set up0 addrgenmode none", "link set pod0 up", "link set up0 up",
		"route add 10.99.0.0/16 dev pod0", "route add fd99::/16 dev pod0",
		"rule add iif pod0 lookup 100", "route add default dev up0 table 100", "route add ::/0 dev up0 table 100")
	ip6(t, "rule add iif pod0 lookup 100")
	iptables(t, "iptables-nft", "-A", "POSTROUTING", "-d", unmasked4, "-j", "RETURN")
	iptables(t, "iptables-nft", "-A", "POSTROUTING", "-o", "up0", "-j", "MASQUERADE")
	iptables(t, "ip6tables-nft", "-A", "POSTROUTING", "-d", unmasked6, "-j", "RETURN")
	iptables(t, "ip6tables-nft", "-A", "POSTROUTING", "-o", "up0", "-j", "MASQUERADE")
	return m
}

func iptables(t *testing.T, binary string, args ...string) {
	t.Helper()
	if out, err := exec.Command(binary, append([]string{"-w", "-t", "nat"}, args...)...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v\n%s", binary, args, err, out)
	}
}

// tun makes a tun device. What is written to the file arrives on it.
func tun(t *testing.T, name string) *os.File {
	t.Helper()
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	req, err := unix.NewIfreq(name)
	if err != nil {
		t.Fatal(err)
	}
	req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := errors.Join(unix.IoctlIfreq(fd, unix.TUNSETIFF, req), unix.SetNonblock(fd, true)); err != nil {
		t.Fatalf("make tun device: %v", err)
	}
	f := os.NewFile(uintptr(fd), name)
	t.Cleanup(func() { f.Close() })
	return f
}

// source is the address with which a pod's packet to dst leaves the node. The
// zero Addr: it does not leave.
func (m *masquerader) source(t *testing.T, dst netip.Addr) netip.Addr {
	t.Helper()
	src, last := podAddress(dst), netip.MustParseAddr(unmasked4)
	if dst.Is6() {
		last = netip.MustParseAddr(unmasked6)
	}
	for _, to := range []netip.Addr{dst, last} {
		m.port++
		if _, err := m.pod.Write(udp(t, src, to, m.port)); err != nil {
			t.Fatal(err)
		}
	}
	for b := make([]byte, 2000); ; {
		if err := m.up.SetReadDeadline(time.Now().Add(2 * time.Second)); err != nil {
			t.Fatal(err)
		}
		n, err := m.up.Read(b)
		if err != nil {
			t.Errorf("packet to %s: read from uplink: %v", dst, err)
			return netip.Addr{}
		}
		switch from, port := header(b[:n]); port {
		case m.port - 1:
			return from
		case m.port:
			return netip.Addr{}
		}
	}
}

func podAddress(dst netip.Addr) netip.Addr {
	if dst.Is6() {
		return netip.MustParseAddr("fd99::2")
	}
	return netip.MustParseAddr("10.99.0.2")
}

// header gives the source address and the UDP destination port of an IP packet.
func header(b []byte) (src netip.Addr, port uint16) {
	switch {
	case b[0]>>4 == 4 && b[9] == unix.IPPROTO_UDP:
		return netip.AddrFrom4([4]byte(b[12:16])), binary.BigEndian.Uint16(b[22:])
	case b[0]>>4 == 6 && b[6] == unix.IPPROTO_UDP:
		return netip.AddrFrom16([16]byte(b[8:24])), binary.BigEndian.Uint16(b[42:])
	}
	return netip.Addr{}, 0
}

func udp(t *testing.T, src, dst netip.Addr, port uint16) []byte {
	t.Helper()
	var network interface {
		gopacket.SerializableLayer
		gopacket.NetworkLayer
	} = &layers.IPv4{Version: 4, TTL: 64, Protocol: layers.IPProtocolUDP, SrcIP: src.AsSlice(), DstIP: dst.AsSlice()}
	if dst.Is6() {
		network = &layers.IPv6{Version: 6, HopLimit: 64, NextHeader: layers.IPProtocolUDP, SrcIP: src.AsSlice(), DstIP: dst.AsSlice()}
	}
	transport := &layers.UDP{SrcPort: 4000, DstPort: layers.UDPPort(port)}
	if err := transport.SetNetworkLayerForChecksum(network); err != nil {
		t.Fatal(err)
	}
	b := gopacket.NewSerializeBuffer()
	err := gopacket.SerializeLayers(b, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, network, transport)
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
