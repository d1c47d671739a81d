// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestWords(t *testing.T) {
	for text, want := range map[string][]string{
		`-s 10.0.0.0/8 -j RETURN`: {"-s", "10.0.0.0/8", "-j", "RETURN"},
		`--comment "a b" -j X`:    {"--comment", "a b", "-j", "X"},
		`--comment "\"a b\"" x`:   {"--comment", `"a b"`, "x"},
		`--comment "it\'s \\"`:    {"--comment", `it's \`},
		`--comment ""`:            {"--comment", ""},
		`a  b `:                   {"a", "b"},
		``:                        nil,
	} {
		var got []string
		for _, w := range rule(text).words() {
			got = append(got, w.text)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", text, diff)
		}
	}
}

func TestQuotedWordIsNoOption(t *testing.T) {
	r := rule(`-m comment --comment "-j DROP" ! -d 10.0.0.0/8 -j "-X"`)
	if got := r.target(); got != "-X" {
		t.Errorf("target %q", got)
	}
	if got := r.value("-d"); got != "" {
		t.Errorf("a negated option has value %q", got)
	}
}

// TestCanonical: the left text is what we write, the right one what may be
// listed for it.
func TestCanonical(t *testing.T) {
	tests := []struct {
		name, written, listed string
		same                  bool
	}{
		{"order", `-m comment --comment "a b" -d 10.0.0.0/8 -j RETURN`, `-d 10.0.0.0/8 -m comment --comment "a b" -j RETURN`, true},
		{"simple comment", `-m comment --comment "a"`, `-m comment --comment a`, true},
		{"everything", `-d 0.0.0.0/0 -j RETURN`, `-j RETURN`, true},
		{"everything in IPv6", `-d ::/0 -j RETURN`, `-j RETURN`, true},
		{"IPv6 text", `-d 2001:db8:0:0::/48 -j X`, `-d 2001:db8::/48 -j X`, true},
		{"digits", `-m statistic --mode random --probability 0.5807279140612474`, `-m statistic --mode random --probability 0.58072791388`, true},
		{"other share", `-m statistic --mode random --probability 0.5807279`, `-m statistic --mode random --probability 0.5807280`, false},
		{"protocol match", `-p tcp --to-ports 1`, `-p tcp -m tcp --to-ports 1`, true},
		{"negated", `-m addrtype ! --dst-type LOCAL -j X`, `-m addrtype --dst-type LOCAL -j X`, false},
		{"negated everything", `-j RETURN`, `! -d 0.0.0.0/0 -j RETURN`, false},
		{"other prefix", `-d 10.0.0.0/8 -j RETURN`, `-d 10.0.0.0/9 -j RETURN`, false},
		{"more", `-d 10.0.0.0/8 -j RETURN`, `-s 1.1.1.1/32 -d 10.0.0.0/8 -j RETURN`, false},
		{"less", `-j MASQUERADE --random-fully`, `-j MASQUERADE`, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, b := rule(tt.written).canonical(), rule(tt.listed).canonical()
			if (a == b) != tt.same {
				t.Errorf("%q and %q, want same %t", a, b, tt.same)
			}
		})
	}
}

func TestParseTable(t *testing.T) {
	got := parseTable("# Warning: iptables-legacy tables present, use iptables-legacy to see them\n" +
		"-P POSTROUTING ACCEPT\n-N X\n-N Y\n-A POSTROUTING -j X\n-A X -d 10.0.0.0/8 -j RETURN\n-A X -j MASQUERADE\n")
	want := map[string]listed{
		"POSTROUTING": {found: true, rules: []rule{"-j X"}, counts: []uint64{0}},
		"X":           {found: true, rules: []rule{"-d 10.0.0.0/8 -j RETURN", "-j MASQUERADE"}, counts: []uint64{0, 0}},
		"Y":           {found: true},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(listed{})); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestCounters(t *testing.T) {
	for line, want := range map[string]struct {
		rest    string
		packets uint64
	}{
		`-A X -d 10.0.0.0/8 -j RETURN`:                          {`-A X -d 10.0.0.0/8 -j RETURN`, 0},
		`-A X -m comment --comment a -c 7 420 -j DROP --more 1`: {`-A X -m comment --comment a -j DROP --more 1`, 7},
		`-A X -c 7 420`:                              {`-A X`, 7},
		`[7:420] -A X -j DROP`:                       {`-A X -j DROP`, 7},
		`-P POSTROUTING ACCEPT -c 1 2`:               {`-P POSTROUTING ACCEPT`, 1},
		`-A X -m comment --comment "a -c b" -j DROP`: {`-A X -m comment --comment "a -c b" -j DROP`, 0},
	} {
		rest, packets := cutCounters(line)
		if rest != want.rest || packets != want.packets {
			t.Errorf("%s: %q and %d", line, rest, packets)
		}
	}
}

func TestTallyOnlyGrows(t *testing.T) {
	var c tally
	steps := []struct {
		do   func()
		want uint64
	}{
		{func() { c.see(5) }, 5},
		{func() { c.see(7) }, 7},
		{c.zeroed, 7},
		{func() { c.see(0) }, 7},
		{func() { c.see(2) }, 9},
		{func() { c.see(1) }, 10}, // somebody else zeroed it
	}
	for i, s := range steps {
		s.do()
		if got := c.total(); got != s.want {
			t.Errorf("step %d: %d, want %d", i, got, s.want)
		}
	}
}
