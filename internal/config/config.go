// SPDX-License-Identifier: Apache-2.0

// Package config reads, checks and watches the configuration: YAML or JSON, in
// one file or in the files of a directory, decoded over the defaults. It takes
// what the classic ip-masq-agent takes; docs/parity.md lists where it differs
// on purpose.
package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"gopkg.in/yaml.v3"

	"ip-masq-agent/internal/prefix"
)

// Config is what the configuration says, complete with defaults. The lists are
// in the user's order.
type Config struct {
	NonMasqueradeCIDRs []netip.Prefix // destinations that keep the source; duplicates kept
	MasqueradeCIDRs    []netip.Prefix // exceptions inside them
	CIDRLimit          int            // how many prefixes both lists may hold together
	MasqLinkLocal      bool           // masquerade towards 169.254.0.0/16 too
	MasqLinkLocalIPv6  bool           // masquerade towards fe80::/10 too
	ResyncInterval     time.Duration  // at least a second
}

// Options say where the configuration is and what it is decoded over.
type Options struct {
	Path              string // a file, or a directory whose files named ip-masq* are merged
	AllReservedRanges bool   // the default list has all reserved IPv4 ranges, not only the private ones
	EnableIPv6        bool   // IPv6 prefixes are allowed
}

// Result is a configuration that may be applied.
type Result struct {
	Config   Config
	Warnings []Fault // what is not wrong enough to refuse it
	Present  bool    // false: there is no file, so these are the defaults
}

// Defaults is the configuration where the user says nothing.
func Defaults(o Options) Config {
	ranges := privateRanges()
	if o.AllReservedRanges {
		ranges = append(ranges, otherReservedRanges()...)
	}
	return Config{
		NonMasqueradeCIDRs: ranges,
		CIDRLimit:          64,
		ResyncInterval:     time.Minute,
	}
}

// privateRanges are those of RFC 1918.
func privateRanges() []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix("10.0.0.0/8"),
		netip.MustParsePrefix("172.16.0.0/12"),
		netip.MustParsePrefix("192.168.0.0/16"),
	}
}

func otherReservedRanges() []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix("100.64.0.0/10"),   // RFC 6598, shared address space
		netip.MustParsePrefix("192.0.0.0/24"),    // RFC 6890, IETF protocol assignments
		netip.MustParsePrefix("192.0.2.0/24"),    // RFC 5737, TEST-NET-1
		netip.MustParsePrefix("192.88.99.0/24"),  // RFC 7526, 6to4 relays
		netip.MustParsePrefix("198.18.0.0/15"),   // RFC 6815, benchmarking
		netip.MustParsePrefix("198.51.100.0/24"), // RFC 5737, TEST-NET-2
		netip.MustParsePrefix("203.0.113.0/24"),  // RFC 5737, TEST-NET-3
		netip.MustParsePrefix("240.0.0.0/4"),     // RFC 1112, former class E
	}
}

// Policy is what c decides about destinations. Without IPv6 it holds no IPv6
// prefix at all.
func (c Config) Policy(enableIPv6 bool) *prefix.Policy {
	lists := prefix.Lists{
		NonMasquerade: slices.Clone(c.NonMasqueradeCIDRs),
		Masquerade:    slices.Clone(c.MasqueradeCIDRs),
	}
	if !c.MasqLinkLocal {
		lists.LinkLocal = append(lists.LinkLocal, netip.MustParsePrefix("169.254.0.0/16")) // RFC 3927
	}
	if enableIPv6 && !c.MasqLinkLocalIPv6 {
		lists.LinkLocal = append(lists.LinkLocal, netip.MustParsePrefix("fe80::/10")) // RFC 4291
	}
	if !enableIPv6 {
		lists.NonMasquerade = slices.DeleteFunc(lists.NonMasquerade, isIPv6)
		lists.Masquerade = slices.DeleteFunc(lists.Masquerade, isIPv6)
	}
	return prefix.New(lists)
}

func isIPv6(p netip.Prefix) bool { return p.Addr().Is6() }

// fileForm is a Config as a file has it.
type fileForm struct {
	NonMasqueradeCIDRs []netip.Prefix `json:"nonMasqueradeCIDRs" yaml:"nonMasqueradeCIDRs"`
	MasqueradeCIDRs    []netip.Prefix `json:"masqueradeCIDRs"    yaml:"masqueradeCIDRs"`
	CIDRLimit          int            `json:"cidrLimit"          yaml:"cidrLimit"`
	MasqLinkLocal      bool           `json:"masqLinkLocal"      yaml:"masqLinkLocal"`
	MasqLinkLocalIPv6  bool           `json:"masqLinkLocalIPv6"  yaml:"masqLinkLocalIPv6"`
	ResyncInterval     string         `json:"resyncInterval"     yaml:"resyncInterval"`
}

func (c Config) fileForm() fileForm {
	return fileForm{
		NonMasqueradeCIDRs: append([]netip.Prefix{}, c.NonMasqueradeCIDRs...), // [] rather than null
		MasqueradeCIDRs:    append([]netip.Prefix{}, c.MasqueradeCIDRs...),
		CIDRLimit:          c.CIDRLimit,
		MasqLinkLocal:      c.MasqLinkLocal,
		MasqLinkLocalIPv6:  c.MasqLinkLocalIPv6,
		ResyncInterval:     c.ResyncInterval.String(),
	}
}

// MarshalJSON gives c as a config file in JSON: Load reads it back to c.
func (c Config) MarshalJSON() ([]byte, error) { return json.Marshal(c.fileForm()) }

// YAML gives c as a config file in YAML: Load reads it back to c.
func (c Config) YAML() ([]byte, error) {
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := enc.Encode(c.fileForm()); err != nil {
		return nil, fmt.Errorf("encode config: %w", err)
	}
	return out.Bytes(), nil
}
