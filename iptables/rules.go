// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"net/netip"
	"strconv"

	"ip-masq-agent/internal/portrange"
	"ip-masq-agent/internal/prefix"
)

const (
	tableNAT    = "nat"
	tableMangle = "mangle"
	postrouting = "POSTROUTING"

	// ownComment begins every comment that an ip-masq-agent wrote, from the
	// first version on.
	ownComment = "ip-masq-agent: "

	keepComment       = ownComment + "local traffic is not subject to MASQUERADE"
	masqueradeComment = ownComment + "outbound traffic is subject to MASQUERADE (must be last in chain)"
)

// chain is what one chain should hold and the jump that leads to it. Rules are
// in the form that the restore programs read and the save programs print,
// without "-A CHAIN".
type chain struct {
	table, name string
	jump        string // in POSTROUTING
	rules       []string
	counted     string // the target whose packets the metrics show
}

// natChain builds the chain of the classic agent, in its words and order:
// entries, then what masquerades the rest.
func natChain(name string, entries []prefix.Entry, ports []portrange.Range, randomFully bool) chain {
	c := chain{table: tableNAT, name: name, jump: natJump(name, natJumpComment(name)), counted: "MASQUERADE"}
	keep := comment(keepComment) + " -j RETURN"
	for _, e := range entries {
		if e.Verdict == prefix.Keep {
			c.rules = append(c.rules, destination(e.Prefix)+keep)
			continue
		}
		// An exception gets all that the end of the chain has: with the final
		// rule alone its flows would ignore the port ranges.
		c.rules = append(c.rules, masqueradeRules(destination(e.Prefix), ports, randomFully)...)
	}
	c.rules = append(c.rules, masqueradeRules("", ports, randomFully)...)
	return c
}

// emptyChains are all chains that this package makes, for those who ask for
// them or remove them.
func emptyChains(name string) []chain {
	return []chain{natChain(name, nil, nil, false), invalidChain(nil, nil)}
}

func natJumpComment(name string) string {
	return ownComment + "ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom " + name + " chain"
}

func natJump(name, text string) string {
	return comment(text) + " -m addrtype ! --dst-type LOCAL -j " + name
}

// masqueradeRules are one rule for each port range and protocol that has ports,
// then one for everything, restricted to a destination or not.
func masqueradeRules(destination string, ports []portrange.Range, randomFully bool) []string {
	suffix := ""
	if randomFully {
		suffix = " --random-fully"
	}
	var rules []string
	if len(ports) > 0 {
		for _, protocol := range []string{"tcp", "udp", "sctp"} {
			before := destination + "-p " + protocol + " " + comment(masqueradeComment)
			rules = append(rules, portRules(before, ports, suffix)...)
		}
	}
	return append(rules, destination+comment(masqueradeComment)+" -j MASQUERADE"+suffix)
}

// portRules spread flows over the ranges as their sizes are: each rule takes
// its share of what the rules before it left, the last one the rest.
func portRules(before string, ports []portrange.Range, suffix string) []string {
	left := 0
	for _, r := range ports {
		left += r.Size()
	}
	rules := make([]string, 0, len(ports))
	for _, r := range ports {
		match := ""
		if r.Size() != left {
			share := float64(r.Size()) / float64(left)
			match = " -m statistic --mode random --probability " + strconv.FormatFloat(share, 'f', -1, 64)
		}
		rules = append(rules, before+match+" -j MASQUERADE --to-ports "+r.String()+suffix)
		left -= r.Size()
	}
	return rules
}

// comment quotes text, which holds no backslash.
func comment(text string) string {
	return fmt.Sprintf("-m comment --comment %q", text)
}

func destination(p netip.Prefix) string { return "-d " + p.String() + " " }
