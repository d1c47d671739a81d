// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// parseCIDR gives the prefix, or what is wrong with it in the words of the
// classic agent. It parses as that does, with package net: netip.ParsePrefix
// refuses the length in 10.0.0.0/08.
func parseCIDR(s string) (p netip.Prefix, complaint string) {
	ip, network, err := net.ParseCIDR(s)
	if err != nil {
		return p, fmt.Sprintf("CIDR %q could not be parsed, %v", s, err)
	}
	if !ip.Equal(network.IP) {
		return p, fmt.Sprintf("CIDR %q is not aligned to a CIDR block, ip: %q network: %q", s, ip, network.String())
	}
	text, _, _ := strings.Cut(s, "/")
	addr, err := netip.ParseAddr(text)
	if err != nil { // not after ParseCIDR took it
		return p, fmt.Sprintf("CIDR %q could not be parsed, %v", s, err)
	}
	bits, _ := network.Mask.Size()
	if addr.Is4In6() {
		return p, fmt.Sprintf("CIDR %q is an IPv4-mapped IPv6 range, which no packet carries, write %s/%d", s, addr.Unmap(), bits-96)
	}
	return netip.PrefixFrom(addr, bits), ""
}

// apply puts what the files say over the defaults and checks what no single
// entry shows.
func apply(c Config, s settings, r *report) Config {
	if s.nonMasquerade.set {
		c.NonMasqueradeCIDRs = s.nonMasquerade.prefixes()
	}
	if s.masquerade.set {
		c.MasqueradeCIDRs = s.masquerade.prefixes()
	}
	if s.limit.set {
		c.CIDRLimit = s.limit.value
	}
	if s.masqLinkLocal.set {
		c.MasqLinkLocal = s.masqLinkLocal.value
	}
	if s.masqLinkLocalIPv6.set {
		c.MasqLinkLocalIPv6 = s.masqLinkLocalIPv6.value
	}
	if s.resyncInterval.set {
		c.ResyncInterval = s.resyncInterval.value
	}
	noticeEmpty(c, s, r)
	checkLimit(c, s, r)
	checkOverlap(c, s, r)
	return c
}

// noticeEmpty is for those who emptied the list in order to masquerade nothing.
func noticeEmpty(c Config, s settings, r *report) {
	if !s.nonMasquerade.set || len(s.nonMasquerade.list) > 0 {
		return
	}
	what := "every destination but link-local"
	if c.MasqLinkLocal {
		what = "every destination"
	}
	r.notice(s.nonMasquerade.place, keyNonMasquerade, "the list is empty: traffic to %s is masqueraded", what)
}

// checkLimit guards against really bad mistakes, as the classic agent puts it.
func checkLimit(c Config, s settings, r *report) {
	n := len(c.NonMasqueradeCIDRs) + len(c.MasqueradeCIDRs)
	if n <= c.CIDRLimit {
		return
	}
	at, key := s.limit.place, keyLimit // where only the defaults are over it
	if s.masquerade.set {
		at, key = s.masquerade.place, keyMasquerade
	}
	if s.nonMasquerade.set {
		at, key = s.nonMasquerade.place, keyNonMasquerade
	}
	r.fault(at, key, strconv.Itoa(n),
		"the daemon can only accept up to %d CIDRs (excluding link-local), but got %d CIDRs (excluding link local)", c.CIDRLimit, n)
}

// checkOverlap refuses a prefix that is in both lists, as nothing says which
// of them is meant.
func checkOverlap(c Config, s settings, r *report) {
	kept := make(map[netip.Prefix]string, len(c.NonMasqueradeCIDRs))
	for _, p := range c.NonMasqueradeCIDRs {
		kept[p] = "by default"
	}
	for _, entry := range s.nonMasquerade.list {
		kept[entry.prefix] = "at " + entry.String()
	}
	for _, entry := range s.masquerade.list {
		if where, ok := kept[entry.prefix]; ok && entry.prefix.IsValid() {
			r.fault(entry.place, keyMasquerade, entry.prefix.String(),
				"CIDR %q is in %s too, %s", entry.prefix, keyNonMasquerade, where)
		}
	}
}
