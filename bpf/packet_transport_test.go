// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"strings"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// transport is the packet above IP, with the checksum that it has as a whole.
func (p packet) transport() []byte {
	body := gopacket.Payload(p.body)
	if p.unsummed {
		return p.body
	}
	if at, ok := summedAt[p.proto]; ok {
		return p.sum(at)
	}
	switch p.proto {
	case layers.IPProtocolTCP:
		has := func(flag string) bool { return strings.Contains(p.tcpFlags, flag) }
		header := &layers.TCP{
			SrcPort: layers.TCPPort(p.sport), DstPort: layers.TCPPort(p.dport), Seq: p.seq, Ack: p.ack, Window: 512,
			SYN: has("S"), ACK: has("A"), FIN: has("F"), RST: has("R"),
			PSH: has("P"), URG: has("U"), ECE: has("E"), CWR: has("C"),
		}
		must(header.SetNetworkLayerForChecksum(p.pseudo()))
		return serialize(header, body)
	case layers.IPProtocolUDP:
		header := &layers.UDP{SrcPort: layers.UDPPort(p.sport), DstPort: layers.UDPPort(p.dport)}
		must(header.SetNetworkLayerForChecksum(p.pseudo()))
		bytes := serialize(header, body)
		switch checksum := bytes[6:8]; {
		case p.noChecksum:
			checksum[0], checksum[1] = 0, 0
		case checksum[0]|checksum[1] == 0:
			checksum[0], checksum[1] = 0xff, 0xff
		}
		return bytes
	case layers.IPProtocolSCTP:
		return serialize(&layers.SCTP{
			SrcPort: layers.SCTPPort(p.sport), DstPort: layers.SCTPPort(p.dport), VerificationTag: p.seq,
		}, body)
	}
	if !p.isICMP() {
		return p.body
	}
	if p.proto == layers.IPProtocolICMPv4 {
		return serialize(&layers.ICMPv4{
			TypeCode: layers.CreateICMPv4TypeCode(p.icmpType, p.icmpCode), Id: p.icmpID, Seq: p.mtu,
		}, body)
	}
	header := &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(p.icmpType, p.icmpCode)}
	must(header.SetNetworkLayerForChecksum(p.pseudo()))
	rest := binary.BigEndian.AppendUint16(nil, p.icmpID)
	rest = binary.BigEndian.AppendUint16(rest, p.mtu)
	return serialize(header, gopacket.Payload(append(rest, p.body...)))
}

// pseudo is the header that transport checksums cover.
func (p packet) pseudo() gopacket.NetworkLayer {
	if p.src.Is4() {
		return &layers.IPv4{SrcIP: p.src.AsSlice(), DstIP: p.dst.AsSlice(), Protocol: p.proto}
	}
	return &layers.IPv6{SrcIP: p.src.AsSlice(), DstIP: p.dst.AsSlice(), NextHeader: p.proto}
}

func serialize(parts ...gopacket.SerializableLayer) []byte {
	buffer := gopacket.NewSerializeBuffer()
	must(gopacket.SerializeLayers(buffer, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, parts...))
	return buffer.Bytes()
}

// must is for what can only fail if a test is wrong.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// checksumAt is where TCP, UDP and ICMP have their checksum.
func (p packet) checksumAt() int {
	switch p.proto {
	case layers.IPProtocolTCP:
		return 16
	case layers.IPProtocolUDP:
		return 6
	}
	return 2
}

// spoil adds one to a checksum.
func spoil(checksum []byte) {
	sum := uint32(binary.BigEndian.Uint16(checksum)) + 1
	binary.BigEndian.PutUint16(checksum, uint16(sum+sum>>16))
}
