// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/lab"
)

// cidrs are the prefixes that a trie holds, with their verdict.
func (n *node) cidrs(is6 bool) map[string]string {
	n.t.Helper()
	f := n.d.families[0]
	if is6 {
		f = n.d.families[1]
	}
	found := make(map[string]string)
	err := eachCIDR(f, f.nonmasq, func(p netip.Prefix, verdict bpf.MasqCidrVerdict) {
		found[p.String()] = map[bpf.MasqCidrVerdict]string{
			bpf.MasqCidrVerdictCIDR_KEEP: "keep", bpf.MasqCidrVerdictCIDR_MASQUERADE: "masquerade",
		}[verdict]
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return found
}

// draining are the prefixes that were exempt until recently.
func (n *node) draining() map[string]bool {
	n.t.Helper()
	found := make(map[string]bool)
	for _, f := range n.d.families {
		if err := eachCIDR(f, f.draining, func(p netip.Prefix, _ uint64) { found[p.String()] = true }); err != nil {
			n.t.Fatal(err)
		}
	}
	return found
}

func wantCIDRs(t *testing.T, got, want any) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// The tries hold exactly what is configured, whoever wrote there in between.
func TestCIDRsAreRepaired(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{}, testOptions(t))
	n.policy = testPolicy("10.0.0.0/8", "!10.99.0.0/16", "fd00::/8", "172.16.0.0/12")
	n.sync()
	want4 := map[string]string{"10.0.0.0/8": "keep", "10.99.0.0/16": "masquerade", "172.16.0.0/12": "keep", "169.254.0.0/16": "keep"}
	want6 := map[string]string{"fd00::/8": "keep", "fe80::/10": "keep"}
	wantCIDRs(t, n.cidrs(false), want4)
	wantCIDRs(t, n.cidrs(true), want6)

	pinned := func(name string) *ebpf.Map {
		t.Helper()
		var m *ebpf.Map
		n.do(func() (err error) {
			m, err = ebpf.LoadPinnedMap(testPinPath+"/"+name, nil)
			return err
		})
		t.Cleanup(func() { m.Close() })
		return m
	}
	v4, v6 := pinned(bpf.MasqMapNonmasqV4), pinned(bpf.MasqMapNonmasqV6)
	for _, change := range []struct {
		name string
		do   func() error
	}{
		{"foreign prefixes", func() error {
			key := cidrKey(netip.MustParsePrefix("2000::/3"))
			if err := v6.Put(key, bpf.MasqCidrVerdictCIDR_KEEP); err != nil {
				return err
			}
			return v4.Put(cidrKey(netip.MustParsePrefix("0.0.0.0/0")), bpf.MasqCidrVerdictCIDR_KEEP)
		}},
		{"lost prefixes", func() error { return v4.Delete(cidrKey(netip.MustParsePrefix("10.0.0.0/8"))) }},
		{"another verdict", func() error {
			return v4.Put(cidrKey(netip.MustParsePrefix("10.99.0.0/16")), bpf.MasqCidrVerdictCIDR_KEEP)
		}},
	} {
		if err := change.do(); err != nil {
			t.Fatalf("%s: %v", change.name, err)
		}
		n.sync()
		wantCIDRs(t, n.cidrs(false), want4)
		wantCIDRs(t, n.cidrs(true), want6)
	}
	n.translates("tcp", false)
}

// Who was exempt when the connection began goes on with its address, and who was
// not goes on with the node's.
func TestCIDRsOfOpenConnections(t *testing.T) {
	for _, conntrack := range []bool{true, false} {
		t.Run(fmt.Sprintf("conntrack %t", conntrack), func(t *testing.T) {
			t.Parallel()
			n := newNode(t, lab.Options{Conntrack: conntrack}, testOptions(t))
			var open []*lab.Conn
			for _, remote := range []netip.Addr{n.Remote.V4, n.Inside.V4, n.Exception.V4, n.Remote.V6, n.Inside.V6} {
				open = append(open, n.dial("tcp", n.serve("tcp", remote)))
			}
			for _, policy := range [][]string{
				{"8.0.0.0/8", "2001:4860::/32"},             // the other way round
				{"10.0.0.0/8", "!10.99.0.0/16", "fd00::/8"}, // an exception
				{},
			} {
				n.policy = testPolicy(policy...)
				n.sync()
				for _, c := range open {
					n.goesOn(c)
				}
			}
			for _, remote := range []netip.Addr{n.Inside.V4, n.Exception.V4} {
				if conn := n.dial("tcp", n.serve("tcp", remote)); conn.Seen.Addr() != n.Addresses.Node.V4 {
					t.Errorf("a new connection to %s: seen from %s", remote, conn.Seen)
				}
			}
		})
	}
}

func TestDraining(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{}, testOptions(t))
	if got := n.draining(); len(got) > 0 {
		t.Errorf("drains from the start: %v", got)
	}
	n.policy = testPolicy("10.0.0.0/8", "!10.99.0.0/16", "!11.0.0.0/16")
	n.sync()
	wantCIDRs(t, n.draining(), map[string]bool{"fd00::/8": true, "10.99.0.0/16": true})
	n.policy = testPolicy("fd00::/8")
	n.sync()
	wantCIDRs(t, n.draining(), map[string]bool{"10.0.0.0/8": true, "10.99.0.0/16": true}) // fd00::/8 is exempt again

	// A day later.
	f := n.d.families[0]
	if err := f.draining.Put(cidrKey(netip.MustParsePrefix("10.0.0.0/8")), monotonic()-1); err != nil {
		t.Fatal(err)
	}
	n.sync()
	wantCIDRs(t, n.draining(), map[string]bool{"10.99.0.0/16": true})
}

// cidrKey is a prefix as a key of the tries.
func cidrKey(p netip.Prefix) any {
	if p.Addr().Is4() {
		return cidr4(p)
	}
	return cidr6(p)
}
