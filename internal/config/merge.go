// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/netip"
	"time"
)

// setting is what files say for a key that takes one value.
type setting[T comparable] struct {
	place
	value T
	set   bool
}

// cidr is an entry of a list. One at fault has no valid prefix; it stays so
// that what is counted is what the user wrote.
type cidr struct {
	place
	prefix netip.Prefix
}

// cidrs is what files say for a key that takes a list.
type cidrs struct {
	place
	list []cidr
	set  bool
}

func (c cidrs) prefixes() []netip.Prefix {
	var list []netip.Prefix
	for _, entry := range c.list {
		list = append(list, entry.prefix)
	}
	return list
}

// settings is what files say. A key that they lack is not set.
type settings struct {
	nonMasquerade, masquerade        cidrs
	limit                            setting[int]
	masqLinkLocal, masqLinkLocalIPv6 setting[bool]
	resyncInterval                   setting[time.Duration]
}

// mergeAll makes one of what several files say: lists are united without
// duplicates, booleans are OR-ed, and other values must agree. What a single
// file says stays as it is.
func mergeAll(files []settings, r *report) settings {
	if len(files) == 1 {
		return files[0]
	}
	var merged settings
	for _, s := range files {
		merged.nonMasquerade.unite(s.nonMasquerade)
		merged.masquerade.unite(s.masquerade)
		or(&merged.masqLinkLocal, s.masqLinkLocal)
		or(&merged.masqLinkLocalIPv6, s.masqLinkLocalIPv6)
		agree(&merged.limit, s.limit, keyLimit, r)
		agree(&merged.resyncInterval, s.resyncInterval, keyResyncInterval, r)
	}
	return merged
}

func (c *cidrs) unite(o cidrs) {
	if !o.set {
		return
	}
	if !c.set {
		c.place, c.set = o.place, true
	}
	have := make(map[netip.Prefix]bool, len(c.list))
	for _, entry := range c.list {
		have[entry.prefix] = true
	}
	for _, entry := range o.list {
		if !have[entry.prefix] || !entry.prefix.IsValid() {
			c.list = append(c.list, entry)
		}
		have[entry.prefix] = true
	}
}

func or(s *setting[bool], o setting[bool]) {
	if o.set && (!s.set || !s.value) {
		*s = o
	}
}

func agree[T comparable](s *setting[T], o setting[T], key string, r *report) {
	switch {
	case !o.set:
	case !s.set:
		*s = o
	case s.value != o.value:
		r.fault(o.place, key, "", "%v here, but %v at %s", o.value, s.value, s.place)
	}
}
