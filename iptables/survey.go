// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

const (
	// surveyInterval is the least time between two looks at a whole nat table:
	// listing one costs a quarter of a second where kube-proxy has 16,000 rules.
	surveyInterval = 30 * time.Second

	// kubePostrouting is kube-proxy's. It masquerades marked packets and, in
	// IPVS mode, pods that reach themselves through a service: never others.
	kubePostrouting = "KUBE-POSTROUTING"

	// jumpDepth is how deep chains are followed in search of a target. The
	// kernel's own limit is of the same kind: it forbids loops.
	jumpDepth = 8
)

// survey remembers when and at which state of POSTROUTING a table was looked at.
type survey struct {
	at    time.Time
	outer []rule // without our jump
	due   bool
}

// warning is something that others do and that keeps the list from working. The
// kind decides whether it was said before: chains of single pods come and go.
type warning struct{ kind, text string }

// surveyOn notes whether POSTROUTING changed since the last survey.
func (d *Datapath) surveyOn(t tool, c chain, now state) {
	if c.table != tableNAT {
		return
	}
	s := d.surveyed[t.family]
	foreign := slices.DeleteFunc(slices.Clone(now.outer.rules), c.owns)
	if s.at.IsZero() || !slices.Equal(s.outer, foreign) {
		s.due = true
	}
	s.outer = foreign
	d.surveyed[t.family] = s
}

// lookAround names once in the log, and in the status, what stands in the way.
func (d *Datapath) lookAround(ctx context.Context, t tool) {
	s := d.surveyed[t.family]
	if !s.due || time.Since(s.at) < surveyInterval {
		return
	}
	found := t.warnings(ctx, d.options.Chain)
	s.at, s.due = time.Now(), false
	d.surveyed[t.family] = s
	d.mutex.Lock()
	before := d.warnings[t.family]
	d.warnings[t.family] = found
	d.mutex.Unlock()
	for _, w := range found {
		if !slices.ContainsFunc(before, func(b warning) bool { return b.kind == w.kind }) {
			d.log.Warn(w.text, "family", t.family.String())
		}
	}
}

// warnings looks at the whole nat table.
func (t tool) warnings(ctx context.Context, name string) []warning {
	table, err := t.listTable(ctx, tableNAT)
	if said(err, "is incompatible") {
		return []warning{{"opaque", "the nat table holds rules that iptables cannot show: whether one of them masquerades before " +
			name + " is unknown"}}
	}
	if err != nil {
		return nil // the sync before or after says the same
	}
	return findObstacles(table, name)
}

// findObstacles finds sibling agents and what translates before the chain is
// asked.
func findObstacles(table map[string]listed, name string) []warning {
	var found []warning
	keep := kept(table[name].rules)
	before := true
	var earlier []string
	for _, r := range table[postrouting].rules {
		target := r.target()
		switch {
		case target == name:
			before = false
		case isSibling(table, r):
			found = append(found, siblingWarning(target, name, before))
		case before && translates(table, r, keep, jumpDepth):
			earlier = append(earlier, target)
		}
	}
	if len(earlier) > 0 {
		found = append(found, earlierWarning(earlier, name))
	}
	return found
}

// isSibling reports whether r leads to the chain of another agent of this kind,
// or of the script that some clouds run when a node boots.
func isSibling(table map[string]listed, r rule) bool {
	c, ok := table[r.target()]
	return ok && slices.ContainsFunc(append([]rule{r}, c.rules...), func(r rule) bool {
		return isOwnRule(r) || strings.HasPrefix(r.comment(), "ip-masq: ")
	})
}

func siblingWarning(sibling, name string, before bool) warning {
	text := fmt.Sprintf("chain %s of another agent masquerades what %s exempts", sibling, name)
	if before {
		text = fmt.Sprintf("chain %s of another agent decides before %s is asked", sibling, name)
	}
	return warning{"sibling " + sibling, text + ": remove it, or run this agent with --masq-chain=" + sibling}
}

func earlierWarning(targets []string, name string) warning {
	text := "POSTROUTING translates by " + targets[0]
	if n := len(targets) - 1; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return warning{"earlier", text + " before " + name + " is asked: the list of CIDRs does not apply to what they match"}
}

// translates reports whether a rule gives an exempt destination another source,
// itself or through its chain.
func translates(table map[string]listed, r rule, keep []netip.Prefix, depth int) bool {
	if depth == 0 || !matchesExempt(r, keep) {
		return false
	}
	switch target := r.target(); target {
	case "MASQUERADE", "SNAT", "NETMAP":
		return true
	case kubePostrouting:
		return false
	default:
		for _, inner := range table[target].rules {
			if inner.target() == "RETURN" && isUnmarkedOnly(inner) {
				return false // what comes now is for marked packets
			}
			if translates(table, inner, keep, depth-1) {
				return true
			}
		}
	}
	return false
}

// matchesExempt reports whether a rule is of those that can meet any pod's
// packet to an exempt destination. Rules for marked packets are not, nor those
// for a pod that reaches itself.
func matchesExempt(r rule, keep []netip.Prefix) bool {
	if r.value("--mark") != "" || r.value("-o") == "lo" {
		return false
	}
	dst := r.value("-d")
	if dst == "" {
		return true
	}
	p, err := netip.ParsePrefix(dst)
	return err != nil || r.value("-s") != dst && slices.ContainsFunc(keep, p.Overlaps)
}

// isUnmarkedOnly is the first rule of chains that are for marked packets.
func isUnmarkedOnly(r rule) bool {
	return slices.ContainsFunc(r.options(), func(o option) bool { return o.name == "--mark" && o.negated })
}

// kept are the destinations that our chain exempts.
func kept(rules []rule) []netip.Prefix {
	var all []netip.Prefix
	for _, r := range rules {
		if !strings.HasSuffix(string(r), "-j RETURN") {
			continue
		}
		if p, err := netip.ParsePrefix(r.value("-d")); err == nil {
			all = append(all, p)
		} else { // a prefix of no bits is not listed
			all = append(all, netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0))
		}
	}
	return all
}
