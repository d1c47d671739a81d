// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"cmp"
	"fmt"
	gomaps "maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/prefix"
)

// drainLimit is how long a flow may go on that began when its CIDR was exempt.
// conntrack could hold an idle one for five days; a day is enough for what is
// in use.
const drainLimit = 24 * time.Hour

// syncCIDRs makes the tries hold exactly the policy's prefixes.
func (d *Datapath) syncCIDRs(policy *prefix.Policy) error {
	for _, f := range d.families {
		if err := d.syncTrie(f, policy); err != nil {
			return fmt.Errorf("%s: %w", f, err)
		}
	}
	return nil
}

// syncTrie compares with what the trie has, whoever put it there, and changes
// it in place. An address that is exempt before and after is so throughout:
// additions come first, longest prefix first, then deletions, shortest first.
func (d *Datapath) syncTrie(f *family, policy *prefix.Policy) error {
	have := make(map[netip.Prefix]bpf.MasqCidrVerdict)
	err := eachCIDR(f, f.nonmasq, func(p netip.Prefix, verdict bpf.MasqCidrVerdict) { have[p] = verdict })
	if err != nil {
		return fmt.Errorf("read trie: %w", err)
	}
	entries := policy.Entries(f.is6)
	want := make(map[netip.Prefix]bpf.MasqCidrVerdict, len(entries))
	for _, e := range entries {
		want[e.Prefix] = cidrVerdict(e.Verdict)
	}
	if f.left.cidrs != nil && !gomaps.Equal(have, f.left.cidrs) {
		d.repaired(f.String() + " CIDRs")
	}
	same := gomaps.Equal(have, want)
	if !same || f.left.cidrs == nil { // or an agent may have died in the middle
		if err := f.sticky.unsettle(policy); err != nil {
			return err
		}
	}
	f.left.cidrs = nil // until all is written
	if same {
		f.left.cidrs = want
		return f.endDrained(nil)
	}
	if err := f.drain(have, want); err != nil {
		return err
	}
	added := longestFirst(want, func(p netip.Prefix) bool {
		old, ok := have[p]
		return !ok || old != want[p]
	})
	if err := putCIDRs(f, f.nonmasq, added, func(p netip.Prefix) bpf.MasqCidrVerdict { return want[p] }); err != nil {
		return fmt.Errorf("add %w", err)
	}
	removed := longestFirst(have, func(p netip.Prefix) bool {
		_, ok := want[p]
		return !ok
	})
	slices.Reverse(removed)
	if err := deleteCIDRs(f, f.nonmasq, removed); err != nil {
		return fmt.Errorf("remove %w", err)
	}
	f.left.cidrs = want
	d.log.Info("CIDRs changed", "family", f.String(), "added", len(added), "removed", len(removed), "total", len(want))
	return f.endDrained(want)
}

func cidrVerdict(v prefix.Verdict) bpf.MasqCidrVerdict {
	if v == prefix.Keep {
		return bpf.MasqCidrVerdictCIDR_KEEP
	}
	return bpf.MasqCidrVerdictCIDR_MASQUERADE
}

func longestFirst(prefixes map[netip.Prefix]bpf.MasqCidrVerdict, which func(netip.Prefix) bool) []netip.Prefix {
	var chosen []netip.Prefix
	for p := range prefixes {
		if which(p) {
			chosen = append(chosen, p)
		}
	}
	slices.SortFunc(chosen, func(a, b netip.Prefix) int {
		return cmp.Or(cmp.Compare(b.Bits(), a.Bits()), a.Addr().Compare(b.Addr()))
	})
	return chosen
}

// drain notes the prefixes that are exempt no longer, so that flows that are
// open keep their source: those that say keep no more, and those that now say
// masquerade inside of one that does.
func (f *family) drain(have, want map[netip.Prefix]bpf.MasqCidrVerdict) error {
	var leave []netip.Prefix
	for p, verdict := range have {
		if verdict == bpf.MasqCidrVerdictCIDR_KEEP && want[p] != bpf.MasqCidrVerdictCIDR_KEEP {
			leave = append(leave, p)
		}
	}
	for p, verdict := range want {
		if _, known := have[p]; !known && verdict == bpf.MasqCidrVerdictCIDR_MASQUERADE && keptInside(p, have) {
			leave = append(leave, p)
		}
	}
	until := monotonic() + uint64(drainLimit)
	if err := putCIDRs(f, f.draining, leave, func(netip.Prefix) uint64 { return until }); err != nil {
		return fmt.Errorf("drain %w", err)
	}
	return nil
}

// keptInside reports whether the longest prefix around p says keep.
func keptInside(p netip.Prefix, prefixes map[netip.Prefix]bpf.MasqCidrVerdict) bool {
	for bits := p.Bits() - 1; bits >= 0; bits-- {
		around := netip.PrefixFrom(p.Addr(), bits).Masked()
		if verdict, ok := prefixes[around]; ok {
			return verdict == bpf.MasqCidrVerdictCIDR_KEEP
		}
	}
	return false
}

// endDrained forgets draining prefixes whose time is over, or that are wholly
// exempt again by want.
func (f *family) endDrained(want map[netip.Prefix]bpf.MasqCidrVerdict) error {
	var over []netip.Prefix
	now, exceptions := monotonic(), withVerdict(want, bpf.MasqCidrVerdictCIDR_MASQUERADE)
	err := eachCIDR(f, f.draining, func(p netip.Prefix, until uint64) {
		if until <= now || want[p] == bpf.MasqCidrVerdictCIDR_KEEP && !holdsAny(p, exceptions) {
			over = append(over, p)
		}
	})
	if err != nil {
		return fmt.Errorf("read draining prefixes: %w", err)
	}
	if err := deleteCIDRs(f, f.draining, over); err != nil {
		return fmt.Errorf("end drain of %w", err)
	}
	return nil
}

// withVerdict are the prefixes with a verdict.
func withVerdict(prefixes map[netip.Prefix]bpf.MasqCidrVerdict, verdict bpf.MasqCidrVerdict) (with []netip.Prefix) {
	for p, v := range prefixes {
		if v == verdict {
			with = append(with, p)
		}
	}
	return with
}

// holdsAny reports whether one of others is a part of p.
func holdsAny(p netip.Prefix, others []netip.Prefix) bool {
	return slices.ContainsFunc(others, func(other netip.Prefix) bool {
		return p.Overlaps(other) && other.Bits() > p.Bits()
	})
}

// monotonic is the datapath's clock, bpf_ktime_get_ns(): nanoseconds.
func monotonic() uint64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0 // cannot happen: the clock exists and the pointer is good
	}
	return uint64(now.Nano())
}
