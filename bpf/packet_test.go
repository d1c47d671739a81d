// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

const (
	ethernetLength = 14
	trafficClass   = 46<<2 | 1 // of all packets: DSCP and ECN, which nobody changes

	protoAH   = layers.IPProtocolAH
	protoESP  = layers.IPProtocolESP
	protoGRE  = layers.IPProtocolGRE
	protoTest = layers.IPProtocol(253) // for experiments, RFC 3692
)

var (
	uplinkMAC = [6]uint8{2, 0, 0, 0, 0, 0x10}
	routerMAC = [6]uint8{2, 0, 0, 0, 0, 1}
)

// hosts are the addresses of one family in these tests.
type hosts struct {
	v6                             bool
	pod, podB, node, secondary     netip.Addr
	remote, remoteB, near, router  netip.Addr
	inside                         netip.Prefix // keeps pods' addresses
	multicast, broadcast, linkOnly netip.Addr
	echo, echoReply                uint8 // ICMP types
	unreachable, exceeded, problem uint8
}

var (
	v4 = hosts{
		pod: addr("10.1.0.2"), podB: addr("10.1.0.3"),
		node: addr("203.0.113.10"), secondary: addr("203.0.113.11"),
		remote: addr("8.8.8.8"), remoteB: addr("8.8.4.4"),
		near: addr("10.2.0.2"), router: addr("203.0.113.1"),
		inside:    netip.MustParsePrefix("10.0.0.0/8"),
		multicast: addr("224.0.0.251"), broadcast: addr("203.0.113.255"),
		echo: 8, echoReply: 0, unreachable: 3, exceeded: 11, problem: 12,
	}
	v6 = hosts{
		v6:  true,
		pod: addr("fd00:1::2"), podB: addr("fd00:1::3"),
		node: addr("2001:db8:1::10"), secondary: addr("2001:db8:1::11"),
		remote: addr("2001:db8:8::8"), remoteB: addr("2001:db8:8::4"),
		near: addr("fd00:2::2"), router: addr("2001:db8:1::1"),
		inside:    netip.MustParsePrefix("fd00::/8"),
		multicast: addr("ff02::fb"), linkOnly: addr("fe80::2"),
		echo: 128, echoReply: 129, unreachable: 1, exceeded: 3, problem: 4,
	}
	families = []hosts{v4, v6}
)

func addr(text string) netip.Addr { return netip.MustParseAddr(text) }

func (h hosts) String() string {
	if h.v6 {
		return "IPv6"
	}
	return "IPv4"
}

func (h hosts) icmpProto() layers.IPProtocol {
	if h.v6 {
		return layers.IPProtocolICMPv6
	}
	return layers.IPProtocolICMPv4
}

// packet is a packet in the words of these tests; frame() makes the bytes.
// Two packets that differ in an address have all the checksums that follow.
type packet struct {
	src, dst     netip.Addr
	sport, dport uint16
	proto        layers.IPProtocol

	tcpFlags           string // letters of SYN, ACK, FIN, RST, PSH, URG, ECE, CWR
	seq, ack           uint32 // seq is SCTP's verification tag
	icmpType, icmpCode uint8
	icmpID             uint16 // of queries and replies, else what stands there
	mtu                uint16 // of errors that have one
	noChecksum         bool   // UDP without
	wrong              bool   // the transport's checksum is one too high
	wrongHeader        bool   // that of the IPv4 header is
	unsummed           bool   // body is all of the transport, whatever the protocol
	unmeasured         bool   // the IP header names no length, as that of segments which are to be cut
	body               []byte

	options    []byte      // IPv4, a multiple of four octets
	extensions []extension // IPv6, before a fragment header
	behind     []extension // IPv6, after it
	fragment   fragment
	mac        [6]uint8 // sender's; unset: the uplink's
	noHeader   bool     // the frame begins with the IP header
	tag        uint16   // type of the VLAN tag that the frame has, if any
}

type extension struct {
	proto layers.IPProtocol
	body  []byte // without the first octet, which names the next header
}

// fragment is a part of a packet. The zero value is a whole packet.
type fragment struct {
	id     uint32
	offset int // octets
	length int // octets, 0: what is left, and no more fragments
}

func tcp(src netip.Addr, sport uint16, dst netip.Addr, dport uint16, flags string) packet {
	return packet{
		src: src, dst: dst, sport: sport, dport: dport,
		proto: layers.IPProtocolTCP, tcpFlags: flags, seq: 1000,
	}
}

func udp(src netip.Addr, sport uint16, dst netip.Addr, dport uint16) packet {
	return packet{
		src: src, dst: dst, sport: sport, dport: dport,
		proto: layers.IPProtocolUDP, body: []byte("datagram"),
	}
}

func sctp(src netip.Addr, sport uint16, dst netip.Addr, dport uint16) packet {
	return packet{
		src: src, dst: dst, sport: sport, dport: dport, proto: layers.IPProtocolSCTP,
		body: []byte{1, 0, 0, 20, 0, 0, 0, 7, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 9}, // INIT
	}
}

// raw is a packet of a protocol that has no ports.
func raw(src, dst netip.Addr, proto layers.IPProtocol) packet {
	return packet{src: src, dst: dst, proto: proto, body: []byte("\x00\x00\x00\x00\x00\x00\x00\x01sealed")}
}

func (h hosts) icmp(src, dst netip.Addr, kind uint8, id uint16) packet {
	return packet{
		src: src, dst: dst, proto: h.icmpProto(), icmpType: kind, icmpID: id,
		body: []byte("echo, echo"),
	}
}

func (h hosts) ping(src, dst netip.Addr, id uint16) packet { return h.icmp(src, dst, h.echo, id) }
func (h hosts) pong(src, dst netip.Addr, id uint16) packet { return h.icmp(src, dst, h.echoReply, id) }

// icmpError is an error about a packet, of which it quotes at most so many
// octets after the IP header. Negative: all.
func (h hosts) icmpError(src, dst netip.Addr, kind, code uint8, about packet, quote int) packet {
	about.noHeader = true
	quoted := about.frame()
	if quote >= 0 {
		quoted = quoted[:min(len(quoted), about.headerLength()+quote)]
	}
	return packet{
		src: src, dst: dst, proto: h.icmpProto(), icmpType: kind, icmpCode: code, body: quoted,
	}
}

// from and to are the packet with another source and destination. The port is
// the identifier of ICMP queries, and nothing to protocols without ports.
func (p packet) from(a netip.Addr, port uint16) packet {
	p.src = a
	if p.isICMP() {
		p.icmpID = port
	} else {
		p.sport = port
	}
	return p
}

func (p packet) to(a netip.Addr, port uint16) packet {
	p.dst = a
	if p.isICMP() {
		p.icmpID = port
	} else {
		p.dport = port
	}
	return p
}

func (p packet) withFlags(flags string) packet { p.tcpFlags = flags; return p }
func (p packet) withBody(body []byte) packet   { p.body = body; return p }
func (p packet) withFrag(f fragment) packet    { p.fragment = f; return p }

func (p packet) isICMP() bool {
	return p.proto == layers.IPProtocolICMPv4 && p.src.Is4() || p.proto == layers.IPProtocolICMPv6 && p.src.Is6()
}

// reply is the packet that the destination would answer with.
func (p packet) reply() packet {
	p.src, p.dst = p.dst, p.src
	p.sport, p.dport = p.dport, p.sport
	switch {
	case p.proto == layers.IPProtocolICMPv4 && p.icmpType == v4.echo:
		p.icmpType = v4.echoReply
	case p.isICMP():
		p.icmpType++
	case p.tcpFlags == "S":
		p.tcpFlags = "SA"
	}
	return p
}

func (p packet) String() string {
	return fmt.Sprintf("%v %v:%d > %v:%d %s%d id %d", p.proto, p.src, p.sport, p.dst, p.dport, p.tcpFlags, p.icmpType, p.icmpID)
}

func (p packet) headerLength() int {
	if p.src.Is4() {
		return 20 + len(p.options)
	}
	length := 40
	for _, e := range slices.Concat(p.extensions, p.behind) {
		length += 1 + len(e.body)
	}
	if p.fragment != (fragment{}) {
		length += 8
	}
	return length
}

// frame is the packet as it is on the wire, all lengths and checksums right.
func (p packet) frame() []byte {
	transport := p.transport()
	if p.wrong {
		spoil(transport[p.checksumAt():])
	}
	transport, next := chain(transport, p.proto, p.behind)
	whole := len(transport)
	more := false
	if p.fragment != (fragment{}) {
		end := whole
		if p.fragment.length > 0 {
			end = min(whole, p.fragment.offset+p.fragment.length)
			more = end < whole
		}
		transport = transport[p.fragment.offset:end]
	}
	var ip []byte
	if p.src.Is4() {
		ip = serialize(p.header4(more), gopacket.Payload(transport))
	} else {
		ip = p.header6(transport, next, more)
	}
	if p.unmeasured {
		p.hideLength(ip)
	}
	if p.wrongHeader {
		spoil(ip[10:])
	}
	if p.noHeader {
		return ip
	}
	return append(p.ethernet(), ip...)
}

// hideLength has the header say that the packet is 0 octets long. Where there is a
// checksum, it makes up for that (RFC 1624).
func (p packet) hideLength(ip []byte) {
	at := 4
	if p.src.Is4() {
		at = 2
		sum := uint32(^binary.BigEndian.Uint16(ip[10:])) + uint32(^binary.BigEndian.Uint16(ip[at:]))
		binary.BigEndian.PutUint16(ip[10:], ^uint16(sum>>16+sum&0xffff))
	}
	clear(ip[at : at+2])
}

func (p packet) ethernet() []byte {
	mac, kind := p.mac, layers.EthernetTypeIPv6
	if mac == ([6]uint8{}) {
		mac = uplinkMAC
	}
	if p.src.Is4() {
		kind = layers.EthernetTypeIPv4
	}
	header := append(routerMAC[:len(routerMAC):len(routerMAC)], mac[:]...)
	if p.tag != 0 {
		header = binary.BigEndian.AppendUint16(header, p.tag)
		header = binary.BigEndian.AppendUint16(header, 100)
	}
	return binary.BigEndian.AppendUint16(header, uint16(kind))
}

func (p packet) header4(more bool) *layers.IPv4 {
	ip := &layers.IPv4{
		Version: 4, IHL: uint8(5 + len(p.options)/4), TOS: trafficClass, TTL: 63, Protocol: p.proto,
		SrcIP: p.src.AsSlice(), DstIP: p.dst.AsSlice(),
		Id: uint16(p.fragment.id), FragOffset: uint16(p.fragment.offset / 8),
	}
	if more {
		ip.Flags = layers.IPv4MoreFragments
	}
	ip.Options = append(ip.Options, splitOptions(p.options)...)
	return ip
}

// splitOptions makes layers of raw options, which all of ours are.
func splitOptions(raw []byte) []layers.IPv4Option {
	var options []layers.IPv4Option
	for len(raw) > 0 {
		if raw[0] <= 1 {
			options = append(options, layers.IPv4Option{OptionType: raw[0], OptionLength: 1})
			raw = raw[1:]
			continue
		}
		length := int(raw[1])
		options = append(options, layers.IPv4Option{OptionType: raw[0], OptionLength: raw[1], OptionData: raw[2:length]})
		raw = raw[length:]
	}
	return options
}

// chain puts IPv6 extension headers before a payload.
func chain(payload []byte, next layers.IPProtocol, headers []extension) ([]byte, layers.IPProtocol) {
	for _, e := range slices.Backward(headers) {
		payload = slices.Concat([]byte{uint8(next)}, e.body, payload)
		next = e.proto
	}
	return payload, next
}

func (p packet) header6(payload []byte, next layers.IPProtocol, more bool) []byte {
	extensions := slices.Clone(p.extensions)
	if p.fragment != (fragment{}) {
		body := make([]byte, 7)
		offset := uint16(p.fragment.offset)
		if more {
			offset |= 1
		}
		binary.BigEndian.PutUint16(body[1:], offset)
		binary.BigEndian.PutUint32(body[3:], p.fragment.id)
		extensions = append(extensions, extension{layers.IPProtocolIPv6Fragment, body})
	}
	payload, next = chain(payload, next, extensions)
	ip := &layers.IPv6{
		Version: 6, TrafficClass: trafficClass, FlowLabel: 0x12345, HopLimit: 63, NextHeader: next,
		SrcIP: p.src.AsSlice(), DstIP: p.dst.AsSlice(),
	}
	return serialize(ip, gopacket.Payload(payload))
}
