// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// FuzzDecode looks for inputs that make the decoder panic, that leave a part of
// a refused configuration behind, whose JSON form has another outcome, or whose
// outcome does not read back.
func FuzzDecode(f *testing.F) {
	for _, row := range readClassicTable(f).Rows {
		f.Add([]byte(row.Input))
	}
	faulty, err := filepath.Glob("testdata/faulty/*.[jy]*")
	if err != nil {
		f.Fatal(err)
	}
	for _, path := range faulty {
		data, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		src := source{file: "f", data: data}
		var r report
		config := evaluate([]source{src}, Options{EnableIPv6: true}, &r)
		for _, fault := range sorted(r.faults, r.mistakes, r.notices) {
			if fault.Line < 1 || fault.Line > 1+strings.Count(string(data), "\n")+strings.Count(string(data), "\r") {
				t.Errorf("no such line: %v", fault)
			}
		}
		checkJSONForm(t, src, config, r)
		if len(r.faults) == 0 {
			checkReadsBack(t, config)
		}
	})
}

// checkJSONForm decodes what was decoded once more, written as JSON.
func checkJSONForm(t *testing.T, src source, config Config, r report) {
	var first report
	doc := decode(src, &first)
	if len(first.faults) > 0 || slices.ContainsFunc(doc.fields, func(f field) bool { return inexpressible(f.value) }) {
		return
	}
	form := make(map[string]any)
	for _, f := range doc.fields {
		form[f.key] = jsonForm(f.value)
	}
	data, err := json.Marshal(form)
	if err != nil {
		t.Fatal(err)
	}
	var again report
	got := evaluate([]source{{file: "f", data: data}}, Options{EnableIPv6: true}, &again)
	if len(r.faults) == 0 {
		if diff := cmp.Diff(config, got, equal()); diff != "" {
			t.Errorf("as JSON it is another configuration (-as it is +as JSON):\n%s\n%s", diff, data)
		}
	}
	if diff := cmp.Diff(textsOf(r.faults), textsOf(again.faults)); diff != "" {
		t.Errorf("as JSON it has other faults (-as it is +as JSON):\n%s\n%s", diff, data)
	}
}

func inexpressible(v value) bool {
	return v.kind == broken || slices.ContainsFunc(v.items, inexpressible)
}

func jsonForm(v value) any {
	switch v.kind {
	case null:
		return nil
	case text:
		return v.text
	case list:
		items := []any{}
		for _, item := range v.items {
			items = append(items, jsonForm(item))
		}
		return items
	case mapping:
		return map[string]any{}
	default:
		return json.RawMessage(v.text)
	}
}

// textsOf leaves out where the faults are, also in their texts.
func textsOf(faults []Fault) []string {
	texts := []string{}
	for _, f := range faults {
		text, _, _ := strings.Cut(f.Text, " too, at ")
		texts = append(texts, f.Key+": "+text)
	}
	slices.Sort(texts)
	return texts
}

func checkReadsBack(t *testing.T, config Config) {
	asJSON, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	asYAML, err := config.YAML()
	if err != nil {
		t.Fatal(err)
	}
	for _, data := range [][]byte{asJSON, asYAML} {
		var r report
		got := evaluate([]source{{file: "f", data: data}}, Options{EnableIPv6: true}, &r)
		if diff := cmp.Diff(config, got, equal()); diff != "" || len(r.faults)+len(r.mistakes) > 0 {
			t.Errorf("does not read back: %v (-is +was read):\n%s\n%s", r, diff, data)
		}
	}
}
