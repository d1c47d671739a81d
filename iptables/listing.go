// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// rule is one rule without the command and chain in front of it: what can stand
// behind "-A CHAIN", "-D CHAIN" and "-I CHAIN N".
type rule string

// listed is a chain as `-S` shows it.
type listed struct {
	found  bool
	opaque bool   // it holds rules that iptables cannot show
	rules  []rule // in order
}

// parseTable reads what `-S` prints for a chain or for a whole table.
func parseTable(out string) map[string]listed {
	chains := make(map[string]listed)
	for line := range strings.Lines(out) {
		command, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		name, rest, _ := strings.Cut(rest, " ")
		switch command {
		case "-P", "-N":
			chains[name] = listed{found: true}
		case "-A":
			c := chains[name]
			c.found = true
			c.rules = append(c.rules, rule(rest))
			chains[name] = c
		}
	}
	return chains
}

// word is one word of a rule. A quoted one is never an option.
type word struct {
	text   string
	quoted bool
}

// words splits a rule as the restore programs do: blanks part words, quotes
// hold them together, a backslash takes the next character as it is.
func (r rule) words() []word {
	var (
		all               []word
		text              strings.Builder
		inWord, inQuotes  bool
		quoted, backslash bool
	)
	end := func() {
		if inWord {
			all = append(all, word{text.String(), quoted})
			text.Reset()
			inWord, quoted = false, false
		}
	}
	for i := range len(r) {
		switch c := r[i]; {
		case backslash:
			text.WriteByte(c)
			backslash = false
		case c == '\\':
			inWord, backslash = true, true
		case c == '"':
			inWord, inQuotes, quoted = true, !inQuotes, true
		case c == ' ' && !inQuotes:
			end()
		default:
			inWord = true
			text.WriteByte(c)
		}
	}
	end()
	return all
}

// option is one option of a rule with its values.
type option struct {
	name    string
	negated bool
	values  []string
}

func (r rule) options() []option {
	var (
		all     []option
		negated bool
	)
	for _, w := range r.words() {
		switch {
		case !w.quoted && w.text == "!":
			negated = true
		case !w.quoted && strings.HasPrefix(w.text, "-"):
			all = append(all, option{name: w.text, negated: negated})
			negated = false
		case len(all) > 0:
			last := &all[len(all)-1]
			last.values = append(last.values, w.text)
		}
	}
	return all
}

// value is what follows the option called name, or "" without one. A negated
// option does not count.
func (r rule) value(name string) string {
	for _, o := range r.options() {
		if o.name == name && !o.negated && len(o.values) > 0 {
			return o.values[0]
		}
	}
	return ""
}

func (r rule) target() string { return r.value("-j") }

// comment is the rule's comment without the quotes that ip-masq-agent v2.10.0
// to v2.12.1 and the Azure agent wrote into it.
func (r rule) comment() string { return strings.Trim(r.value("--comment"), `"`) }

// canonical is the same text for all ways in which a rule of ours is written
// and listed: versions and backends differ in the order of options and in the
// digits of a probability, and a prefix of no bits is not listed at all.
func (r rule) canonical() string {
	parts := make([]string, 0, 8)
	for _, o := range r.options() {
		if o.name == "-m" { // the options that follow say the same
			continue
		}
		value := strings.Join(o.values, " ")
		switch o.name {
		case "-d":
			p, err := netip.ParsePrefix(value)
			if err == nil && p.Bits() == 0 && !o.negated {
				continue
			}
			if err == nil {
				value = p.String()
			}
		case "--probability":
			value = probability(value)
		}
		if o.negated {
			value += " !"
		}
		parts = append(parts, o.name+" "+value)
	}
	slices.Sort(parts)
	return strings.Join(parts, "\n")
}

// probability is the 31-bit number that xt_statistic keeps.
func probability(text string) string {
	p, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return text
	}
	return strconv.FormatInt(int64(math.Round(p*(1<<31))), 10)
}
