// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// oneRule is a rule of somebody else.
func oneRule(n *node, m mode) {
	n.run("iptables-"+string(m), "-A", "INPUT", "-s", "192.0.2.1", "-j", "ACCEPT")
}

func TestBackend(t *testing.T) {
	hint := func(n *node, program, chain string) { n.run(program, "-t", "mangle", "-N", chain) }
	tests := []struct {
		name   string
		before func(n *node)
		want   mode
		reason string
	}{
		{"nothing there", func(*node) {}, nft, "neither"},
		{"hint in nft", func(n *node) { hint(n, "iptables-nft", "KUBE-IPTABLES-HINT") }, nft, "KUBE-IPTABLES-HINT"},
		{"hint in legacy", func(n *node) { hint(n, "iptables-legacy", "KUBE-IPTABLES-HINT") }, legacy, "KUBE-IPTABLES-HINT"},
		{"canary in legacy", func(n *node) { hint(n, "iptables-legacy", "KUBE-KUBELET-CANARY") }, legacy, "KUBE-KUBELET-CANARY"},
		{"hint for IPv6 only", func(n *node) { hint(n, "ip6tables-legacy", "KUBE-IPTABLES-HINT") }, legacy, "KUBE-IPTABLES-HINT"},
		{"hint in both", func(n *node) {
			hint(n, "iptables-legacy", "KUBE-IPTABLES-HINT")
			hint(n, "iptables-nft", "KUBE-KUBELET-CANARY")
		}, nft, "KUBE-KUBELET-CANARY"},
		{"hint against use", func(n *node) {
			hint(n, "iptables-legacy", "KUBE-IPTABLES-HINT")
			oneRule(n, nft)
		}, legacy, "KUBE-IPTABLES-HINT"},
		{"nft in use", func(n *node) { oneRule(n, nft) }, nft, "those of legacy hold none"},
		{"legacy in use", func(n *node) { oneRule(n, legacy) }, legacy, "those of nft hold none"},
		{"legacy registered, but empty", func(n *node) { n.run("iptables-legacy", "-t", "nat", "-S") }, nft, "neither"},
		{"both in use", func(n *node) { oneRule(n, nft); oneRule(n, legacy) }, nft, "both"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := newNode(t)
			tt.before(n)
			d := n.datapath(n.options())
			status, err := d.Status()
			if err != nil {
				t.Fatal(err)
			}
			if status.Backend.Name != string(tt.want) || !strings.Contains(status.Backend.Reason, tt.reason) {
				t.Errorf("got %+v, want %s because of %q", status.Backend, tt.want, tt.reason)
			}
			n.sync(d, defaultPolicy())
			if got := n.save(tt.want, ipv4, tableNAT); !strings.Contains(got, "-j "+testChain) {
				t.Errorf("not in %s:\n%s", tt.want, got)
			}
			before := d.mode
			n.sync(d, defaultPolicy())
			if d.mode != before {
				t.Error("the choice changed")
			}
		})
	}
}

// TestLookingRegistersNoLegacyTable: a registered table costs every packet, and
// makes others believe that legacy is in use.
func TestLookingRegistersNoLegacyTable(t *testing.T) {
	n := newNode(t)
	options := n.options()
	options.DropInvalid = true
	n.do(func() error {
		_, err := Inspect(t.Context(), options)
		return err
	})
	if got := n.run("nft", "list", "ruleset"); got != "" {
		t.Errorf("inspecting made\n%s", got)
	}
	d := n.datapath(options)
	if _, err := d.Plan(defaultPolicy(), uplinks("eth0")); err != nil {
		t.Fatal(err)
	}
	if got := n.run("nft", "list", "ruleset"); got != "" {
		t.Errorf("choosing and planning made\n%s", got)
	}
	n.sync(d, defaultPolicy())
	n.stats(d)
	n.cleanup(options)
	for _, file := range []string{"ip_tables_names", "ip6_tables_names"} {
		if got := n.run("cat", "/proc/net/"+file); got != "" {
			t.Errorf("%s: %q", file, got)
		}
	}
}

// TestLegacyRegistersOnlyWhatItNeeds holds where legacy is chosen, too.
func TestLegacyRegistersOnlyWhatItNeeds(t *testing.T) {
	n := newNode(t)
	oneRule(n, legacy)
	options := n.options()
	options.IPv6 = false
	d := n.datapath(options)
	n.stats(d)
	n.sync(d, defaultPolicy())
	n.stats(d)
	n.cleanup(options)
	if got := n.run("cat", "/proc/net/ip_tables_names"); strings.Contains(got, "mangle") {
		t.Errorf("registered: %q", got)
	}
	if got := n.run("cat", "/proc/net/ip6_tables_names"); got != "" {
		t.Errorf("registered for IPv6: %q", got)
	}
}

// onlyPrograms leaves nothing in PATH but links to the named programs.
func onlyPrograms(t *testing.T, names ...string) {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		if err := os.Symlink(filepath.Join("/usr/sbin", name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
}

func programsOf(m mode) []string {
	var all []string
	for _, f := range families() {
		for _, suffix := range []string{"", "-restore", "-save"} {
			all = append(all, tool{mode: m, family: f}.program(suffix))
		}
	}
	return all
}

func TestMissingPrograms(t *testing.T) {
	t.Run("all", func(t *testing.T) {
		n := newNode(t)
		onlyPrograms(t)
		err := n.ns.Do(func() error {
			_, err := New(n.options())
			return err
		})
		if err == nil || !strings.Contains(err.Error(), "iptables-nft is not in PATH: install iptables") {
			t.Errorf("got %v", err)
		}
	})
	for _, m := range []mode{nft, legacy} {
		t.Run("all but those of "+string(m), func(t *testing.T) {
			n := newNode(t)
			onlyPrograms(t, programsOf(m)...)
			d := n.datapath(n.options())
			n.sync(d, defaultPolicy())
			if d.mode != m {
				t.Errorf("chose %s", d.mode)
			}
		})
	}
	t.Run("those in use disappear", func(t *testing.T) {
		n := newNode(t)
		d := n.datapath(n.options())
		n.sync(d, defaultPolicy())
		onlyPrograms(t, programsOf(legacy)...)
		n.sync(d, defaultPolicy())
		if d.mode != legacy {
			t.Errorf("still %s", d.mode)
		}
	})
	t.Run("the kernel loses nft", func(t *testing.T) {
		n := newNode(t)
		d := n.datapath(n.options())
		n.sync(d, defaultPolicy())
		fakeProgram(t, "iptables-nft", "echo 'Failed to initialize nft: Protocol not supported' >&2; exit 1")
		n.sync(d, defaultPolicy())
		if status, _ := d.Status(); status.Backend.Name != "legacy" || !strings.Contains(status.Backend.Reason, "Protocol not supported") {
			t.Errorf("got %+v", status.Backend)
		}
		if got := n.save(nft, ipv6, tableNAT); strings.Contains(got, testChain) {
			t.Errorf("what can be removed from nft stays:\n%s", got)
		}
	})
}

// TestOneFamilyIsMissing: a kernel without IPv6 must not cost IPv4 its rules.
func TestOneFamilyIsMissing(t *testing.T) {
	for broken, text := range map[family]string{
		ipv4: "Permission denied (you must be root)",
		ipv6: "can't initialize table nat: Address family not supported by protocol",
	} {
		t.Run(broken.String(), func(t *testing.T) {
			n := newNode(t)
			d := n.datapath(n.options())
			fakeProgram(t, n.tool(nft, broken).program(""), "echo \""+text+"\" >&2; exit 3")
			err := n.trySync(d, defaultPolicy())
			if err == nil || !strings.Contains(err.Error(), "sync "+broken.String()+" rules: ") || !strings.Contains(err.Error(), text) {
				t.Errorf("got %v", err)
			}
			whole := ipv4
			if broken == ipv4 {
				whole = ipv6
			}
			if err != nil && strings.Contains(err.Error(), "sync "+whole.String()) {
				t.Errorf("got %v", err)
			}
			if got := n.save(nft, whole, tableNAT); countLines(got, testChain) == 0 {
				t.Errorf("%s is not served:\n%s", whole, got)
			}
		})
	}
}
