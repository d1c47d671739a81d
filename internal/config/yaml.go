// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strconv"

	"gopkg.in/yaml.v3"
)

const quoted = yaml.DoubleQuotedStyle | yaml.SingleQuotedStyle | yaml.LiteralStyle | yaml.FoldedStyle

func decodeYAML(src source, r *report) document {
	doc := document{file: src.file}
	var root yaml.Node
	data := firstDocument(src.data)
	if err := yaml.Unmarshal(data, &root); err != nil {
		line, text := yamlSyntaxError(err, data)
		r.fault(place{src.file, line}, "", "", "%s", text)
		return doc
	}
	if len(root.Content) == 0 {
		return doc // nothing but comments
	}
	top := follow(root.Content[0])
	if top.Kind == yaml.MappingNode {
		doc.addMapping(top, r)
		return doc
	}
	if v := yamlValue(top); v.kind != null {
		r.fault(place{src.file, v.line}, "", v.text, "%s", v.mismatch("keys with values"))
	}
	return doc
}

// firstDocument cuts off what follows the first of several documents. The
// library reads only that one, but looks far enough ahead to stumble over
// faults in the next. A marker ends a document wherever it stands at the
// beginning of a line, even in a quoted scalar (YAML 1.2, c-forbidden).
func firstDocument(data []byte) []byte {
	started := false
	offset := 0
	for line := range bytes.Lines(data) {
		text := bytes.TrimRight(bytes.TrimPrefix(line, []byte("\ufeff")), "\r\n")
		marker := bytes.HasPrefix(text, []byte("---")) && (len(text) == 3 || text[3] == ' ' || text[3] == '\t')
		if marker && started {
			return data[:offset]
		}
		content := bytes.TrimSpace(text)
		preface := len(content) == 0 || content[0] == '#' || text[0] == '%' // blank, comment, directive
		started = started || marker || !preface
		offset += len(line)
	}
	return data
}

// addMapping takes the keys of a mapping and then those that its merge keys
// ("<<") bring, where they are not set yet. Each mapping is taken once: a
// second time could bring nothing new, but would let a few nested lines expand
// without bound.
func (d *document) addMapping(top *yaml.Node, r *report) {
	taken := make(map[*yaml.Node]bool)
	for stack := []*yaml.Node{top}; len(stack) > 0; {
		n := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		if taken[n] {
			continue
		}
		taken[n] = true
		level := document{file: d.file}
		merges := level.addKeys(n, r)
		for _, f := range level.fields {
			if d.find(f.key) == nil {
				d.fields = append(d.fields, f)
			}
		}
		slices.Reverse(merges) // the first one is to be on top
		stack = append(stack, merges...)
	}
}

// addKeys takes the keys that stand in n itself and gives the mappings that n
// merges, in their order.
func (d *document) addKeys(n *yaml.Node, r *report) (merges []*yaml.Node) {
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, val := follow(n.Content[i]), follow(n.Content[i+1])
		at := place{d.file, n.Content[i].Line}
		if key.Kind != yaml.ScalarNode {
			r.fault(at, "", "", "a key must be a string")
			continue
		}
		if key.ShortTag() == "!!merge" {
			merged, err := mappingsOf(val)
			if err != nil {
				r.fault(at, key.Value, "", "%v", err)
			}
			merges = append(merges, merged...)
			continue
		}
		d.add(key.Value, at.line, yamlValue(val), r)
	}
	return merges
}

func mappingsOf(n *yaml.Node) ([]*yaml.Node, error) {
	nodes := []*yaml.Node{n}
	if n.Kind == yaml.SequenceNode {
		nodes = nil
		for _, item := range n.Content {
			nodes = append(nodes, follow(item))
		}
	}
	for _, m := range nodes {
		if m.Kind != yaml.MappingNode {
			return nil, errors.New("yaml: map merge requires map or sequence of maps as the value")
		}
	}
	return nodes, nil
}

// follow gives the node that n is an alias of, or n.
func follow(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

func yamlValue(n *yaml.Node) value {
	v := value{line: n.Line}
	switch n.Kind {
	case yaml.MappingNode:
		v.kind = mapping
	case yaml.SequenceNode:
		v.kind = list
		for _, item := range n.Content {
			v.items = append(v.items, yamlItem(follow(item)))
		}
	default:
		v.kind, v.text = yamlScalar(n)
	}
	return v
}

// yamlItem is yamlValue without the content of nested lists: no key takes
// them, and aliases could make them huge.
func yamlItem(n *yaml.Node) value {
	if n.Kind == yaml.SequenceNode {
		return value{kind: list, line: n.Line}
	}
	return yamlValue(n)
}

// yamlScalar gives what the value is in JSON. It adds the booleans of YAML 1.1
// to those that the library knows, because the classic agent takes them.
func yamlScalar(n *yaml.Node) (kind, string) {
	tag := n.ShortTag()
	plain := n.Style&(quoted|yaml.TaggedStyle) == 0
	if tag == "!!bool" || (tag == "!!str" && plain) {
		if b, ok := yamlBool(n.Value); ok {
			return boolean, strconv.FormatBool(b)
		}
	}
	switch tag {
	case "!!null", "!!bool", "!!int", "!!float":
		return yamlResolved(n)
	default: // also a date, and what has a tag of its own
		return text, n.Value
	}
}

// yamlResolved is for what the library has to parse: numbers, and texts that
// need not fit the tag before them.
func yamlResolved(n *yaml.Node) (kind, string) {
	var v any
	if err := n.Decode(&v); err != nil {
		return broken, err.Error()
	}
	if v == nil {
		return null, "null"
	}
	out, err := json.Marshal(v) // as the classic agent does: 3.0 becomes 3
	if err != nil {
		return broken, err.Error()
	}
	return number, string(out)
}

func yamlBool(s string) (b, ok bool) {
	switch s {
	case "y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON":
		return true, true
	case "n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF":
		return false, true
	}
	return false, false
}
