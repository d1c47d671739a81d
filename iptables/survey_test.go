// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// ours is a nat table with our jump behind what it is given, and our chain.
func ours(before, after string) map[string]listed {
	chain := natChain(testChain, nil, nil, true)
	return parseTable("-P POSTROUTING ACCEPT\n-N " + testChain + "\n" + before +
		"-A POSTROUTING " + chain.jump + "\n" + after +
		"-A " + testChain + " -d 10.0.0.0/8 " + comment(keepComment) + " -j RETURN\n" +
		"-A " + testChain + " " + chain.rules[0] + "\n")
}

// Trap 60: whoever masquerades before us is named.
func TestObstacles(t *testing.T) {
	const kubeProxy = "-A POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING\n" +
		"-A KUBE-POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE\n" +
		"-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n" +
		"-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0\n-A KUBE-POSTROUTING -j MASQUERADE --random-fully\n"
	const gke = "-A POSTROUTING -m comment --comment \"ip-masq: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ chain\" -m addrtype ! --dst-type LOCAL -j IP-MASQ\n" +
		"-A IP-MASQ -m comment --comment \"ip-masq: outbound traffic is subject to MASQUERADE (must be last in chain)\" -j MASQUERADE\n"
	tests := []struct {
		name, before, after string
		want                []string // kinds
	}{
		{name: "alone"},
		{name: "kube-proxy", before: kubeProxy},
		{name: "marked packets in another chain", before: "-A POSTROUTING -j X\n-A X -m mark ! --mark 0x1/0x1 -j RETURN\n-A X -j MASQUERADE\n"},
		{name: "marked packets by the jump", before: "-A POSTROUTING -m mark --mark 0x1 -j X\n-A X -j MASQUERADE\n"},
		{name: "hairpin", before: "-A POSTROUTING -s 10.0.0.2/32 -d 10.0.0.2/32 -p tcp -m tcp --dport 80 -j MASQUERADE\n"},
		{name: "not exempt anyway", before: "-A POSTROUTING -d 198.51.100.0/24 -j SNAT --to-source 192.0.2.1\n"},
		{name: "loopback", before: "-A POSTROUTING -o lo -j MASQUERADE\n"},
		{name: "masquerade behind us", after: "-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE\n"},
		{name: "masquerade", before: "-A POSTROUTING -o eth0 -j MASQUERADE\n", want: []string{"earlier"}},
		{name: "snat of an exempt range", before: "-A POSTROUTING -d 10.1.0.0/16 -j SNAT --to-source 192.0.2.1\n", want: []string{"earlier"}},
		{
			name:   "flannel",
			before: "-A POSTROUTING -j FLANNEL-POSTRTG\n-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN\n-A FLANNEL-POSTRTG -s 10.244.0.0/16 -d 10.244.0.0/16 -j RETURN\n-A FLANNEL-POSTRTG -s 10.244.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE\n",
			want:   []string{"earlier"},
		},
		{
			name: "chains of pods",
			before: "-A POSTROUTING -s 10.244.1.5/32 -j CNI-1\n-A POSTROUTING -s 10.244.1.6/32 -j CNI-2\n" +
				"-A CNI-1 -d 10.244.0.0/16 -j ACCEPT\n-A CNI-1 ! -d 224.0.0.0/4 -j MASQUERADE\n-A CNI-2 ! -d 224.0.0.0/4 -j MASQUERADE\n",
			want: []string{"earlier"},
		},
		{name: "two levels", before: "-A POSTROUTING -j A\n-A A -j B\n-A B -j MASQUERADE\n", want: []string{"earlier"}},
		{name: "sibling before", before: gke, want: []string{"sibling IP-MASQ"}},
		{name: "sibling behind", after: gke, want: []string{"sibling IP-MASQ"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			for _, w := range findObstacles(ours(tt.before, tt.after), testChain) {
				got = append(got, w.kind)
				if tt.name == "chains of pods" && !strings.Contains(w.text, "CNI-1 and 1 more") {
					t.Error(w.text)
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestChainOfTheBootScriptMayBeOurs: --masq-chain=IP-MASQ is how GKE runs it.
func TestChainOfTheBootScriptMayBeOurs(t *testing.T) {
	table := parseTable("-P POSTROUTING ACCEPT\n-N IP-MASQ\n" +
		"-A POSTROUTING -m comment --comment \"ip-masq: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ chain\" -m addrtype ! --dst-type LOCAL -j IP-MASQ\n" +
		"-A POSTROUTING " + natChain("IP-MASQ", nil, nil, true).jump + "\n-A IP-MASQ " + natChain("IP-MASQ", nil, nil, true).rules[0] + "\n")
	if got := findObstacles(table, "IP-MASQ"); len(got) > 0 {
		t.Errorf("got %v", got)
	}
}

func TestRenamed(t *testing.T) {
	old := natChain("OLD", nil, nil, true)
	tests := []struct {
		name, more string
		want       []string
	}{
		{name: "none"},
		{name: "old chain", more: "-N OLD\n-A POSTROUTING " + old.jump + "\n-A OLD " + old.rules[0] + "\n", want: []string{"OLD"}},
		{name: "emptied", more: "-N OLD\n-A POSTROUTING " + old.jump + "\n", want: []string{"OLD"}},
		{name: "without jump", more: "-N OLD\n-A OLD " + old.rules[0] + "\n", want: []string{"OLD"}},
		{name: "empty chain of anyone", more: "-N OLD\n"},
		{name: "foreign rule inside", more: "-N OLD\n-A POSTROUTING " + old.jump + "\n-A OLD " + old.rules[0] + "\n-A OLD -j LOG\n"},
		{name: "boot script's", more: "-N IP-MASQ\n-A IP-MASQ -m comment --comment \"ip-masq: x\" -j MASQUERADE\n"},
		{name: "first version", more: "-N OLD\n-A OLD -m comment --comment \"ip-masq-agent: cluster-local traffic should not be subject to MASQUERADE\" -m addrtype ! --dst-type LOCAL -d 10.0.0.0/8 -j RETURN\n", want: []string{"OLD"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, renamed(ours("", tt.more), testChain)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}
