// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// everything is what both backends hold.
func (n *node) everything(tables ...string) string {
	n.tb.Helper()
	var all strings.Builder
	for _, m := range []mode{nft, legacy} {
		for _, f := range families() {
			for _, table := range tables {
				all.WriteString(n.save(m, f, table))
			}
		}
	}
	return all.String()
}

// TestCleanupRemovesAllOfOursAndNothingElse in both backends and families at
// once, whatever half of it is there.
func TestCleanupRemovesAllOfOursAndNothingElse(t *testing.T) {
	ruin := map[string]func(n *node){
		"nothing":  func(*node) {},
		"no jumps": func(n *node) { each(n, func(p string) { n.run(p, "-t", "nat", "-F", "POSTROUTING") }) },
		"empty chains": func(n *node) {
			each(n, func(p string) { n.run(p, "-t", "nat", "-F", testChain); n.run(p, "-t", "mangle", "-F", InvalidChain) })
		},
		"quoted jumps": func(n *node) {
			for _, m := range []mode{nft, legacy} {
				n.restore(m, ipv4, "*nat\n"+quotedJump(testChain)+"\nCOMMIT\n")
			}
		},
	}
	for name, do := range ruin {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			each(n, func(program string) {
				n.run(program, "-t", "nat", "-A", "OUTPUT", "-j", "ACCEPT")
				n.run(program, "-t", "nat", "-N", "OTHERS")
				n.run(program, "-t", "mangle", "-A", "POSTROUTING", "-j", "ACCEPT")
			})
			before := n.everything(tableNAT, tableMangle)
			options := n.options()
			options.DropInvalid = true
			for _, m := range []mode{nft, legacy} {
				d := n.datapath(options)
				d.mode, d.settled = m, true
				n.sync(d, defaultPolicy())
			}
			if got := n.everything(tableNAT, tableMangle); countLines(got, "-j "+testChain) != 4 || countLines(got, "-j "+InvalidChain) != 4 {
				t.Fatalf("not in place:\n%s", got)
			}
			do(n)
			for range 2 {
				n.cleanup(options)
				if diff := cmp.Diff(before, n.everything(tableNAT, tableMangle)); diff != "" {
					t.Errorf("-want +got:\n%s", diff)
				}
			}
		})
	}
}

// each runs f with the four programs.
func each(n *node, f func(program string)) {
	for _, m := range []mode{nft, legacy} {
		for _, v := range families() {
			f(n.tool(m, v).program(""))
		}
	}
}

func TestCleanupTakesTheGivenChain(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, m mode) {
		options := n.options()
		options.Chain = "OTHER-NAME"
		n.sync(n.datapath(options), defaultPolicy())
		n.cleanup(n.options())
		if got := n.save(m, ipv4, tableNAT); !strings.Contains(got, "OTHER-NAME") {
			t.Error("a chain of another name was removed")
		}
		n.cleanup(options)
		if got := n.save(m, ipv4, tableNAT); strings.Contains(got, "OTHER-NAME") {
			t.Errorf("left\n%s", got)
		}
	})
}

// TestCleanupSparesChainsOfOthers that a wrong --masq-chain names.
func TestCleanupSparesChainsOfOthers(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, m mode) {
		n.restore(m, ipv4, "*nat\n:KUBE-POSTROUTING - [0:0]\n-A KUBE-POSTROUTING -j RETURN\n-A POSTROUTING -j KUBE-POSTROUTING\nCOMMIT\n")
		before := n.save(m, ipv4, tableNAT)
		options := n.options()
		options.Chain = "KUBE-POSTROUTING"
		err := n.ns.Do(func() error { return Cleanup(t.Context(), options) })
		if err == nil || !strings.Contains(err.Error(), "holds no rule of ip-masq-agent") {
			t.Errorf("got %v", err)
		}
		if diff := cmp.Diff(before, n.save(m, ipv4, tableNAT)); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	})
}

func TestCleanupWithoutPrograms(t *testing.T) {
	n := newNode(t)
	onlyPrograms(t)
	err := n.ns.Do(func() error { return Cleanup(t.Context(), n.options()) })
	if err == nil || !strings.Contains(err.Error(), "install iptables") {
		t.Errorf("got %v", err)
	}
}

func TestInspect(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, m mode) {
		options := n.options()
		options.IPv6 = false
		inspect := func() Inspection {
			t.Helper()
			var found Inspection
			n.do(func() (err error) {
				found, err = Inspect(t.Context(), options)
				return err
			})
			if found.Backend.Name != string(m) || found.Backend.Reason == "" {
				t.Errorf("backend %+v", found.Backend)
			}
			return found
		}
		if found := inspect(); found.V4 || found.V6 {
			t.Errorf("on an empty node: %+v", found)
		}
		n.run("iptables-"+string(m), "-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE")
		n.sync(n.datapath(options), defaultPolicy())
		before := n.everything(tableNAT)
		found := inspect()
		want := []string{"ipv4: POSTROUTING translates by MASQUERADE before IP-MASQ-AGENT is asked: the list of CIDRs does not apply to what they match"}
		if diff := cmp.Diff(want, found.Warnings); diff != "" || !found.V4 || found.V6 {
			t.Errorf("got %+v (-want +got warnings):\n%s", found, diff)
		}
		if diff := cmp.Diff(before, n.everything(tableNAT)); diff != "" {
			t.Errorf("inspecting changed (-want +got):\n%s", diff)
		}
		n.run("iptables-"+string(m), "-t", "nat", "-F", testChain)
		if found := inspect(); found.V4 {
			t.Errorf("with an empty chain: %+v", found)
		}
	})
}

func TestStatusShowsUplinks(t *testing.T) {
	n := newNode(t)
	d := n.datapath(n.options())
	if status, _ := d.Status(); status.Interfaces != nil {
		t.Errorf("before the first sync: %+v", status.Interfaces)
	}
	n.sync(d, defaultPolicy())
	status, _ := d.Status()
	if len(status.Interfaces) != 1 {
		t.Fatalf("got %+v", status.Interfaces)
	}
	up := status.Interfaces[0]
	if up.Name != "eth0" || up.Attach != "" || up.SNATv4.String() != "192.0.2.1" || up.SNATv6.IsValid() {
		t.Errorf("got %+v", up)
	}
}
