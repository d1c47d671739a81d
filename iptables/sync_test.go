// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/prefix"

	"github.com/google/go-cmp/cmp"
)

var _ agent.Datapath = (*Datapath)(nil)

// countRestores counts the restores of a backend until the test ends.
func countRestores(t *testing.T, m mode) func() int {
	t.Helper()
	log := filepath.Join(t.TempDir(), "restores")
	for _, f := range families() {
		fakeProgram(t, tool{mode: m, family: f}.program("-restore"), "echo >>"+log+"\nexec $REAL \"$@\"")
	}
	return func() int {
		text, err := os.ReadFile(log)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		return strings.Count(string(text), "\n")
	}
}

func TestIdleSyncWritesNothing(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, m mode) {
		restores := countRestores(t, m)
		options := n.options()
		options.DropInvalid, options.ToPorts = true, ports(t, "1024-29999,32768-65535")
		policy := prefix.New(prefix.Lists{
			LinkLocal:     linkLocal(),
			NonMasquerade: prefixes("10.0.0.0/8", "1.2.3.4/32", "0.0.0.0/0", "10.0.0.0/8", "fc00::/7", "::/0"),
			Masquerade:    append(prefixes("10.99.0.0/16"), netip.PrefixFrom(n.lab.Remote.V4, 32), netip.PrefixFrom(n.lab.Remote.V6, 128)),
		})
		d := n.datapath(options)
		n.sync(d, policy)
		written := restores()
		if written != 4 {
			t.Errorf("%d transactions, want 4: two families, two tables", written)
		}
		n.send(ipv4)
		n.send(ipv6)
		logged := n.log.Len()
		for range 10 {
			n.sync(d, policy)
		}
		if restores() != written {
			t.Errorf("%d transactions without a difference", restores()-written)
		}
		if n.log.Len() != logged {
			t.Errorf("idle syncs logged:\n%s", n.log.String()[logged:])
		}
		for _, f := range families() {
			if got := n.run(n.tool(m, f).program(""), "-t", "nat", "-nvxL", testChain); !strings.Contains(got, "\n       1 ") {
				t.Errorf("%s: the counters are gone:\n%s", f, got)
			}
		}
		if stats := n.stats(d); stats.TranslationsV4 != 1 || stats.TranslationsV6 != 1 || stats.Repairs != 0 {
			t.Errorf("got %+v, want one flow in each family", stats)
		}
		// A new agent finds the rules of the last one in order.
		n.sync(n.datapath(options), policy)
		if restores() != written {
			t.Errorf("%d transactions by a restarted agent", restores()-written)
		}
	})
}

func TestCountersGoOnOverRewrites(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, m mode) {
		d := n.datapath(n.options())
		// The node's own IGMP reports are no flows to count.
		list := func(i int) *prefix.Policy {
			return prefix.New(prefix.Lists{NonMasquerade: prefixes(fmt.Sprintf("10.%d.0.0/16", i), "224.0.0.0/4")})
		}
		for i := range 3 {
			n.sync(d, list(i))
			n.send(ipv4)
		}
		n.run("iptables-"+string(m), "-t", "nat", "-F", testChain)
		n.sync(d, list(3))
		n.send(ipv4)
		stats := n.stats(d)
		// What was counted between the last reading and a foreign flush is lost.
		if stats.TranslationsV4 != 3 {
			t.Errorf("%d flows, want 3", stats.TranslationsV4)
		}
		if diff := cmp.Diff(uint64(0), stats.Drops["invalid"]); diff != "" || len(stats.Drops) != 6 {
			t.Errorf("drops %v", stats.Drops)
		}
	})
}

// damages are what others do to our rules.
func damages() map[string]func(n *node, iptables string) {
	jump := func(command string) []string {
		return append([]string{"-t", "nat", command, "POSTROUTING", "-m", "comment", "--comment", natJumpComment(testChain)},
			"-m", "addrtype", "!", "--dst-type", "LOCAL", "-j", testChain)
	}
	return map[string]func(n *node, iptables string){
		"flushed chain": func(n *node, iptables string) { n.run(iptables, "-t", "nat", "-F", testChain) },
		"removed jump":  func(n *node, iptables string) { n.run(iptables, jump("-D")...) },
		"removed chain": func(n *node, iptables string) {
			n.run(iptables, jump("-D")...)
			n.run(iptables, "-t", "nat", "-F", testChain)
			n.run(iptables, "-t", "nat", "-X", testChain)
		},
		"duplicated jump": func(n *node, iptables string) {
			n.run(iptables, jump("-A")...)
			n.run(iptables, jump("-I")...)
		},
		"foreign rule first": func(n *node, iptables string) {
			n.run(iptables, "-t", "nat", "-I", testChain, "-s", "10.0.0.1", "-j", "ACCEPT")
		},
		"foreign rule last": func(n *node, iptables string) {
			n.run(iptables, "-t", "nat", "-A", testChain, "-j", "ACCEPT")
		},
		"missing rule": func(n *node, iptables string) { n.run(iptables, "-t", "nat", "-D", testChain, "2") },
		"changed order": func(n *node, iptables string) {
			n.run(iptables, "-t", "nat", "-D", testChain, "2")
			n.run(iptables, "-t", "nat", "-A", testChain, "-d", "10.0.0.0/8", "-m", "comment", "--comment", keepComment, "-j", "RETURN")
		},
		"everything flushed": func(n *node, iptables string) {
			n.run(iptables, "-t", "nat", "-F")
			n.run(iptables, "-t", "nat", "-X")
		},
	}
}

func TestSyncRepairs(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, m mode) {
		iptables := "iptables-" + string(m)
		d := n.datapath(n.options())
		n.sync(d, defaultPolicy())
		want := n.save(m, ipv4, tableNAT)
		repairs := uint64(0)
		for name, damage := range damages() {
			t.Run(name, func(t *testing.T) {
				damage(n, iptables)
				if n.save(m, ipv4, tableNAT) == want {
					t.Fatal("nothing is damaged")
				}
				n.sync(d, defaultPolicy())
				if diff := cmp.Diff(want, n.save(m, ipv4, tableNAT)); diff != "" {
					t.Errorf("-want +got:\n%s", diff)
				}
				repairs++
				if got := n.stats(d).Repairs; got != repairs {
					t.Errorf("%d repairs, want %d", got, repairs)
				}
			})
		}
	})
}

// TestJumpStaysWhereItIs among the rules of others, which are left alone.
func TestJumpStaysWhereItIs(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, m mode) {
		iptables := "iptables-" + string(m)
		n.run(iptables, "-t", "nat", "-A", "POSTROUTING", "-s", "192.0.2.1", "-j", "ACCEPT")
		d := n.datapath(n.options())
		n.sync(d, defaultPolicy())
		n.run(iptables, "-t", "nat", "-A", "POSTROUTING", "-s", "192.0.2.2", "-j", "ACCEPT")
		want := n.save(m, ipv4, tableNAT)
		damages()["duplicated jump"](n, iptables)
		n.run(iptables, "-t", "nat", "-D", "POSTROUTING", "1") // the one on top: the old place is the first again
		n.sync(d, defaultPolicy())
		if diff := cmp.Diff(want, n.save(m, ipv4, tableNAT)); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	})
}

// TestRulesThatIptablesCannotShow: nodes have NAT rules that were written with
// nft into the same chains.
func TestRulesThatIptablesCannotShow(t *testing.T) {
	for name, script := range map[string]string{
		"elsewhere":           "add chain ip nat foo; add rule ip nat foo ip daddr { 10.0.0.1, 10.0.0.2 } masquerade",
		"in POSTROUTING":      "add rule ip nat POSTROUTING oifname \"eth9\" masquerade",
		"in our chain":        "add rule ip nat IP-MASQ-AGENT oifname \"eth9\" masquerade",
		"both kinds of jumps": "",
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			options := n.options()
			d := n.datapath(options)
			n.sync(d, defaultPolicy())
			if script == "" {
				n.run("iptables-nft", "-t", "nat", "-A", "POSTROUTING", "-m", "comment", "--comment", `"`+natJumpComment(testChain)+`"`,
					"-m", "addrtype", "!", "--dst-type", "LOCAL", "-j", testChain)
				script = "add rule ip nat POSTROUTING oifname \"eth9\" masquerade"
			}
			if err := n.ns.NFT(script); err != nil {
				t.Fatal(err)
			}
			for range 3 {
				n.sync(d, defaultPolicy())
			}
			ruleset := n.run("nft", "list", "table", "ip", "nat")
			if got := countLines(ruleset, "jump "+testChain); got != 1 {
				t.Errorf("%d jumps, want 1:\n%s", got, ruleset)
			}
			if name == "in our chain" {
				compareIfThere(t, "default.v4.save", n.save(nft, ipv4, tableNAT))
			} else if !strings.Contains(ruleset, "masquerade\n") {
				t.Errorf("the other's rule is gone:\n%s", ruleset)
			}
			n.cleanup(options)
			if ruleset = n.run("nft", "list", "table", "ip", "nat"); strings.Contains(ruleset, testChain) {
				t.Errorf("cleanup left\n%s", ruleset)
			}
		})
	}
}

// TestNoHalfFilledChain looks at the chain while it is rewritten.
func TestNoHalfFilledChain(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, m mode) {
		few, many := manyCIDRs(3), manyCIDRs(300)
		d := n.datapath(n.options())
		n.sync(d, few)
		stop, done := make(chan struct{}), make(chan error)
		go func() {
			done <- n.ns.Do(func() error {
				for {
					select {
					case <-stop:
						return nil
					default:
					}
					table, err := n.tool(m, ipv4).listTable(t.Context(), tableNAT)
					if err != nil {
						return err
					}
					rules := len(table[testChain].rules)
					if len(table[postrouting].rules) != 1 || rules != 4+1 && rules != 301+1 {
						return fmt.Errorf("%d jumps, %d rules", len(table[postrouting].rules), rules)
					}
				}
			})
		}()
		for range 10 {
			n.sync(d, many)
			n.sync(d, few)
		}
		close(stop)
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// manyCIDRs is a policy of link-local and n prefixes.
func manyCIDRs(n int) *prefix.Policy {
	lists := prefix.Lists{LinkLocal: linkLocal()}
	for i := range n {
		a := netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0})
		lists.NonMasquerade = append(lists.NonMasquerade, netip.PrefixFrom(a, 24))
	}
	return prefix.New(lists)
}

func TestTenThousandCIDRs(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, m mode) {
		restores := countRestores(t, m)
		d := n.datapath(n.options())
		for range 2 {
			started := time.Now()
			n.sync(d, manyCIDRs(10_000))
			t.Logf("sync took %v", time.Since(started))
		}
		if restores() != 2 {
			t.Errorf("%d transactions, want 2", restores())
		}
		if got := countLines(n.save(m, ipv4, tableNAT), "-j RETURN"); got != 10_001 {
			t.Errorf("%d exempt destinations, want 10001", got)
		}
	})
}

func TestPlanIsWhatSyncBringsAbout(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, m mode) {
		options := n.options()
		options.DropInvalid = true
		d := n.datapath(options)
		plan, err := d.Plan(defaultPolicy(), uplinks("eth0"))
		if err != nil {
			t.Fatal(err)
		}
		golden(t, "plan_"+string(m)+".txt", plan)
		if got := n.save(m, ipv4, tableNAT); strings.Contains(got, testChain) {
			t.Errorf("planning wrote\n%s", got)
		}
		for _, part := range strings.SplitAfter(plan, "COMMIT\n")[:4] {
			f := ipv4
			if strings.Contains(part, "fe80") {
				f = ipv6
			}
			n.restore(m, f, part)
		}
		restores := countRestores(t, m)
		n.sync(d, defaultPolicy())
		if restores() != 0 {
			t.Errorf("sync found %d differences to the plan", restores())
		}
	})
}
