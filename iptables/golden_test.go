// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"ip-masq-agent/internal/portrange"
	"ip-masq-agent/internal/prefix"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write our own golden files (never those of the classic agent)")

func golden(t *testing.T, file, got string) {
	t.Helper()
	path := filepath.Join("testdata", file)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	compareGolden(t, file, got)
}

func compareGolden(t *testing.T, file, got string) {
	t.Helper()
	want, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", file, diff)
	}
}

func ports(t *testing.T, text string) []portrange.Range {
	t.Helper()
	ranges, err := portrange.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return ranges
}

// TestTextOfClassicAgent compares with what kubernetes-sigs/ip-masq-agent
// (commit e300086, after v2.12.6) made iptables-save print with the same
// configuration: testdata/upstream. It printed the same with both backends.
func TestTextOfClassicAgent(t *testing.T) {
	defaults := prefixes("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
	reserved := prefixes("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "192.0.0.0/24", "192.0.2.0/24",
		"192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4")
	list := func(texts ...string) prefix.Lists {
		return prefix.Lists{LinkLocal: linkLocal(), NonMasquerade: prefixes(texts...)}
	}
	all := prefix.Lists{LinkLocal: linkLocal(), NonMasquerade: defaults}
	tests := []struct {
		name      string
		lists     prefix.Lists
		ipv6      bool
		notRandom bool
		ports     string
		chain     string
	}{
		{name: "default", lists: all},
		{name: "ipv6", lists: all, ipv6: true},
		{name: "reserved", lists: prefix.Lists{LinkLocal: linkLocal(), NonMasquerade: reserved}},
		{name: "custom", lists: list("172.20.0.0/14", "10.0.0.0/8", "1.2.3.4/32", "10.1.0.0/16", "10.0.0.0/8")},
		{name: "empty", lists: list()},
		{name: "everything", lists: list("10.0.0.0/8", "0.0.0.0/0")},
		{name: "link_local", lists: prefix.Lists{NonMasquerade: prefixes("10.0.0.0/8")}, ipv6: true},
		{name: "ports_1", lists: all, ports: "1024-29999", ipv6: true},
		{name: "ports_2", lists: all, ports: "1024-29999,32768-65535"},
		{name: "ports_3", lists: all, ports: "1024-29999,32768-49151,61000-65535", ipv6: true},
		{name: "ports_single", lists: all, ports: "1024,65535"},
		{name: "not_random", lists: all, notRandom: true, ports: "1024-29999"},
		{name: "ipv6_list", lists: list("10.244.0.0/16", "fc00::/7", "2001:db8::/48", "fd00::/8", "::/0"), ipv6: true},
		{name: "chain_name", lists: all, chain: "IP-MASQ"},
	}
	eachMode(t, func(t *testing.T, n *node, m mode) {
		for _, tt := range tests {
			t.Run(tt.name, func(t *testing.T) {
				options := n.options()
				options.IPv6, options.RandomFully, options.ToPorts = tt.ipv6, !tt.notRandom, ports(t, tt.ports)
				if tt.chain != "" {
					options.Chain = tt.chain
				}
				n.sync(n.datapath(options), prefix.New(tt.lists))
				t.Cleanup(func() { n.cleanup(options) })
				compareIfThere(t, tt.name+".v4.save", n.save(m, ipv4, tableNAT))
				if tt.ipv6 {
					compareIfThere(t, tt.name+".v6.save", n.save(m, ipv6, tableNAT))
				}
			})
		}
	})
}

// compareIfThere: "ipv6" has the IPv4 text of "default".
func compareIfThere(t *testing.T, file, got string) {
	t.Helper()
	if file != "ipv6.v4.save" {
		compareGolden(t, filepath.Join("upstream", file), got)
	}
}

func TestTextOfExceptions(t *testing.T) {
	lists := prefix.Lists{
		LinkLocal:     linkLocal(),
		NonMasquerade: prefixes("10.0.0.0/8", "192.168.0.0/16", "10.99.5.0/24", "fc00::/7"),
		Masquerade:    prefixes("10.99.0.0/16", "fd00:99::/32"),
	}
	only := prefix.Lists{LinkLocal: linkLocal(), NonMasquerade: prefixes("0.0.0.0/0"), Masquerade: prefixes("198.51.100.0/24")}
	tests := []struct {
		name  string
		lists prefix.Lists
		ports string
	}{
		{"exceptions", lists, ""},
		{"exceptions_ports", lists, "1024-29999,32768-65535"},
		{"exceptions_only", only, ""},
	}
	eachMode(t, func(t *testing.T, n *node, m mode) {
		for _, tt := range tests {
			t.Run(tt.name, func(t *testing.T) {
				options := n.options()
				options.ToPorts, options.DropInvalid = ports(t, tt.ports), true
				n.sync(n.datapath(options), prefix.New(tt.lists))
				t.Cleanup(func() { n.cleanup(options) })
				for _, f := range families() {
					got := n.save(m, f, tableNAT) + ownPart(n.save(m, f, tableMangle))
					golden(t, tt.name+"."+f.String()+".save", got)
				}
			})
		}
	})
}
