// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"slices"
	"strings"
)

// state is what the kernel holds of a chain and of POSTROUTING beside it.
type state struct {
	content listed
	outer   listed
}

// change is what has to be written, and why.
type change struct {
	lines  []string // of one transaction, without its table
	refill bool     // the chain's content is written anew
	reason string
}

func (c change) empty() bool { return len(c.lines) == 0 }

// text is the whole chain with its jump, for people.
func (c chain) text() []string {
	return append(c.fill(), "-A "+postrouting+" "+c.jump)
}

// fill replaces the content, or makes the chain.
func (c chain) fill() []string {
	lines := make([]string, 0, len(c.rules)+2)
	lines = append(lines, ":"+c.name+" - [0:0]")
	for _, r := range c.rules {
		lines = append(lines, "-A "+c.name+" "+r)
	}
	return lines
}

// owns reports whether a rule of POSTROUTING is a jump to the chain that an
// ip-masq-agent made, whatever its version. Jumps of others may stay.
func (c chain) owns(r rule) bool { return isOwnRule(r) && r.target() == c.name }

// difference is what makes the kernel's state what c wants; empty where it is.
func (c chain) difference(s state) change {
	all := c.contentDifference(s)
	lines, why := c.jumpChange(s.outer)
	all.lines = append(all.lines, lines...)
	if all.reason == "" {
		all.reason = why
	}
	return all
}

// contentDifference is difference without the jump.
func (c chain) contentDifference(s state) change {
	if why := c.contentFault(s.content); why != "" {
		return change{lines: c.fill(), refill: true, reason: why}
	}
	return change{}
}

// hooked reports whether a jump of ours leads to the chain.
func (c chain) hooked(s state) bool { return slices.ContainsFunc(s.outer.rules, c.owns) }

// unhook takes the jumps away and leaves the chain.
func (c chain) unhook(s state) (all change) {
	all.reason = "it is still in use"
	for _, r := range s.outer.rules {
		if c.owns(r) {
			all.lines = append(all.lines, "-D "+postrouting+" "+string(r))
		}
	}
	return all
}

func (c chain) contentFault(now listed) string {
	switch {
	case now.opaque:
		return "the chain is missing or cannot be read"
	case !now.found:
		return "the chain is missing"
	case len(now.rules) != len(c.rules):
		return fmt.Sprintf("the chain holds %d rules, not %d", len(now.rules), len(c.rules))
	}
	for i, r := range now.rules {
		// Nearly always the texts are equal; the other way is slow.
		if string(r) != c.rules[i] && r.canonical() != rule(c.rules[i]).canonical() {
			return fmt.Sprintf("rule %d of the chain differs", i+1)
		}
	}
	return ""
}

// jumpChange leaves exactly one jump. It stands where the first one stood, since
// what comes before and after it in POSTROUTING decides, too.
func (c chain) jumpChange(outer listed) (lines []string, reason string) {
	var own []rule
	position, opaque := 0, outer.opaque
	for i, r := range outer.rules {
		if !c.owns(r) {
			continue
		}
		if len(own) == 0 {
			position = i + 1
		}
		own = append(own, r)
	}
	if len(own) == 1 && own[0].canonical() == rule(c.jump).canonical() {
		return nil, ""
	}
	if len(own) == 0 {
		return []string{"-A " + postrouting + " " + c.jump}, "the jump is missing"
	}
	for _, r := range own {
		lines = append(lines, "-D "+postrouting+" "+string(r))
	}
	if opaque {
		lines = append(lines, "-A "+postrouting+" "+c.jump)
	} else {
		lines = append(lines, fmt.Sprintf("-I %s %d %s", postrouting, position, c.jump))
	}
	return lines, "the jump is there twice or as another version wrote it"
}

// jumpVariants are the jumps that the versions of ip-masq-agent made, the one
// of today first.
func (c chain) jumpVariants() []rule {
	variants := []rule{rule(c.jump)}
	if c.table == tableNAT {
		variants = append(variants, rule(natJump(c.name, `"`+natJumpComment(c.name)+`"`)))
	}
	return variants
}

// remove is what takes the chain and the jumps to it away. kept says that the
// chain has to stay, empty, for the jumps of others.
func (c chain) remove(s state) (all change, kept bool) {
	own := 0
	all.reason = "it is still there"
	for _, r := range s.outer.rules {
		switch {
		case c.owns(r):
			own++
			all.lines = append(all.lines, "-D "+postrouting+" "+string(r))
		case r.target() == c.name:
			kept = true
		}
	}
	// A jump proves that a chain which cannot be read is there.
	if s.content.found || s.content.opaque && own > 0 {
		all.lines = append(all.lines, "-F "+c.name)
		if !kept {
			all.lines = append(all.lines, "-X "+c.name)
		}
	}
	if kept && len(s.content.rules) == 0 && own == 0 {
		return change{}, true
	}
	return all, kept
}

// made reports whether an ip-masq-agent filled the chain: a name alone does not
// tell, and a wrong --masq-chain must not cost others their rules.
func (c chain) made(s state) bool {
	return len(s.content.rules) == 0 ||
		slices.ContainsFunc(s.content.rules, isOwnRule) ||
		slices.ContainsFunc(s.outer.rules, c.owns)
}

// isOwnRule reports whether an ip-masq-agent of any version wrote the rule.
func isOwnRule(r rule) bool {
	return strings.Contains(string(r), ownComment) && strings.HasPrefix(r.comment(), ownComment)
}
