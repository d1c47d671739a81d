// SPDX-License-Identifier: Apache-2.0

package prefix

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var equal = cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })

func prefixes(texts ...string) []netip.Prefix {
	var list []netip.Prefix
	for _, text := range texts {
		list = append(list, netip.MustParsePrefix(text))
	}
	return list
}

func keep(text string) Entry       { return Entry{netip.MustParsePrefix(text), Keep} }
func masquerade(text string) Entry { return Entry{netip.MustParsePrefix(text), Masquerade} }

func linkLocal() []netip.Prefix { return prefixes("169.254.0.0/16", "fe80::/10") }

func TestVerdictString(t *testing.T) {
	if got := fmt.Sprint(Masquerade, " ", Keep); got != "masquerade keep" {
		t.Errorf("verdicts print as %q", got)
	}
}

func TestLookup(t *testing.T) {
	policy := New(Lists{
		LinkLocal:     linkLocal(),
		NonMasquerade: prefixes("10.0.0.0/8", "10.1.2.3/32", "128.0.0.0/1", "fc00::/7"),
		Masquerade:    prefixes("10.1.0.0/16", "169.254.7.0/24", "169.254.0.0/16", "fc00:1::/32", "fe80:1::/32"),
	})
	tests := []struct {
		addr string
		want Entry
		ok   bool
	}{
		{"10.9.9.9", keep("10.0.0.0/8"), true},
		{"10.1.9.9", masquerade("10.1.0.0/16"), true},
		{"10.1.2.3", keep("10.1.2.3/32"), true},
		{"10.1.2.4", masquerade("10.1.0.0/16"), true},
		{"1.1.1.1", Entry{}, false},
		{"::ffff:10.1.2.3", keep("10.1.2.3/32"), true},
		{"::ffff:1.1.1.1", Entry{}, false},
		{"169.254.1.1", keep("169.254.0.0/16"), true},
		{"169.254.7.1", keep("169.254.0.0/16"), true},
		{"169.253.1.1", keep("128.0.0.0/1"), true},
		{"fc00::1", keep("fc00::/7"), true},
		{"fc00:1::1", masquerade("fc00:1::/32"), true},
		{"fe80:1::1", keep("fe80::/10"), true},
		{"fe80:1::1%eth0", keep("fe80::/10"), true},
		{"fc00:1::1%eth0", masquerade("fc00:1::/32"), true},
		{"2001:db8::1", Entry{}, false},
	}
	for _, tt := range tests {
		t.Run(tt.addr, func(t *testing.T) {
			got, ok := policy.Lookup(netip.MustParseAddr(tt.addr))
			if got != tt.want || ok != tt.ok {
				t.Errorf("Lookup(%s) = %v, %v, want %v, %v", tt.addr, got, ok, tt.want, tt.ok)
			}
		})
	}
	if got, ok := policy.Lookup(netip.Addr{}); ok {
		t.Errorf("Lookup of no address = %v", got)
	}
}

func TestDefaultRoutes(t *testing.T) {
	policy := New(Lists{
		NonMasquerade: prefixes("0.0.0.0/0"),
		Masquerade:    prefixes("::/0", "1.2.3.4/32"),
	})
	for addr, want := range map[string]Entry{
		"255.255.255.255": keep("0.0.0.0/0"),
		"1.2.3.4":         masquerade("1.2.3.4/32"),
		"2001:db8::1":     masquerade("::/0"),
	} {
		if got, ok := policy.Lookup(netip.MustParseAddr(addr)); !ok || got != want {
			t.Errorf("Lookup(%s) = %v, %v, want %v", addr, got, ok, want)
		}
	}
}

func TestRulesAndEntries(t *testing.T) {
	tests := []struct {
		name           string
		lists          Lists
		is6            bool
		rules, entries []Entry
	}{
		{name: "empty"},
		{
			name:    "link-local only",
			lists:   Lists{LinkLocal: linkLocal()},
			rules:   []Entry{keep("169.254.0.0/16")},
			entries: []Entry{keep("169.254.0.0/16")},
		},
		{
			name: "without a masquerade list the user's order and duplicates stay",
			lists: Lists{
				LinkLocal:     linkLocal(),
				NonMasquerade: prefixes("192.168.0.0/16", "10.0.0.0/8", "fc00::/7", "10.1.0.0/16", "10.0.0.0/8"),
			},
			rules:   []Entry{keep("169.254.0.0/16"), keep("192.168.0.0/16"), keep("10.0.0.0/8"), keep("10.1.0.0/16"), keep("10.0.0.0/8")},
			entries: []Entry{keep("10.1.0.0/16"), keep("169.254.0.0/16"), keep("192.168.0.0/16"), keep("10.0.0.0/8")},
		},
		{
			name:  "IPv6",
			lists: Lists{LinkLocal: linkLocal(), NonMasquerade: prefixes("10.0.0.0/8", "fc00::/7", "2001:db8::/32")},
			is6:   true,
			rules: []Entry{keep("fe80::/10"), keep("fc00::/7"), keep("2001:db8::/32")},
			entries: []Entry{
				keep("2001:db8::/32"), keep("fe80::/10"), keep("fc00::/7"),
			},
		},
		{
			name: "with a masquerade list all are sorted by length, stable, behind link-local",
			lists: Lists{
				LinkLocal:     linkLocal(),
				NonMasquerade: prefixes("0.0.0.0/0", "192.168.0.0/16", "10.2.0.0/16"),
				Masquerade:    prefixes("10.1.0.0/16", "10.1.2.0/24"),
			},
			rules: []Entry{
				keep("169.254.0.0/16"), masquerade("10.1.2.0/24"),
				keep("192.168.0.0/16"), keep("10.2.0.0/16"), masquerade("10.1.0.0/16"), keep("0.0.0.0/0"),
			},
			entries: []Entry{
				masquerade("10.1.2.0/24"), masquerade("10.1.0.0/16"), keep("10.2.0.0/16"),
				keep("169.254.0.0/16"), keep("192.168.0.0/16"), keep("0.0.0.0/0"),
			},
		},
		{
			name: "a masquerade prefix in or equal to link-local is kept in a trie",
			lists: Lists{
				LinkLocal:  linkLocal(),
				Masquerade: prefixes("169.254.169.254/32", "169.254.0.0/16", "169.0.0.0/8"),
			},
			rules: []Entry{
				keep("169.254.0.0/16"), masquerade("169.254.169.254/32"), masquerade("169.254.0.0/16"), masquerade("169.0.0.0/8"),
			},
			entries: []Entry{keep("169.254.169.254/32"), keep("169.254.0.0/16"), masquerade("169.0.0.0/8")},
		},
		{
			name:    "a prefix in both lists is kept",
			lists:   Lists{NonMasquerade: prefixes("10.0.0.0/8"), Masquerade: prefixes("10.0.0.0/8")},
			rules:   []Entry{keep("10.0.0.0/8"), masquerade("10.0.0.0/8")},
			entries: []Entry{keep("10.0.0.0/8")},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			policy := New(tt.lists)
			if diff := cmp.Diff(tt.rules, policy.Rules(tt.is6), equal, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("Rules (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.entries, policy.Entries(tt.is6), equal); diff != "" {
				t.Errorf("Entries (-want +got):\n%s", diff)
			}
		})
	}
}

func TestPolicyIsImmutable(t *testing.T) {
	lists := Lists{LinkLocal: linkLocal(), NonMasquerade: prefixes("10.0.0.0/8"), Masquerade: prefixes("10.1.0.0/16")}
	policy := New(lists)
	other := netip.MustParsePrefix("1.0.0.0/8")
	for _, l := range []Lists{lists, policy.Lists()} {
		l.LinkLocal[0], l.NonMasquerade[0], l.Masquerade[0] = other, other, other
	}
	policy.Rules(false)[0].Prefix = other
	policy.Entries(false)[0].Prefix = other
	if slices.Contains(policy.Lists().NonMasquerade, other) || policy.Rules(false)[0].Prefix == other {
		t.Error("writing to what went in or came out changed the policy")
	}
	if _, ok := policy.Lookup(netip.MustParseAddr("1.1.1.1")); ok {
		t.Error("writing to what went in or came out changed a verdict")
	}
}

// TestDecisionsAgree holds the four ways to decide together: Lookup, the first
// match over Rules, the longest match over Entries, and, without a masquerade
// list, whether anything matches at all.
func TestDecisionsAgree(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		lists := randomLists(rng)
		policy := New(lists)
		for _, is6 := range []bool{false, true} {
			checkEntries(t, policy, is6)
			for range 20 {
				addr := randomAddr(rng, is6, lists)
				got, ok := policy.Lookup(addr)
				if want := firstMatch(policy.Rules(is6), addr); got.Verdict != want {
					t.Fatalf("%v: Lookup(%s) = %v, the rules say %v", lists, addr, got, want)
				}
				longest, found := longestMatch(policy.Entries(is6), addr)
				if got.Verdict != longest.Verdict || ok != found {
					t.Fatalf("%v: Lookup(%s) = %v, %v, the entries say %v, %v", lists, addr, got, ok, longest, found)
				}
				if len(lists.Masquerade) == 0 && (got.Verdict == Keep) != found {
					t.Fatalf("%v: Lookup(%s) = %v, but a match means keep", lists, addr, got)
				}
			}
		}
	}
}

func checkEntries(t *testing.T, policy *Policy, is6 bool) {
	t.Helper()
	entries := policy.Entries(is6)
	for i, e := range entries {
		if i > 0 && (byLength(entries[i-1], e) > 0 || entries[i-1].Prefix == e.Prefix) {
			t.Fatalf("entries not longest first and distinct: %v", entries)
		}
	}
}

func firstMatch(rules []Entry, addr netip.Addr) Verdict {
	for _, e := range rules {
		if e.Prefix.Contains(addr) {
			return e.Verdict
		}
	}
	return Masquerade
}

func longestMatch(entries []Entry, addr netip.Addr) (best Entry, found bool) {
	for _, e := range entries {
		if e.Prefix.Contains(addr) && (!found || e.Prefix.Bits() > best.Prefix.Bits()) {
			best, found = e, true
		}
	}
	return best, found
}

// randomLists is dense enough for its prefixes to nest: few address bits vary.
func randomLists(rng *rand.Rand) Lists {
	var lists Lists
	if rng.IntN(3) > 0 {
		lists.LinkLocal = linkLocal()
	}
	for range rng.IntN(12) {
		lists.NonMasquerade = append(lists.NonMasquerade, randomPrefix(rng))
	}
	if rng.IntN(2) > 0 {
		for range rng.IntN(12) {
			lists.Masquerade = append(lists.Masquerade, randomPrefix(rng))
		}
	}
	return lists
}

func randomPrefix(rng *rand.Rand) netip.Prefix {
	addr := randomAddr(rng, rng.IntN(2) == 0, Lists{})
	return netip.PrefixFrom(addr, rng.IntN(addr.BitLen()+1)).Masked()
}

func randomAddr(rng *rand.Rand, is6 bool, lists Lists) netip.Addr {
	all := lists.entries()
	if len(all) > 0 && rng.IntN(2) == 0 { // at the edge of a prefix
		if addr := all[rng.IntN(len(all))].Prefix.Addr(); addr.Is6() == is6 {
			if addr.Prev().IsValid() && rng.IntN(3) == 0 {
				return addr.Prev()
			}
			return addr
		}
	}
	if is6 {
		b := netip.MustParseAddr("fe80::").As16()
		b[1] = []byte{0x80, 0x81, 0xc0, 0x00}[rng.IntN(4)]
		b[15] = byte(rng.IntN(4))
		return netip.AddrFrom16(b)
	}
	return netip.AddrFrom4([4]byte{169, 253 + byte(rng.IntN(3)), byte(rng.IntN(2)), byte(rng.IntN(4))})
}

func manyPrefixes(n int) []netip.Prefix {
	rng := rand.New(rand.NewPCG(3, 4))
	list := make([]netip.Prefix, n)
	for i := range list {
		addr := netip.AddrFrom4([4]byte{byte(rng.IntN(224)), byte(rng.IntN(256)), byte(rng.IntN(256)), byte(rng.IntN(256))})
		list[i] = netip.PrefixFrom(addr, 8+rng.IntN(25)).Masked()
	}
	return list
}

func BenchmarkNew(b *testing.B) {
	lists := Lists{LinkLocal: linkLocal(), NonMasquerade: manyPrefixes(10_000)}
	for b.Loop() {
		New(lists)
	}
}

func BenchmarkLookup(b *testing.B) {
	policy := New(Lists{LinkLocal: linkLocal(), NonMasquerade: manyPrefixes(10_000)})
	miss := netip.MustParseAddr("230.1.1.1")
	for b.Loop() {
		policy.Lookup(miss)
	}
}
