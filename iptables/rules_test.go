// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"slices"
	"strings"
	"testing"

	"ip-masq-agent/internal/prefix"

	"github.com/google/go-cmp/cmp"
)

// TestMasqueradeRules is the table of the classic agent's TestWriteMasqRules,
// in the order of iptables-save.
func TestMasqueradeRules(t *testing.T) {
	const text = `-m comment --comment "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)"`
	tests := []struct {
		ports string
		want  []string // for one protocol
	}{
		{"", nil},
		{"1024-29999", []string{" -j MASQUERADE --to-ports 1024-29999"}},
		{"1024-29999,32768-65535", []string{
			" -m statistic --mode random --probability 0.469292562840114 -j MASQUERADE --to-ports 1024-29999",
			" -j MASQUERADE --to-ports 32768-65535",
		}},
		{"1024-29999,32768-49151,61000-65535", []string{
			" -m statistic --mode random --probability 0.5807279140612474 -j MASQUERADE --to-ports 1024-29999",
			" -m statistic --mode random --probability 0.7831739961759082 -j MASQUERADE --to-ports 32768-49151",
			" -j MASQUERADE --to-ports 61000-65535",
		}},
		{"1024,65535", []string{
			" -m statistic --mode random --probability 0.5 -j MASQUERADE --to-ports 1024",
			" -j MASQUERADE --to-ports 65535",
		}},
	}
	for _, tt := range tests {
		for _, random := range []bool{false, true} {
			suffix := ""
			if random {
				suffix = " --random-fully"
			}
			t.Run(tt.ports+suffix, func(t *testing.T) {
				var want []string
				for _, protocol := range []string{"tcp", "udp", "sctp"} {
					for _, w := range tt.want {
						want = append(want, "-p "+protocol+" "+text+w+suffix)
					}
				}
				want = append(want, text+" -j MASQUERADE"+suffix)
				got := masqueradeRules("", ports(t, tt.ports), random)
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("-want +got:\n%s", diff)
				}
			})
		}
	}
}

func TestKeepRules(t *testing.T) {
	for _, cidr := range []string{"10.0.0.0/8", "fc00::/7"} {
		entries := []prefix.Entry{{Prefix: prefixes(cidr)[0], Verdict: prefix.Keep}}
		want := `-d ` + cidr + ` -m comment --comment "ip-masq-agent: local traffic is not subject to MASQUERADE" -j RETURN`
		if got := natChain(testChain, entries, nil, true).rules[0]; got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

// TestEndOfChainIsAlsoThatOfExceptions: a flow to an exception is translated as
// any other, ports included.
func TestEndOfChainIsAlsoThatOfExceptions(t *testing.T) {
	ranges := ports(t, "1024-29999,32768-65535")
	entries := []prefix.Entry{{Prefix: prefixes("10.99.0.0/16")[0], Verdict: prefix.Masquerade}}
	rules := natChain(testChain, entries, ranges, true).rules
	end := masqueradeRules("", ranges, true)
	if len(rules) != 2*len(end) {
		t.Fatalf("got %d rules, want %d", len(rules), 2*len(end))
	}
	for i, r := range rules[:len(end)] {
		if got := strings.Replace(r, "-d 10.99.0.0/16 ", "", 1); got != end[i] {
			t.Errorf("got  %s\nwant %s", got, end[i])
		}
	}
	if !slices.Equal(rules[len(end):], end) {
		t.Errorf("the end of the chain is %q", rules[len(end):])
	}
}

func TestInvalidChainDropsOnUplinksOnly(t *testing.T) {
	entries := []prefix.Entry{
		{Prefix: prefixes("10.99.0.0/16")[0], Verdict: prefix.Masquerade},
		{Prefix: prefixes("10.0.0.0/8")[0], Verdict: prefix.Keep},
	}
	got := invalidChain(entries, uplinks("eth0", "wg0"))
	const keep = `-m comment --comment "ip-masq-agent: destination keeps the source" -j RETURN`
	const drop = `-m comment --comment "ip-masq-agent: would leave untranslated" -j DROP`
	want := []string{
		"-d 10.99.0.0/16 -o eth0 " + drop,
		"-d 10.99.0.0/16 -o wg0 " + drop,
		"-d 10.0.0.0/8 " + keep,
		"-o eth0 " + drop,
		"-o wg0 " + drop,
	}
	if diff := cmp.Diff(want, got.rules); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	for _, r := range invalidChain(entries, nil).rules {
		if rule(r).target() == "DROP" {
			t.Errorf("without a known uplink: %s", r)
		}
	}
}

func TestValidateChain(t *testing.T) {
	for name, valid := range map[string]bool{
		"IP-MASQ-AGENT":         true,
		"IP-MASQ":               true,
		"x":                     true,
		"a.b:c_d+e":             true,
		strings.Repeat("x", 28): true,
		strings.Repeat("x", 29): false,
		"":                      false,
		"a b":                   false,
		"a\tb":                  false,
		"a\nb":                  false,
		`a"b`:                   false,
		"a'b":                   false,
		`a\b`:                   false,
		"-A":                    false,
		"!x":                    false,
		"Ä":                     false,
		"POSTROUTING":           false,
		"PREROUTING":            false,
		"MASQUERADE":            false,
		"ACCEPT":                false,
		"LOG":                   false,
		"masquerade":            true,
		"IP-MASQ-AGENT\x00":     false,
	} {
		if err := ValidateChain(name); (err == nil) != valid {
			t.Errorf("ValidateChain(%q): %v, want valid %t", name, err, valid)
		}
	}
}

// TestValidateChainAgreesWithIptables asks the programs about every name that
// is refused for being taken, and about the longest that is not.
func TestValidateChainAgreesWithIptables(t *testing.T) {
	n := newNode(t)
	for _, m := range []mode{nft, legacy} {
		n.run("iptables-"+string(m), "-t", "nat", "-N", strings.Repeat("x", maxChain))
		for _, name := range []string{strings.Repeat("x", maxChain+1), "a b", "-x", "!x", "POSTROUTING", "ACCEPT", "MASQUERADE"} {
			if _, err := n.ns.Run(t.Context(), "iptables-"+string(m), "-t", "nat", "-N", name); err == nil {
				t.Errorf("iptables-%s takes %q", m, name)
			}
		}
	}
}
