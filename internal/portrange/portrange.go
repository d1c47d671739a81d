// SPDX-License-Identifier: Apache-2.0

// Package portrange reads and holds lists of port ranges, as --to-ports and
// --node-port-range take them.
package portrange

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Range is the ports First to Last, both included. 1 <= First <= Last.
type Range struct {
	First, Last uint16
}

// Size is the number of ports in r.
func (r Range) Size() int { return int(r.Last) - int(r.First) + 1 }

// Contains reports whether port lies in r.
func (r Range) Contains(port uint16) bool { return r.First <= port && port <= r.Last }

// String is "A-B", or "A" for a single port.
func (r Range) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// Parse reads "A", "A-B" or a comma list of those, in the order given. Ports
// are 1 to 65535 and ranges may not overlap. Empty text is an empty list.
func Parse(text string) ([]Range, error) {
	if text == "" {
		return nil, nil
	}
	var ranges []Range
	for field := range strings.SplitSeq(text, ",") {
		r, err := parseOne(field)
		if err != nil {
			return nil, err
		}
		if i := slices.IndexFunc(ranges, func(o Range) bool { return o.First <= r.Last && r.First <= o.Last }); i >= 0 {
			return nil, fmt.Errorf("ranges %q and %q overlap", ranges[i], r)
		}
		ranges = append(ranges, r)
	}
	return ranges, nil
}

func parseOne(field string) (Range, error) {
	first, last, isRange := strings.Cut(field, "-")
	if !isRange {
		last = first
	}
	a, err := parsePort(field, first)
	if err != nil {
		return Range{}, err
	}
	b, err := parsePort(field, last)
	if err != nil {
		return Range{}, err
	}
	if a > b {
		return Range{}, fmt.Errorf("first is greater than last in %q", field)
	}
	return Range{First: a, Last: b}, nil
}

func parsePort(field, text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("invalid interval %q: %q is not a port from 1 to 65535", field, text)
	}
	return uint16(n), nil
}
