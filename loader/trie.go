// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"ip-masq-agent/bpf"
)

// Tries of prefixes are read and written in batches where the kernel has them
// for tries: two system calls for each of ten thousand prefixes take long.

func cidr4(p netip.Prefix) bpf.MasqCidrV4 {
	return bpf.MasqCidrV4{Prefixlen: uint32(p.Bits()), Addr: p.Addr().As4()}
}

func cidr6(p netip.Prefix) bpf.MasqCidrV6 {
	return bpf.MasqCidrV6{Prefixlen: uint32(p.Bits()), Addr: p.Addr().As16()}
}

// eachCIDR visits the entries of a trie of the family's prefixes.
func eachCIDR[V any](f *family, trie *ebpf.Map, visit func(netip.Prefix, V)) error {
	if f.is6 {
		return scanTrie(trie, func(k *bpf.MasqCidrV6, v *V) {
			visit(netip.PrefixFrom(netip.AddrFrom16(k.Addr), int(k.Prefixlen)), *v)
		})
	}
	return scanTrie(trie, func(k *bpf.MasqCidrV4, v *V) {
		visit(netip.PrefixFrom(netip.AddrFrom4(k.Addr), int(k.Prefixlen)), *v)
	})
}

// scanTrie visits all entries of a trie: in batches, or one by one.
func scanTrie[K, V any](m *ebpf.Map, visit func(*K, *V)) error {
	err := scan(m, visit)
	if !errors.Is(err, ebpf.ErrNotSupported) {
		return err
	}
	var key K
	var value V
	entries := m.Iterate()
	for entries.Next(&key, &value) {
		visit(&key, &value)
	}
	return entries.Err()
}

// putCIDRs puts prefixes into a trie of the family, in their order.
func putCIDRs[V any](f *family, trie *ebpf.Map, prefixes []netip.Prefix, value func(netip.Prefix) V) error {
	values := convert(prefixes, value)
	if f.is6 {
		return each(prefixes, func() (int, error) { return trie.BatchUpdate(convert(prefixes, cidr6), values, nil) },
			func(i int) error { return trie.Put(cidr6(prefixes[i]), values[i]) })
	}
	return each(prefixes, func() (int, error) { return trie.BatchUpdate(convert(prefixes, cidr4), values, nil) },
		func(i int) error { return trie.Put(cidr4(prefixes[i]), values[i]) })
}

// deleteCIDRs deletes prefixes from a trie of the family, in their order.
func deleteCIDRs(f *family, trie *ebpf.Map, prefixes []netip.Prefix) error {
	if f.is6 {
		return each(prefixes, func() (int, error) { return trie.BatchDelete(convert(prefixes, cidr6), nil) },
			func(i int) error { return trie.Delete(cidr6(prefixes[i])) })
	}
	return each(prefixes, func() (int, error) { return trie.BatchDelete(convert(prefixes, cidr4), nil) },
		func(i int) error { return trie.Delete(cidr4(prefixes[i])) })
}

// each does all at once, or one by one where the kernel cannot. The error names
// the prefix that could not be done.
func each(prefixes []netip.Prefix, all func() (int, error), one func(int) error) error {
	if len(prefixes) == 0 {
		return nil
	}
	n, err := all()
	if errors.Is(err, ebpf.ErrNotSupported) {
		for n, err = 0, nil; n < len(prefixes) && err == nil; n++ {
			err = one(n)
		}
		n--
	}
	if err != nil {
		return fmt.Errorf("%s: %w", prefixes[min(n, len(prefixes)-1)], err)
	}
	return nil
}

func convert[T any](prefixes []netip.Prefix, to func(netip.Prefix) T) []T {
	converted := make([]T, len(prefixes))
	for i, p := range prefixes {
		converted[i] = to(p)
	}
	return converted
}
