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
	opaque bool     // it holds rules that iptables cannot show
	rules  []rule   // in order
	counts []uint64 // packets, one for each rule; 0 where they were not asked for
}

// packets adds up what the rules with one target counted.
func (l listed) packets(target string) uint64 {
	var sum uint64
	for i, n := range l.counts {
		if n > 0 && l.rules[i].target() == target {
			sum += n
		}
	}
	return sum
}

// parseTable reads what `-S` prints for a chain or for a whole table, with or
// without `-v`.
func parseTable(out string) map[string]listed {
	chains := make(map[string]listed)
	for line := range strings.Lines(out) {
		line, packets := cutCounters(strings.TrimSuffix(line, "\n"))
		command, rest, _ := strings.Cut(line, " ")
		name, rest, _ := strings.Cut(rest, " ")
		switch command {
		case "-P", "-N":
			chains[name] = listed{found: true}
		case "-A":
			c := chains[name]
			c.found = true
			c.rules = append(c.rules, rule(rest))
			c.counts = append(c.counts, packets)
			chains[name] = c
		}
	}
	return chains
}

// cutCounters takes a rule's counters out of a line. They stand in front of the
// target, or in front of the line as the save programs have them.
func cutCounters(line string) (rest string, packets uint64) {
	if saved, ok := strings.CutPrefix(line, "["); ok {
		counters, rest, _ := strings.Cut(saved, "] ")
		text, _, _ := strings.Cut(counters, ":")
		packets, _ = strconv.ParseUint(text, 10, 64) // 0: as if it were not there
		return rest, packets
	}
	at := strings.LastIndex(line, " -c ")
	if at < 0 {
		return line, 0
	}
	fields := strings.SplitN(line[at+len(" -c "):], " ", 3)
	packets, err := strconv.ParseUint(fields[0], 10, 64)
	if err != nil || len(fields) < 2 {
		return line, 0
	}
	rest = line[:at]
	if len(fields) == 3 {
		rest += " " + fields[2]
	}
	return rest, packets
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
