// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"unicode"
)

// The keys as the documentation spells them.
const (
	keyNonMasquerade     = "nonMasqueradeCIDRs"
	keyMasquerade        = "masqueradeCIDRs"
	keyLimit             = "cidrLimit"
	keyMasqLinkLocal     = "masqLinkLocal"
	keyMasqLinkLocalIPv6 = "masqLinkLocalIPv6"
	keyResyncInterval    = "resyncInterval"
)

// canonical finds the known key that key means. The case does not matter: the
// classic agent decodes with encoding/json, and people rely on it.
func canonical(key string) (string, bool) {
	keys := []string{
		keyNonMasquerade, keyMasquerade, keyLimit, keyMasqLinkLocal, keyMasqLinkLocalIPv6, keyResyncInterval,
	}
	i := slices.IndexFunc(keys, func(k string) bool { return strings.EqualFold(k, key) })
	if i < 0 {
		return key, false
	}
	return keys[i], true
}

// kind is the type of a value in JSON, to which YAML is reduced.
type kind int

const (
	null kind = iota
	boolean
	number
	text
	list
	mapping
	broken // nothing that JSON has; the value's text says why
)

func (k kind) String() string {
	return []string{"null", "a boolean", "a number", "a string", "a list", "a mapping", "a broken value"}[k]
}

// value is a value in a file.
type value struct {
	kind  kind
	line  int
	text  string  // what JSON would write, a string without its quotes; empty for lists and mappings
	items []value // of a list; of a mapping nothing is kept
}

// mismatch says that v is not what is wanted.
func (v value) mismatch(want string) string {
	if v.kind == broken {
		return v.text
	}
	return fmt.Sprintf("want %s, got %s", want, v.kind)
}

// field is a known key with its value.
type field struct {
	key   string // canonical
	line  int
	value value
}

// document is what a file says: each known key at most once.
type document struct {
	file   string
	fields []field
}

func (d *document) find(key string) *field {
	i := slices.IndexFunc(d.fields, func(f field) bool { return f.key == key })
	if i < 0 {
		return nil
	}
	return &d.fields[i]
}

// add takes a key as it stands in the file. The last of several counts.
func (d *document) add(key string, line int, v value, r *report) {
	at := place{d.file, line}
	key, known := canonical(key)
	if !known {
		r.mistake(at, key, "", "unknown key, it has no effect")
		return
	}
	f := field{key: key, line: line, value: v}
	if earlier := d.find(key); earlier != nil {
		r.mistake(at, key, "", "duplicate key, line %d has it too: the last one counts", earlier.line)
		*earlier = f
		return
	}
	d.fields = append(d.fields, f)
}

// decode reads YAML or JSON. Syntax errors are reported as faults; the
// document is then empty, as it is for an empty file.
func decode(src source, r *report) document {
	// The same test as in the classic agent, where a JSON text may have leading
	// space but no byte order mark. It has JSON's rules and error messages.
	if bytes.HasPrefix(bytes.TrimLeftFunc(src.data, unicode.IsSpace), []byte("{")) {
		return decodeJSON(src, r)
	}
	return decodeYAML(src, r)
}
