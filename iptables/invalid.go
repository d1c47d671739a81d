// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

const (
	// InvalidChain is the chain in mangle that --invalid=drop makes.
	InvalidChain = "IP-MASQ-INVALID"

	invalidJumpComment = ownComment + "packets of no known flow are not translated"
	invalidKeepComment = ownComment + "destination keeps the source"
	invalidDropComment = ownComment + "would leave untranslated"
)

// invalidChain builds the chain that drops what conntrack calls INVALID: such
// packets pass the nat table by and would leave with a pod's address. Mangle
// comes before nat and is asked for every packet.
//
// The uplinks are in the rules and not in the jump, so that one jump does for
// all of them. A packet that leaves by another link falls out at the end.
func invalidChain(entries []prefix.Entry, network *route.Snapshot) chain {
	c := chain{
		table: tableMangle,
		name:  InvalidChain,
		jump: comment(invalidJumpComment) +
			" -m conntrack --ctstate INVALID -m addrtype ! --src-type LOCAL -j " + InvalidChain,
		counted: "DROP",
	}
	keep := comment(invalidKeepComment) + " -j RETURN"
	for _, e := range entries {
		if e.Verdict == prefix.Keep {
			c.rules = append(c.rules, destination(e.Prefix)+keep)
			continue
		}
		c.rules = append(c.rules, dropRules(destination(e.Prefix), network)...)
	}
	c.rules = append(c.rules, dropRules("", network)...)
	return c
}

// dropRules are one rule for each uplink. Without a network, or without
// uplinks, nothing is dropped.
func dropRules(destination string, network *route.Snapshot) []string {
	if network == nil {
		return nil
	}
	var rules []string
	for _, up := range network.Uplinks {
		rules = append(rules, destination+"-o "+up.Name+" "+comment(invalidDropComment)+" -j DROP")
	}
	return rules
}
