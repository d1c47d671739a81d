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
		if err := d.syncTrie(f, policy.Entries(f.is6)); err != nil {
			return fmt.Errorf("%s: %w", f, err)
		}
	}
	return nil
}

// syncTrie compares with what the trie has, whoever put it there, and changes
// it in place. An address that is exempt before and after is so throughout:
// additions come first, longest prefix first, then deletions, shortest first.
func (d *Datapath) syncTrie(f *family, entries []prefix.Entry) error {
	have := make(map[netip.Prefix]bpf.MasqCidrVerdict)
	var verdict bpf.MasqCidrVerdict
	err := f.eachCIDR(f.nonmasq, &verdict, func(p netip.Prefix) { have[p] = verdict })
	if err != nil {
		return fmt.Errorf("read trie: %w", err)
	}
	want := make(map[netip.Prefix]bpf.MasqCidrVerdict, len(entries))
	for _, e := range entries {
		want[e.Prefix] = cidrVerdict(e.Verdict)
	}
	if f.left.cidrs != nil && !gomaps.Equal(have, f.left.cidrs) {
		d.repaired(f.String() + " CIDRs")
	}
	f.left.cidrs = nil // until all is written
	if gomaps.Equal(have, want) {
		f.left.cidrs = want
		return f.endDrained(nil)
	}
	if err := f.drain(have, want); err != nil {
		return err
	}
	added, removed := 0, 0
	for _, p := range longestFirst(want) {
		if old, ok := have[p]; ok && old == want[p] {
			continue
		}
		if err := f.nonmasq.Put(cidrKey(p), want[p]); err != nil {
			return fmt.Errorf("add %s: %w", p, err)
		}
		added++
	}
	for _, p := range slices.Backward(longestFirst(have)) {
		if _, ok := want[p]; ok {
			continue
		}
		if err := f.nonmasq.Delete(cidrKey(p)); err != nil {
			return fmt.Errorf("remove %s: %w", p, err)
		}
		removed++
	}
	f.left.cidrs = want
	d.log.Info("CIDRs changed", "family", f.String(), "added", added, "removed", removed, "total", len(want))
	return f.endDrained(want)
}

func cidrVerdict(v prefix.Verdict) bpf.MasqCidrVerdict {
	if v == prefix.Keep {
		return bpf.MasqCidrVerdictCIDR_KEEP
	}
	return bpf.MasqCidrVerdictCIDR_MASQUERADE
}

func longestFirst(prefixes map[netip.Prefix]bpf.MasqCidrVerdict) []netip.Prefix {
	return slices.SortedFunc(gomaps.Keys(prefixes), func(a, b netip.Prefix) int {
		return cmp.Or(cmp.Compare(b.Bits(), a.Bits()), a.Addr().Compare(b.Addr()))
	})
}

// drain notes the prefixes that are exempt no longer, so that flows that are
// open keep their source: those that say keep no more, and those that now say
// masquerade inside of one that does.
func (f *family) drain(have, want map[netip.Prefix]bpf.MasqCidrVerdict) error {
	until := monotonic() + uint64(drainLimit)
	leaves := func(p netip.Prefix) error {
		if err := f.draining.Put(cidrKey(p), until); err != nil {
			return fmt.Errorf("drain %s: %w", p, err)
		}
		return nil
	}
	for p, verdict := range have {
		if verdict == bpf.MasqCidrVerdictCIDR_KEEP && want[p] != bpf.MasqCidrVerdictCIDR_KEEP {
			if err := leaves(p); err != nil {
				return err
			}
		}
	}
	for p, verdict := range want {
		if _, known := have[p]; !known && verdict == bpf.MasqCidrVerdictCIDR_MASQUERADE && keptInside(p, have) {
			if err := leaves(p); err != nil {
				return err
			}
		}
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
	var until uint64
	now := monotonic()
	err := f.eachCIDR(f.draining, &until, func(p netip.Prefix) {
		if until <= now || keepsAll(want, p) {
			over = append(over, p)
		}
	})
	if err != nil {
		return fmt.Errorf("read draining prefixes: %w", err)
	}
	for _, p := range over {
		if err := f.draining.Delete(cidrKey(p)); err != nil {
			return fmt.Errorf("end drain of %s: %w", p, err)
		}
	}
	return nil
}

// keepsAll reports whether the prefixes have p as exempt, without exceptions in
// it.
func keepsAll(prefixes map[netip.Prefix]bpf.MasqCidrVerdict, p netip.Prefix) bool {
	if prefixes[p] != bpf.MasqCidrVerdictCIDR_KEEP {
		return false
	}
	for other, verdict := range prefixes {
		if verdict == bpf.MasqCidrVerdictCIDR_MASQUERADE && p.Overlaps(other) && other.Bits() > p.Bits() {
			return false
		}
	}
	return true
}

// monotonic is the datapath's clock, bpf_ktime_get_ns(): nanoseconds.
func monotonic() uint64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0 // cannot happen: the clock exists and the pointer is good
	}
	return uint64(now.Nano())
}
