// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"strings"
	"testing"
)

// Only tables with nothing but the empty chain of ours go.
func TestRemoveEmptyTables(t *testing.T) {
	const ours = `table ip nat { chain POSTROUTING { type nat hook postrouting priority srcnat; policy accept; }; }`
	for name, tt := range map[string]struct {
		ruleset string
		removed bool
	}{
		"nothing":       {"", true},
		"empty":         {ours, true},
		"empty, IPv6":   {strings.Replace(ours, "ip", "ip6", 1), true},
		"a rule":        {ours + "\nadd rule ip nat POSTROUTING accept", false},
		"another chain": {ours + "\nadd chain ip nat OTHERS", false},
		"a set":         {ours + "\nadd set ip nat others { type ipv4_addr; }", false},
		"other names":   {strings.Replace(ours, "POSTROUTING", "OTHERS", 1), false},
		"no chain":      {"table ip nat {}", false},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			if err := n.ns.NFT(tt.ruleset); err != nil {
				t.Fatal(err)
			}
			before := n.run("nft", "list", "ruleset")
			n.do(RemoveEmptyTables)
			want := before
			if tt.removed {
				want = ""
			}
			if got := n.run("nft", "list", "ruleset"); got != want {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
}
