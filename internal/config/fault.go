// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Fault is one thing that is wrong with the configuration, or only doubtful
// where it stands among the warnings.
type Fault struct { //nolint:errname // most of its uses are no error
	File  string
	Line  int    // from 1; 0 where the file as a whole is meant
	Key   string // as the documentation spells it; empty where no key is meant
	Value string // the value at fault; empty where the text is enough
	Text  string
}

// Error is "file:line: key: what is wrong", without the parts that f lacks.
func (f Fault) Error() string {
	var b strings.Builder
	b.WriteString(f.File)
	if f.Line > 0 {
		b.WriteString(":" + strconv.Itoa(f.Line))
	}
	if f.Key != "" {
		b.WriteString(": " + f.Key)
	}
	b.WriteString(": " + f.Text)
	return b.String()
}

// Faults is a configuration that is refused, with all reasons, sorted by file
// and line.
type Faults []Fault //nolint:errname // named after what it holds

// Error has one line for each fault.
func (fs Faults) Error() string {
	lines := make([]string, len(fs))
	for i, f := range fs {
		lines[i] = f.Error()
	}
	return strings.Join(lines, "\n")
}

// place is where in the files something stands.
type place struct {
	file string
	line int
}

func (p place) String() string { return p.file + ":" + strconv.Itoa(p.line) }

// report collects what is found while reading.
type report struct {
	faults   []Fault // the configuration is refused
	mistakes []Fault // warnings: it does not say what its author meant
	notices  []Fault // warnings: it may well be meant
}

func fault(at place, key, value, format string, args ...any) Fault {
	return Fault{File: at.file, Line: at.line, Key: key, Value: value, Text: fmt.Sprintf(format, args...)}
}

func (r *report) fault(at place, key, value, format string, args ...any) {
	r.faults = append(r.faults, fault(at, key, value, format, args...))
}

func (r *report) mistake(at place, key, value, format string, args ...any) {
	r.mistakes = append(r.mistakes, fault(at, key, value, format, args...))
}

func (r *report) notice(at place, key, format string, args ...any) {
	r.notices = append(r.notices, fault(at, key, "", format, args...))
}

// sorted joins lists of faults in the order in which a reader of the files
// meets them.
func sorted(lists ...[]Fault) []Fault {
	all := slices.Concat(lists...)
	slices.SortStableFunc(all, func(a, b Fault) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line))
	})
	return all
}
