// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// foreign are rules of others around ours, to be left as they are.
const (
	foreignBefore = "-A POSTROUTING -s 192.0.2.1/32 -j ACCEPT\n"
	foreignAfter  = "-A POSTROUTING -s 192.0.2.2/32 -j ACCEPT\n"
)

// chainText is a chain and its jump as another version made them.
func chainText(name, jump string, rules ...string) string {
	lines := []string{"*nat", ":" + name + " - [0:0]", foreignBefore + jump, strings.TrimSpace(foreignAfter)}
	for _, r := range rules {
		lines = append(lines, "-A "+name+" "+r)
	}
	return strings.Join(lines, "\n") + "\nCOMMIT\n"
}

func quotedJump(name string) string {
	return "-A POSTROUTING " + natJump(name, `"`+natJumpComment(name)+`"`)
}

func plainJump(name string) string { return "-A POSTROUTING " + natJump(name, natJumpComment(name)) }

// TestAdoption: whatever an earlier version left, one chain and one jump
// remain, in the old jump's place.
func TestAdoption(t *testing.T) {
	const masquerade = `-m comment --comment "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)" -j MASQUERADE`
	tests := []struct {
		name, before string
		appended     bool // the old jump led elsewhere, so the new one comes last
	}{
		{name: "quoted jump", before: chainText(testChain, quotedJump(testChain), masquerade)},
		{name: "quoted and plain jump", before: chainText(testChain, quotedJump(testChain)+"\n"+plainJump(testChain), masquerade)},
		{name: "first version", before: chainText(testChain, plainJump(testChain),
			`-m comment --comment "ip-masq-agent: cluster-local traffic should not be subject to MASQUERADE" -m addrtype ! --dst-type LOCAL -d 10.0.0.0/8 -j RETURN`,
			`-m comment --comment "ip-masq-agent: outbound traffic should be subject to MASQUERADE (this match must come after cluster-local CIDR matches)" -m addrtype ! --dst-type LOCAL -j MASQUERADE`)},
		{name: "other chain", before: chainText("OLD-CHAIN", plainJump("OLD-CHAIN"), masquerade), appended: true},
		{name: "other chain, quoted", before: chainText("IP-MASQ", quotedJump("IP-MASQ"), masquerade), appended: true},
		{name: "other chain, emptied", before: chainText("OLD-CHAIN", plainJump("OLD-CHAIN")), appended: true},
	}
	eachMode(t, func(t *testing.T, n *node, m mode) {
		for _, tt := range tests {
			t.Run(tt.name, func(t *testing.T) {
				n.restore(m, ipv4, tt.before)
				t.Cleanup(func() {
					n.run("iptables-"+string(m), "-t", "nat", "-F")
					n.run("iptables-"+string(m), "-t", "nat", "-X")
				})
				d := n.datapath(n.options())
				n.sync(d, defaultPolicy())
				want := foreignBefore + plainJump(testChain) + "\n" + foreignAfter
				if tt.appended {
					want = foreignBefore + foreignAfter + plainJump(testChain) + "\n"
				}
				got := n.save(m, ipv4, tableNAT)
				if diff := cmp.Diff(want, grep(got, "-A POSTROUTING ")); diff != "" {
					t.Errorf("-want +got:\n%s", diff)
				}
				if chains := grep(got, " -\n"); chains != ":"+testChain+" -\n" {
					t.Errorf("chains:\n%s", chains)
				}
				if countLines(got, "-A "+testChain+" ") != 5 {
					t.Errorf("content:\n%s", got)
				}
			})
		}
	})
}

func grep(text, what string) string {
	var found strings.Builder
	for line := range strings.Lines(text) {
		if strings.Contains(line, what) {
			found.WriteString(line)
		}
	}
	return found.String()
}

// TestChainWithForeignReferencesStays: what others use is not taken away.
func TestChainWithForeignReferencesStays(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, m mode) {
		n.restore(m, ipv4, "*nat\n:OLD-CHAIN - [0:0]\n:OTHERS - [0:0]\n-A OTHERS -j OLD-CHAIN\n"+
			"-A OLD-CHAIN "+comment(masqueradeComment)+" -j MASQUERADE\n"+plainJump("OLD-CHAIN")+"\nCOMMIT\n")
		before := n.save(m, ipv4, tableNAT)
		n.sync(n.datapath(n.options()), defaultPolicy())
		for line := range strings.Lines(before) {
			if !strings.Contains(n.save(m, ipv4, tableNAT), line) {
				t.Errorf("gone: %s", line)
			}
		}
		if !strings.Contains(n.log.String(), "rules of an earlier run stay") {
			t.Errorf("not in the log:\n%s", n.log)
		}
	})
}

// TestSiblingsAreNamedOnceAndLeft: two agents that take each other's chains
// away would go on for ever.
func TestSiblingsAreNamedOnceAndLeft(t *testing.T) {
	const gke = "*nat\n:IP-MASQ - [0:0]\n" +
		"-A POSTROUTING -m comment --comment \"ip-masq: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ chain\" -m addrtype ! --dst-type LOCAL -j IP-MASQ\n" +
		"-A IP-MASQ -d 10.0.0.0/8 -m comment --comment \"ip-masq: local traffic is not subject to MASQUERADE\" -j RETURN\n" +
		"-A IP-MASQ -m comment --comment \"ip-masq: outbound traffic is subject to MASQUERADE (must be last in chain)\" -j MASQUERADE\nCOMMIT\n"
	eachMode(t, func(t *testing.T, n *node, m mode) {
		n.restore(m, ipv4, gke)
		siblings := grep(n.save(m, ipv4, tableNAT), "ip-masq: ")
		options := n.options()
		d := n.datapath(options)
		for range 3 {
			n.sync(d, defaultPolicy())
			d.surveyed = make(map[family]survey) // as if time had passed
		}
		if got := grep(n.save(m, ipv4, tableNAT), "ip-masq: "); got != siblings {
			t.Errorf("the sibling was touched:\n%s", got)
		}
		status, err := d.Status()
		if err != nil {
			t.Fatal(err)
		}
		want := []string{"ipv4: chain IP-MASQ of another agent decides before IP-MASQ-AGENT is asked: remove it, or run this agent with --masq-chain=IP-MASQ"}
		if diff := cmp.Diff(want, status.Warnings); diff != "" {
			t.Errorf("warnings (-want +got):\n%s", diff)
		}
		if got := countLines(n.log.String(), "chain IP-MASQ of another agent"); got != 1 {
			t.Errorf("named %d times:\n%s", got, n.log)
		}
		// A classic agent that runs beside us makes its chain again.
		n.restore(m, ipv4, "*nat\n:CLASSIC - [0:0]\n"+plainJump("CLASSIC")+"\n-A CLASSIC "+comment(masqueradeComment)+" -j MASQUERADE\nCOMMIT\n")
		n.sync(d, defaultPolicy())
		if got := n.save(m, ipv4, tableNAT); !strings.Contains(got, "-j CLASSIC") {
			t.Errorf("the other agent's jump is gone:\n%s", got)
		}
		n.cleanup(options)
		if got := grep(n.save(m, ipv4, tableNAT), "ip-masq: "); got != siblings {
			t.Errorf("the sibling was cleaned up:\n%s", got)
		}
	})
}

// TestChainOfTheBootScriptIsTakenOver, as the classic agent does on GKE.
func TestChainOfTheBootScriptIsTakenOver(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, m mode) {
		boot := "-A POSTROUTING -m comment --comment \"ip-masq: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ chain\" -m addrtype ! --dst-type LOCAL -j IP-MASQ\n"
		n.restore(m, ipv4, "*nat\n:IP-MASQ - [0:0]\n"+boot+"-A IP-MASQ -m comment --comment \"ip-masq: x\" -j MASQUERADE\nCOMMIT\n")
		options := n.options()
		options.Chain = "IP-MASQ"
		d := n.datapath(options)
		n.sync(d, defaultPolicy())
		got := n.save(m, ipv4, tableNAT)
		if want := boot + plainJump("IP-MASQ") + "\n"; grep(got, "-A POSTROUTING") != want {
			t.Errorf("got\n%swant\n%s", grep(got, "-A POSTROUTING"), want)
		}
		if countLines(got, "-A IP-MASQ ") != 5 || strings.Contains(got, "ip-masq: x") {
			t.Errorf("got\n%s", got)
		}
		if status, _ := d.Status(); len(status.Warnings) > 0 {
			t.Errorf("warnings %q", status.Warnings)
		}
		// Then cleaning up must leave the script's jump, and so the chain.
		n.cleanup(options)
		if got := ownPart(n.save(m, ipv4, tableNAT)); got != ":IP-MASQ -\n"+boot {
			t.Errorf("left\n%s", got)
		}
		n.cleanup(options)
	})
}

// TestLeftoversOfOtherOptions: IPv6 and --invalid=drop were on, the backend was
// the other one.
func TestLeftoversOfOtherOptions(t *testing.T) {
	t.Run("IPv6 and invalid", func(t *testing.T) {
		eachMode(t, func(t *testing.T, n *node, m mode) {
			options := n.options()
			options.DropInvalid = true
			n.sync(n.datapath(options), defaultPolicy())
			n.run("ip6tables-"+string(m), "-t", "nat", "-A", "POSTROUTING", "-s", "2001:db8::1", "-j", "ACCEPT")
			n.sync(n.datapath(Options{Chain: testChain, Log: options.Log}), defaultPolicy())
			for _, f := range families() {
				if got := n.save(m, f, tableMangle); strings.Contains(got, InvalidChain) {
					t.Errorf("left in mangle of %s:\n%s", f, got)
				}
			}
			got := n.save(m, ipv6, tableNAT)
			if strings.Contains(got, testChain) || !strings.Contains(got, "2001:db8::1") {
				t.Errorf("IPv6:\n%s", got)
			}
			if got := n.save(m, ipv4, tableNAT); countLines(got, testChain) != 7 {
				t.Errorf("IPv4:\n%s", got)
			}
		})
	})
	t.Run("backend", func(t *testing.T) {
		n := newNode(t)
		n.prefer(legacy)
		n.sync(n.datapath(n.options()), defaultPolicy())
		oneRule(n, legacy)
		n.prefer(nft)
		n.sync(n.datapath(n.options()), defaultPolicy())
		for _, f := range families() {
			if got := n.save(legacy, f, tableNAT); strings.Contains(got, testChain) {
				t.Errorf("left in legacy %s:\n%s", f, got)
			}
			if got := n.save(nft, f, tableNAT); !strings.Contains(got, testChain) {
				t.Errorf("not in nft %s:\n%s", f, got)
			}
		}
		if got := n.run("iptables-legacy", "-S", "INPUT"); !strings.Contains(got, "192.0.2.1") {
			t.Errorf("another's rule is gone:\n%s", got)
		}
	})
}
