// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strconv"
	"time"
)

// interpreter finds out what a document sets.
type interpreter struct {
	file       string
	enableIPv6 bool
	*report
}

func (in *interpreter) settings(doc document) settings {
	var s settings
	for _, f := range doc.fields {
		switch f.key {
		case keyNonMasquerade:
			s.nonMasquerade = in.cidrs(f)
		case keyMasquerade:
			s.masquerade = in.cidrs(f)
		case keyLimit:
			s.limit = in.limit(f)
		case keyMasqLinkLocal:
			s.masqLinkLocal = in.boolean(f)
		case keyMasqLinkLocalIPv6:
			s.masqLinkLocalIPv6 = in.boolean(f)
		case keyResyncInterval:
			s.resyncInterval = in.interval(f)
		}
	}
	return s
}

func (in *interpreter) mismatch(f field, want string) {
	in.fault(place{in.file, f.value.line}, f.key, f.value.text, "%s", f.value.mismatch(want))
}

func (in *interpreter) boolean(f field) setting[bool] {
	switch f.value.kind {
	case boolean:
		return setting[bool]{place{in.file, f.line}, f.value.text == "true", true}
	case null:
	default:
		in.mismatch(f, "true or false")
	}
	return setting[bool]{}
}

func (in *interpreter) limit(f field) setting[int] {
	switch f.value.kind {
	case number:
		n, err := strconv.Atoi(f.value.text)
		if err == nil {
			return setting[int]{place{in.file, f.line}, n, true}
		}
		in.fault(place{in.file, f.value.line}, f.key, f.value.text, "want a whole number, got %s", f.value.text)
	case null:
	default:
		in.mismatch(f, "a whole number")
	}
	return setting[int]{}
}

// interval takes null for empty text, which is no duration.
func (in *interpreter) interval(f field) setting[time.Duration] {
	v := f.value
	at := place{in.file, v.line}
	if v.kind == null {
		v.text = ""
	} else if v.kind != text {
		in.mismatch(f, `a duration with a unit, such as "60s"`)
		return setting[time.Duration]{}
	}
	d, err := time.ParseDuration(v.text)
	if err != nil {
		in.fault(at, f.key, v.text, "%v", err)
	} else if d < time.Second {
		in.fault(at, f.key, v.text, "%s is under 1s", v.text)
	}
	return setting[time.Duration]{place{in.file, f.line}, d, err == nil}
}

// cidrs takes null for an empty list.
func (in *interpreter) cidrs(f field) cidrs {
	if f.value.kind != list && f.value.kind != null {
		in.mismatch(f, "a list of CIDRs")
		return cidrs{}
	}
	c := cidrs{place: place{in.file, f.line}, set: true}
	for _, item := range f.value.items {
		c.list = append(c.list, in.cidr(f.key, item))
	}
	return c
}

func (in *interpreter) cidr(key string, v value) cidr {
	at := place{in.file, v.line}
	if v.kind != text {
		in.fault(at, key, v.text, "%s", v.mismatch("a CIDR as a string"))
		return cidr{place: at}
	}
	p, complaint := parseCIDR(v.text)
	if complaint == "" && p.Addr().Is6() && !in.enableIPv6 {
		complaint = "ipv6 is not enabled, but ipv6 cidr " + v.text + " provided. Enable ipv6 using --enable-ipv6 agent flag"
	}
	if complaint != "" {
		in.fault(at, key, v.text, "%s", complaint)
		return cidr{place: at}
	}
	return cidr{place: at, prefix: p}
}
