// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"net/netip"
	"testing"

	"ip-masq-agent/internal/lab"
)

// Where the programs cannot ask conntrack, as before Linux 5.18, the outside
// tuples of what netfilter translates are noted, so that no pod gets one.
func TestTuplesOfNetfilterAreReserved(t *testing.T) {
	t.Parallel()
	opts := testOptions(t)
	opts.RandomFully = false
	n := &node{
		Lab: lab.New(t, lab.Options{Pods: 2, RoutedPods: -1, Conntrack: true}),
		t:   t, policy: testPolicy("10.0.0.0/8", "fd00::/8"),
	}
	t.Cleanup(n.stop)
	n.run("nft", "add table inet old")
	n.run("nft", "add chain inet old post { type nat hook postrouting priority 100; }")
	n.run("nft", "add rule inet old post masquerade")
	remotes := map[netip.AddrPort]string{}
	for _, network := range []string{"tcp", "udp"} {
		for _, is6 := range []bool{false, true} {
			remotes[n.serve(network, n.Remote.Addr(is6))] = network
		}
	}
	const port = 40000
	dial := func(pod int, remote netip.AddrPort) *lab.Conn {
		t.Helper()
		p := n.Pods[pod]
		conn, err := p.Dial(t.Context(), remotes[remote], netip.AddrPortFrom(p.Addr(remote.Addr().Is6()), port), remote)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	var old []*lab.Conn
	for remote := range remotes {
		conn := dial(0, remote)
		if conn.Seen.Port() != port || lab.IsPod(conn.Seen.Addr()) {
			t.Fatalf("%s: netfilter gave %s", remote, conn.Seen)
		}
		old = append(old, conn)
	}
	n.do(func() (err error) {
		n.d, err = New(opts)
		return err
	})
	n.d.features.CTLookup = false
	n.sync()
	n.run("nft", "flush chain inet old post")
	for _, before := range old {
		after := dial(1, before.Remote)
		if after.Seen == before.Seen || lab.IsPod(after.Seen.Addr()) {
			t.Errorf("%s sees %s, and the one before as %s", before.Remote, after.Seen, before.Seen)
		}
		n.goesOn(before)
		n.goesOn(after)
	}
}
