// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"fmt"
	"net/netip"
	"time"

	"ip-masq-agent/internal/lab"
)

// reloadTimeout leaves room for a machine that is busy with other tests.
const reloadTimeout = 20 * time.Second

// changes of the config, with connections open. They come last, since what
// leaks to the toggled destinations is no leak.
func changes() []row {
	return []row{{name: "open connections keep what they have when the config changes", scenario: configChange}}
}

// sticky is a connection over a change of what translates.
type sticky struct {
	what  string
	conn  *lab.Conn
	seen  netip.AddrPort
	loose bool // best effort only
}

// configChange makes a masqueraded destination exempt and an exempt one
// masqueraded, and then back.
func configChange(b *bench, is6 bool) {
	start := usualSettings()
	exempted, masqueraded := b.lab.Remote3.Addr(is6), b.lab.Inside2.Addr(is6)
	node, pod := b.lab.Addresses.Node.Addr(is6), b.own(podB).Addr(is6)
	open := b.openSticky(tcp, exempted, masqueraded)
	open = append(open, b.openSticky(udp, exempted, masqueraded)...)

	changed := start
	changed.NonMasqueradeCIDRs = append(changed.NonMasqueradeCIDRs[:2:2], "fd00:10:244::/48", b.prefixOf(exempted))
	changed.MasqueradeCIDRs = append(changed.MasqueradeCIDRs, b.prefixOf(masqueraded))
	b.subject.configure(b.T, changed)
	b.awaitSource(exempted, pod)
	b.awaitSource(masqueraded, node)
	b.checkSticky(open)
	open = append(open, b.openSticky(tcp, exempted, masqueraded)...)

	b.subject.configure(b.T, start)
	b.awaitSource(exempted, node)
	b.awaitSource(masqueraded, pod)
	b.checkSticky(open)
}

func (b *bench) prefixOf(addr netip.Addr) string {
	return netip.PrefixFrom(addr, addr.BitLen()).String()
}

func (b *bench) openSticky(proto string, to ...netip.Addr) []*sticky {
	b.Helper()
	var all []*sticky
	for _, addr := range to {
		local := netip.AddrPortFrom(b.own(podA).Addr(addr.Is6()), b.freshPort())
		s := b.stick(podA, proto, local, netip.AddrPortFrom(addr, service))
		// Nothing knows of an untranslated datagram flow without conntrack.
		s.loose = proto == udp && !withConntrack(b.variant) && lab.IsPod(s.seen.Addr())
		all = append(all, s)
	}
	return all
}

// stick opens a connection to come back to.
func (b *bench) stick(from host, proto string, local, remote netip.AddrPort) *sticky {
	b.Helper()
	conn, err := b.namespace(from).Dial(b.Context(), proto, local, remote)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { conn.Close() })
	return &sticky{what: fmt.Sprintf("%s from %s to %s", proto, local, remote), conn: conn, seen: conn.Seen}
}

// checkSticky asks over connections that were there before: TCP shows by
// working at all that its source is still the same.
func (b *bench) checkSticky(open []*sticky) {
	b.Helper()
	for _, s := range open {
		seen, err := s.conn.Ask()
		switch {
		case err != nil:
			b.Errorf("%s, open before the change: %v; on the wire:\n%s", s.what, err, b.wireLog(s.conn.Remote.Addr()))
		case seen != s.seen && !s.loose:
			b.Errorf("%s, open before the change, comes from %s, before from %s", s.what, seen, s.seen)
		}
	}
}

// awaitSource waits until new flows to an address come from want.
func (b *bench) awaitSource(to, want netip.Addr) {
	b.Helper()
	var seen netip.AddrPort
	for deadline := time.Now().Add(lab.Patience(reloadTimeout)); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		local := netip.AddrPortFrom(b.own(podB).Addr(to.Is6()), b.freshPort())
		conn, err := b.namespace(podB).Dial(b.Context(), udp, local, netip.AddrPortFrom(to, service))
		if err != nil {
			b.Fatal(err)
		}
		conn.Close()
		if seen = conn.Seen; seen.Addr() == want {
			return
		}
	}
	b.Errorf("new flows to %s come from %s, want %s", to, seen, want)
}
