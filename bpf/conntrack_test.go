// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"testing"

	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// connection puts an entry into the kernel's conntrack: that of a packet and
// the replies to what it became.
func connection(t *testing.T, p, became packet) {
	t.Helper()
	side := func(p packet) netlink.IPTuple {
		return netlink.IPTuple{
			SrcIP: p.src.AsSlice(), DstIP: p.dst.AsSlice(), SrcPort: p.sport, DstPort: p.dport, Protocol: uint8(p.proto),
		}
	}
	family := unix.AF_INET
	if p.src.Is6() {
		family = unix.AF_INET6
	}
	entry := &netlink.ConntrackFlow{
		FamilyType: uint8(family), Forward: side(p), Reverse: side(became.reply()), TimeOut: 100,
	}
	if p.proto == layers.IPProtocolTCP {
		entry.ProtoInfo = &netlink.ProtoInfoTCP{State: nl.TCP_CONNTRACK_ESTABLISHED}
	}
	err := netlink.ConntrackCreate(netlink.ConntrackTable, netlink.InetFamily(family), entry)
	if err != nil {
		t.Fatalf("make a conntrack entry of %v: %v", p, err)
	}
	t.Cleanup(func() {
		if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
			t.Error("flush conntrack:", err)
		}
	})
}

// Trap 69: where conntrack can be asked, it knows replies without our notes.
func TestConntrackIsAsked(t *testing.T) {
	c := config{ctLookup: true}
	tests := []struct {
		name  string
		known func(h hosts) (p, became packet) // in conntrack
		do    func(d *datapath, h hosts)
	}{
		{"a reply is kept", func(h hosts) (packet, packet) {
			p := tcp(h.remote, 50000, h.pod, 80, "S")
			return p, p
		}, func(d *datapath, h hosts) {
			p := tcp(h.pod, 80, h.remote, 50000, "SA")
			d.take("SYN+ACK", leaves(p, keepReply))
			d.take("data", leaves(p.withFlags("AP"), keepReply))
			d.take("end", leaves(p.withFlags("FA"), keepReply))
			d.take("of another connection", leaves(p.to(h.remote, 50001), dropInvalid))
		}},
		{"a reply by UDP is kept", func(h hosts) (packet, packet) {
			p := udp(h.remote, 50000, h.pod, 53)
			return p, p
		}, func(d *datapath, h hosts) { d.take("answer", leaves(udp(h.pod, 53, h.remote, 50000), keepReply)) }},
		{"a reply through DNAT is kept", func(h hosts) (packet, packet) {
			p := tcp(h.remote, 50000, h.secondary, 80, "S")
			return p, p.to(h.pod, 8080)
		}, func(d *datapath, h hosts) {
			// It leaves with the service's address, which no tuple of conntrack's
			// begins with: here our notes are needed.
			d.take("SYN", arrives(tcp(h.remote, 50000, h.secondary, 80, "S"), inbound))
			d.take("SYN+ACK", leaves(tcp(h.secondary, 80, h.remote, 50000, "SA"), keepReply))
		}},
		{"an outgoing SYN is no reply", func(h hosts) (packet, packet) {
			p := tcp(h.remote, 80, h.pod, 40000, "S")
			return p, p
		}, func(d *datapath, h hosts) {
			p := tcp(h.pod, 40000, h.remote, 80, "S")
			d.take("SYN", leaves(p, opened, p.from(h.node, 40000)))
		}},
		{"established is not kept", func(h hosts) (packet, packet) {
			p := tcp(h.pod, 40000, h.remote, 80, "S")
			return p, p
		}, func(d *datapath, h hosts) {
			p := tcp(h.pod, 40000, h.remote, 80, "A")
			d.take("data", leaves(p, opened, p.from(h.node, 40000)))
		}},
		{"established is kept while the CIDR drains", func(h hosts) (packet, packet) {
			p := udp(h.pod, 40000, h.remote, 53)
			return p, p
		}, func(d *datapath, h hosts) {
			d.draining(host(h.remote), 60)
			d.take("known", leaves(udp(h.pod, 40000, h.remote, 53), keepDraining))
			p := udp(h.pod, 40001, h.remote, 53)
			d.take("unknown", leaves(p, opened, p.from(h.node, 40001)))
		}},
		{"a port of the node's connection is not handed out", func(h hosts) (packet, packet) {
			p := tcp(h.node, 40000, h.remote, 80, "S")
			return p, p
		}, func(d *datapath, h hosts) {
			if got := d.open(tcp(h.pod, 40000, h.remote, 80, "S")); got.sport == 40000 {
				d.Error("port handed out twice")
			}
			p := tcp(h.pod, 40000, h.remote, 81, "S")
			d.take("to another port", leaves(p, opened, p.from(h.node, 40000)))
		}},
		{"a port that netfilter translates to is not handed out", func(h hosts) (packet, packet) {
			p := udp(h.podB, 1234, h.remote, 53)
			return p, p.from(h.node, 40000)
		}, func(d *datapath, h hosts) {
			if got := d.open(udp(h.pod, 40000, h.remote, 53)); got.sport == 40000 {
				d.Error("port handed out twice")
			}
		}},
	}
	for _, tt := range tests {
		for _, h := range families {
			t.Run(tt.name+"/"+h.String(), func(t *testing.T) {
				d := borrow(t, c)
				p, became := tt.known(h)
				connection(t, p, became)
				tt.do(d, h)
			})
		}
	}
}
