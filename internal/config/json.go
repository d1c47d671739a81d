// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
)

// jsonReader walks a JSON text that is known to be valid, so that no token can
// fail, and knows its lines.
type jsonReader struct {
	dec      *json.Decoder
	newlines []int // offsets
}

func newJSONReader(data []byte) *jsonReader {
	r := &jsonReader{dec: json.NewDecoder(bytes.NewReader(data))}
	r.dec.UseNumber()
	for i, c := range data {
		if c == '\n' {
			r.newlines = append(r.newlines, i)
		}
	}
	return r
}

// line of the byte before offset, which is where the decoder and its errors
// point behind.
func (r *jsonReader) line(offset int64) int {
	n, _ := slices.BinarySearch(r.newlines, int(offset)-1)
	return n + 1
}

func (r *jsonReader) next() (json.Token, int) {
	token, err := r.dec.Token()
	if err != nil {
		return nil, 0
	}
	return token, r.line(r.dec.InputOffset())
}

func (r *jsonReader) value() value {
	token, line := r.next()
	v := value{line: line}
	switch token := token.(type) {
	case bool:
		v.kind, v.text = boolean, strconv.FormatBool(token)
	case json.Number:
		v.kind, v.text = number, token.String()
	case string:
		v.kind, v.text = text, token
	case json.Delim:
		v.kind = mapping
		if token == '[' {
			v.kind = list
		}
		for r.dec.More() {
			if item := r.value(); v.kind == list {
				v.items = append(v.items, item)
			}
		}
		r.next() // the closing bracket
	default:
		v.kind, v.text = null, "null"
	}
	return v
}

func decodeJSON(src source, rep *report) document {
	doc := document{file: src.file}
	r := newJSONReader(src.data)
	if err := json.Unmarshal(src.data, new(json.RawMessage)); err != nil {
		at := place{file: src.file, line: 1}
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			at.line = r.line(syntax.Offset)
		}
		rep.fault(at, "", "", "%v", err)
		return doc
	}
	r.next() // the opening brace
	for r.dec.More() {
		key := r.value()
		doc.add(key.text, key.line, r.value(), rep)
	}
	return doc
}
