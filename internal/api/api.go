// SPDX-License-Identifier: Apache-2.0

// Package api holds what the commands print with -o json and what the control
// socket carries: the same types on both sides, and the vocabulary that the
// two datapaths and the agent share. It imports nothing of the project.
package api

import (
	"net/netip"
	"time"
)

// Status is the answer of `ip-masq-agent status`.
type Status struct {
	Version            string         `json:"version"`
	Datapath           string         `json:"datapath"`
	Backend            Backend        `json:"backend"`
	Interfaces         []Interface    `json:"interfaces"`
	Config             ConfigStatus   `json:"config"`
	NonMasqueradeCIDRs []netip.Prefix `json:"non_masquerade_cidrs"`
	MasqueradeCIDRs    []netip.Prefix `json:"masquerade_cidrs"`
	NAT                NAT            `json:"nat"`
	FastPath           FastPath       `json:"fast_path"`
	Drain              Drain          `json:"drain"`
	Warnings           []string       `json:"warnings"`
}

// DatapathStatus is the part of Status that a datapath knows.
type DatapathStatus struct {
	Backend    Backend
	Interfaces []Interface
	NAT        NAT
	FastPath   FastPath
	Drain      Drain
	Warnings   []string
}

// Backend says which kernel interface does the work, and why that one.
type Backend struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

// Interface is one uplink as the datapath serves it.
type Interface struct {
	Name   string     `json:"name"`
	Attach string     `json:"attach"`  // "tcx", "tc", or "" in iptables mode
	SNATv4 netip.Addr `json:"snat_v4"` // zero: no usable address
	SNATv6 netip.Addr `json:"snat_v6"`
}

// ConfigStatus is the state of the config file.
type ConfigStatus struct {
	Path  string `json:"path"`
	Valid bool   `json:"valid"`
	Error string `json:"error"`
}

// NAT is how full the translation tables are.
type NAT struct {
	V4 Table `json:"v4"`
	V6 Table `json:"v6"`
}

// Table is one family's translation table, counted in flows.
type Table struct {
	Entries  int `json:"entries"`
	Capacity int `json:"capacity"`
}

// FastPath tells of the way past the stack for packets of open flows.
type FastPath struct {
	Enabled    bool     `json:"enabled"`
	Interfaces []string `json:"interfaces"` // from which packets take it
	Packets    uint64   `json:"packets"`    // that took it, both ways
}

// Drain tells whether the datapath of before still serves flows after a switch.
type Drain struct {
	Active  bool `json:"active"`
	Entries int  `json:"entries"`
}

// Question is what `ip-masq-agent explain` asks. Src, Proto and the ports are
// optional.
type Question struct {
	Src   netip.Addr `json:"src"`
	Dst   netip.Addr `json:"dst"`
	Proto string     `json:"proto"`
	Sport uint16     `json:"sport"`
	Dport uint16     `json:"dport"`
}

// Answer is what `ip-masq-agent explain` gives.
type Answer struct {
	Verdict     string     `json:"verdict"` // "masquerade", "keep" or "local"
	Reason      string     `json:"reason"`
	CIDR        string     `json:"cidr"` // the prefix that decided, if one did
	SNATAddress netip.Addr `json:"snat_address"`
	Interface   string     `json:"interface"`
}

// Translation is one live flow of the eBPF datapath. For ICMP the identifier
// stands as SPort and NATPort.
type Translation struct {
	Family         int        `json:"family"`
	Proto          string     `json:"proto"`
	Src            netip.Addr `json:"src"`
	SPort          uint16     `json:"sport"`
	Dst            netip.Addr `json:"dst"`
	DPort          uint16     `json:"dport"`
	NATAddr        netip.Addr `json:"nat_addr"`
	NATPort        uint16     `json:"nat_port"`
	State          string     `json:"state"`
	IdleSeconds    int        `json:"idle_seconds"`
	ExpiresSeconds int        `json:"expires_seconds"`
}

// FlowCount is how many live flows a pod has, or how many go to a destination.
// The one that is not counted by is left out, as is the port of ICMP.
type FlowCount struct {
	Src   netip.Addr `json:"src,omitzero"`
	Proto string     `json:"proto,omitzero"`
	Dst   netip.Addr `json:"dst,omitzero"`
	DPort uint16     `json:"dport,omitzero"`
	Flows int        `json:"flows"`
}

// DropReasons are the values of the reason label of
// ip_masq_agent_datapath_drops_total, in the order in which they are shown.
func DropReasons() []string {
	return []string{"port_exhausted", "table_full", "fragment", "invalid", "unsupported", "no_address"}
}

// Stats are a datapath's counters since it was made. Drops has every reason of
// DropReasons.
type Stats struct {
	Drops          map[string]uint64
	NAT            NAT
	TranslationsV4 uint64 // flows translated
	TranslationsV6 uint64
	Repairs        uint64 // times that foreign changes were mended

	// Packets has every fate that packets met so far. Empty where the datapath
	// does not count them.
	Packets []PacketCount

	// Attempts counts new flows by the number of ports that were tried: index 0
	// is one port, the last index counts those that got none. Empty where the
	// datapath does not choose ports.
	Attempts []uint64

	// Busiest are the destinations with the most source ports in use, the
	// busiest first. Empty where the datapath has no ports of its own.
	Busiest []BusyDestination

	LastSweep time.Duration // that the last sweep of the tables took
	Swept     uint64        // flows that sweeps ended
	Early     uint64        // of these, flows ended before their time to make room
}

// PacketCount is how many packets met one fate.
type PacketCount struct {
	Direction string // "egress" or "ingress"
	Family    string // "ipv4" or "ipv6"
	Verdict   string // as bpf/masq.h names it, in lower case
	Packets   uint64
	Bytes     uint64
}

// BusyDestination is a destination and how many of the source ports there are
// towards it are in use.
type BusyDestination struct {
	Proto    string
	Address  netip.Addr
	Port     uint16     // 0 for ICMP
	NATAddr  netip.Addr // whose ports they are
	Flows    int
	Pressure float64 // share of the ports in use, from 0 to 1
}
