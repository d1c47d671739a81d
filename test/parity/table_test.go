// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"net/netip"

	"ip-masq-agent/internal/lab"
)

// row is one expectation, for every protocol and family that it names.
type row struct {
	name   string
	protos []string // none: all
	only4  bool
	only6  bool
	only   func(variant) bool // nil: every variant

	// deviation is the reason, as documented, for which the row holds in some
	// variants only.
	deviation string

	// flows are opened one after the other and then used at the same time.
	// What is seen of those to one remote must differ.
	flows []flow

	// scenario, in place of flows, is what flows cannot tell.
	scenario func(b *bench, is6 bool)
}

// flow is a connection, or an exchange without one, that must work: whoever
// serves answers, and the answer arrives.
type flow struct {
	from   host
	source place // nil: what the host chooses
	port   uint16
	to     place
	at     host // who serves to; outside if not said

	seen  place // the source that the server must see; nil: the host's own
	ports portRule

	size     int    // bytes in one message; 0: few
	service  uint16 // port of the server; 0: the usual one
	offWires bool   // passes no uplink
}

// place is an address of a lab.
type place func(*lab.Lab) lab.Pair

// portRule is what the server must see of the source port or identifier.
type portRule int

const (
	free   portRule = iota // the client's own; any of its class with --random-fully
	taken                  // another flow has the client's own, so another of its class
	barred                 // another than the client's own, of its class
	class                  // any of its class
	same                   // the client's own
)

func node(l *lab.Lab) lab.Pair       { return l.Addresses.Node }
func secondary(l *lab.Lab) lab.Pair  { return l.Secondary }
func subnet2(l *lab.Lab) lab.Pair    { return l.Subnet2 }
func uplink2(l *lab.Lab) lab.Pair    { return l.Uplink2 }
func bridge(l *lab.Lab) lab.Pair     { return l.PodGate }
func remote(l *lab.Lab) lab.Pair     { return l.Remote }
func narrow(l *lab.Lab) lab.Pair     { return l.Remote2 }
func toggled(l *lab.Lab) lab.Pair    { return l.Remote3 }
func viaSubnet2(l *lab.Lab) lab.Pair { return l.ViaSubnet2 }
func viaUplink2(l *lab.Lab) lab.Pair { return l.ViaUplink2 }
func client(l *lab.Lab) lab.Pair     { return l.Client }
func inside(l *lab.Lab) lab.Pair     { return l.Inside }
func inside2(l *lab.Lab) lab.Pair    { return l.Inside2 }
func exception(l *lab.Lab) lab.Pair  { return l.Exception }
func linkLocal(l *lab.Lab) lab.Pair  { return l.LinkLocal }
func addrPodA(l *lab.Lab) lab.Pair   { return l.Pods[0].Pair }
func addrPodB(l *lab.Lab) lab.Pair   { return l.Pods[1].Pair }
func addrRouted(l *lab.Lab) lab.Pair { return l.RoutedPods[0].Pair }

// nodePort is where the node forwards to podA, on its address and on vip.
const nodePort = 30080

// boundPort is one that only the node serves.
const boundPort = 18472

func vip(l *lab.Lab) lab.Pair { return l.VIP }

// clusterIP is an address of a service, known to the node alone.
func clusterIP(*lab.Lab) lab.Pair {
	return lab.Pair{V4: netip.MustParseAddr("10.96.0.10"), V6: netip.MustParseAddr("fd00:96::10")}
}

func inEBPF(v variant) bool        { return v.subject == ebpf }
func inIPTables(v variant) bool    { return v.subject != ebpf }
func withConntrack(v variant) bool { return v.conntrack || v.subject != ebpf }

// table is every expectation but those about changes.
func table() []row {
	var rows []row
	for _, part := range [][]row{
		histories(), choice(), ports(), hostTraffic(), inbound(), local(), whole(), raw(), icmpErrors(), routers(), bulk(),
	} {
		rows = append(rows, part...)
	}
	return rows
}

// choice: who is masqueraded, and as what.
func choice() []row {
	return []row{
		{name: "pod to outside", flows: []flow{{from: podA, to: remote, seen: node}}},
		{name: "routed pod to outside", flows: []flow{{from: routedA, to: remote, seen: node}}},
		{name: "pod to exempt range", flows: []flow{{from: podA, to: inside}}},
		{name: "routed pod to another exempt range", flows: []flow{{from: routedA, to: inside2}}},
		{name: "pod to exception in an exempt range", flows: []flow{{from: podA, to: exception, seen: node}}},
		{name: "pod to link-local address", only4: true, flows: []flow{{from: podA, to: linkLocal}}},
		{name: "subnet of the next hop decides", flows: []flow{{from: podA, to: viaSubnet2, seen: subnet2}}},
		{name: "pod to a service with an endpoint outside", protos: []string{tcp, udp}, only: withConntrack, flows: []flow{
			{from: podA, to: clusterIP, seen: node},
		}},
		{name: "address of the second uplink", flows: []flow{{from: routedA, to: viaUplink2, seen: uplink2}}},
	}
}

// ports: who gets which port.
func ports() []row {
	return []row{
		{name: "three pods with one source port to one remote", flows: []flow{
			{from: podA, to: remote, seen: node},
			{from: podB, to: remote, seen: node, ports: taken},
			{from: routedA, to: remote, seen: node, ports: taken},
		}},
		{name: "one source port to two remotes", protos: []string{tcp, udp}, flows: []flow{
			{from: podA, to: remote, seen: node},
			{from: podA, to: narrow, seen: node},
		}},
		{name: "lowest port class is kept", protos: []string{tcp, udp}, flows: []flow{
			{from: podA, port: 100, to: remote, seen: node},
			{from: podB, port: 100, to: remote, seen: node, ports: taken},
		}},
		{name: "second port class is kept", protos: []string{tcp, udp}, flows: []flow{
			{from: podA, port: 600, to: remote, seen: node},
			{from: podB, port: 600, to: remote, seen: node, ports: taken},
		}},
		{name: "node's flow after a pod's with the same port", flows: []flow{
			{from: podA, to: remote, seen: node, ports: class},
			{from: hostNode, source: node, to: remote, seen: node, ports: class},
		}},
		{name: "pod's flow after a node's with the same port", flows: []flow{
			{from: hostNode, source: node, to: remote, seen: node, ports: class},
			{from: podA, to: remote, seen: node, ports: class},
		}},
		{
			name: "node port range is not given to pods", protos: []string{tcp, udp}, only: inEBPF,
			deviation: "the eBPF datapath keeps clear of --node-port-range",
			flows:     []flow{{from: podA, port: 30500, to: remote, seen: node, ports: barred}},
		},
		{
			name: "bound port of the node is not given to pods", protos: []string{udp, tcp}, only: inEBPF,
			deviation: "the eBPF datapath never takes a port on which the node listens",
			flows:     []flow{{from: podA, port: boundPort, to: remote, seen: node, ports: barred}},
		},
	}
}

// hostTraffic: what the node itself sends.
func hostTraffic() []row {
	return []row{
		{
			name: "node to outside keeps its port", only: inEBPF,
			deviation: "the eBPF datapath leaves alone what already has the masquerade address",
			flows:     []flow{{from: hostNode, to: remote, seen: node, ports: same}},
		},
		{name: "node to outside", only: inIPTables, flows: []flow{{from: hostNode, to: remote, seen: node}}},
		{name: "node to exempt range", flows: []flow{{from: hostNode, to: inside, seen: node, ports: same}}},
		{name: "secondary address to outside", flows: []flow{{from: hostNode, source: secondary, to: remote, seen: node}}},
		{name: "secondary address to exempt range", flows: []flow{
			{from: hostNode, source: secondary, to: inside, seen: secondary, ports: same},
		}},
	}
}

// inbound: connections from outside, whose replies are never translated.
func inbound() []row {
	return []row{
		{name: "outside to pod", flows: []flow{{from: outside, source: client, to: addrPodA, at: podA, seen: client, ports: same}}},
		{name: "outside to routed pod", flows: []flow{{from: outside, source: client, to: addrRouted, at: routedA, seen: client, ports: same}}},
		{name: "outside to node", flows: []flow{{from: outside, source: client, to: node, at: hostNode, seen: client, ports: same}}},
		{name: "outside to secondary address", flows: []flow{
			{from: outside, source: client, to: secondary, at: hostNode, seen: client, ports: same},
		}},
		{name: "outside to node port of a pod", protos: []string{tcp, udp}, only: withConntrack, flows: []flow{
			{from: outside, source: client, to: node, service: nodePort, at: podA, seen: client, ports: same},
		}},
		{name: "outside to external address of a service", protos: []string{tcp, udp}, only: withConntrack, flows: []flow{
			{from: outside, source: client, to: vip, service: nodePort, at: podA, seen: client, ports: same},
		}},
		{name: "exempt range to pod", flows: []flow{{from: outside, source: inside, to: addrPodA, at: podA, seen: inside, ports: same}}},
	}
}

// local: what does not leave the node.
func local() []row {
	return []row{
		{name: "pod to node", flows: []flow{{from: podA, to: node, at: hostNode, offWires: true}}},
		{name: "routed pod to secondary address", flows: []flow{{from: routedA, to: secondary, at: hostNode, offWires: true}}},
		{name: "pod to bridge", flows: []flow{{from: podA, to: bridge, at: hostNode, offWires: true}}},
		{name: "pod to pod on the bridge", flows: []flow{{from: podA, to: addrPodB, at: podB, offWires: true}}},
		{name: "pod to routed pod", flows: []flow{{from: podA, to: addrRouted, at: routedA, offWires: true}}},
	}
}

// whole: packets in parts, and parts of a stream.
func whole() []row {
	return []row{
		{name: "fragments to outside", protos: []string{udp, icmp}, flows: []flow{{from: podA, to: remote, seen: node, size: 4000}}},
		{name: "fragments to exempt range", protos: []string{udp, icmp}, flows: []flow{{from: routedA, to: inside, size: 4000}}},
		{name: "fragments from outside", protos: []string{udp, icmp}, flows: []flow{
			{from: outside, source: client, to: addrPodA, at: podA, seen: client, ports: same, size: 4000},
		}},
		{name: "path with a smaller MTU", protos: []string{tcp}, flows: []flow{{from: podA, to: narrow, seen: node, size: 60000}}},
	}
}

// bulk comes last: it leaves long captures behind. It is dear, so it is left to
// the variants in which ports change too.
func bulk() []row {
	return []row{{
		name: "much data both ways", scenario: transfer,
		only: func(v variant) bool { return v.randomFully },
	}}
}
