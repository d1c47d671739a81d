// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"strings"

	"ip-masq-agent/internal/portrange"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

// Plan is what Sync would program, for people to read and compare. It only
// looks. One line is one fact, its first word says of what:
//
//	cidr 10.0.0.0/8 keep            destinations there, unless a longer prefix says otherwise
//	cidr 10.99.0.0/16 masquerade    likewise
//	cidr other masquerade           all other destinations
//	uplink eth0 next-hop 198.51.100.0/24 source 198.51.100.10
//	uplink eth0 next-hop 0.0.0.0/0 source 203.0.113.10
//	uplink eth0 destination ::/0 source 2001:db8::10
//	uplink eth1 ipv4 drop           there is no address to masquerade with
//	uplink eth2 down
//	uplink ib0 link-type 32 refused  its frames cannot be read, nothing is masqueraded there
//	uplink none                     nothing translates
//	ports 1-29999,32768-65535 random
//	table 262144 flows              of each family
//	invalid drop
//
// Prefixes are in the order of the families, then longest first; uplinks in the
// order of their interface index, and of their rules the first that matches counts.
// IPv6 is there only if it is on. A flow keeps its port where it is free unless
// ports are random.
func Plan(opts Options, policy *prefix.Policy, network *route.Snapshot) (string, error) {
	reserved, err := reservedPorts()
	if err != nil {
		return "", err
	}
	return plan(opts, policy, network, reserved), nil
}

func plan(opts Options, policy *prefix.Policy, network *route.Snapshot, reserved []portrange.Range) string {
	var b strings.Builder
	families := []*family{{}}
	if opts.IPv6 {
		families = append(families, &family{is6: true})
	}
	for _, f := range families {
		for _, e := range policy.Entries(f.is6) {
			fmt.Fprintf(&b, "cidr %s %s\n", e.Prefix, e.Verdict)
		}
	}
	fmt.Fprintf(&b, "cidr other %s\n", prefix.Masquerade)
	for _, u := range network.Uplinks {
		planUplink(&b, u, families)
	}
	if len(network.Uplinks) == 0 {
		fmt.Fprintln(&b, "uplink none")
	}
	planSettings(&b, opts, reserved)
	return b.String()
}

func planUplink(b *strings.Builder, u route.Uplink, families []*family) {
	if u.HeaderLen == route.UnknownHeader {
		fmt.Fprintf(b, "uplink %s link-type %d refused\n", u.Name, u.Type)
		return
	}
	if !u.Up {
		fmt.Fprintf(b, "uplink %s down\n", u.Name)
		return
	}
	for _, f := range families {
		by := "next-hop"
		if f.is6 {
			by = "destination"
		}
		rules := f.addressRules(u)
		for _, r := range rules {
			fmt.Fprintf(b, "uplink %s %s %s source %s\n", u.Name, by, r.Prefix, r.Address)
		}
		if len(rules) == 0 {
			fmt.Fprintf(b, "uplink %s %s drop\n", u.Name, strings.ToLower(f.String()))
		}
	}
}

func planSettings(b *strings.Builder, opts Options, reserved []portrange.Range) {
	choice, invalid := "kept", "pass"
	if opts.RandomFully {
		choice = "random"
	}
	if opts.DropInvalid {
		invalid = "drop"
	}
	fmt.Fprintf(b, "ports %s %s\n", allowedPorts(opts, reserved), choice)
	fmt.Fprintf(b, "table %d flows\n", opts.NATTableSize)
	fmt.Fprintf(b, "invalid %s\n", invalid)
}

// allowedPorts are the ports that flows may get, as --to-ports spells ranges.
func allowedPorts(opts Options, reserved []portrange.Range) string {
	pool := newPortPool(opts.ToPorts, opts.NodePorts, reserved)
	var ranges []portrange.Range
	for port := range 1 << 16 {
		if pool.Allowed[port>>6]&(1<<(port&63)) == 0 {
			continue
		}
		if n := len(ranges); n > 0 && int(ranges[n-1].Last) == port-1 {
			ranges[n-1].Last = uint16(port)
			continue
		}
		ranges = append(ranges, portrange.Range{First: uint16(port), Last: uint16(port)})
	}
	texts := make([]string, 0, len(ranges))
	for _, r := range ranges {
		texts = append(texts, r.String())
	}
	return strings.Join(texts, ",")
}
