// SPDX-License-Identifier: Apache-2.0

// Package route knows the node's uplinks and the address that MASQUERADE would
// pick on each of them, and follows both through netlink.
package route

import (
	"net"
	"net/netip"
)

// Snapshot is the node's network at one moment. It is immutable.
type Snapshot struct {
	// Uplinks in the order of their interface index.
	Uplinks []Uplink

	// Addresses are all unicast addresses of the node, on every link, in
	// ascending order.
	Addresses []netip.Addr
}

// Uplink is a link that leads out of the node, as found or as named by
// --interfaces.
type Uplink struct {
	Index     int
	Name      string
	HeaderLen int              // bytes before the IP header: 14, or 0 on links without Ethernet header
	MAC       net.HardwareAddr // nil where HeaderLen is 0
	Up        bool

	// V4 maps next hops, V6 destinations, to the masquerade address: the
	// longest prefix that contains the address decides. Empty: no usable address.
	V4, V6 []AddressRule
}

// AddressRule says which masquerade address goes with a range of next hops
// (IPv4) or destinations (IPv6).
type AddressRule struct {
	Prefix  netip.Prefix
	Address netip.Addr
}
