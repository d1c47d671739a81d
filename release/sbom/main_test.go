// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const dpkgRecord = `Status: install ok installed
Package: libexample1
Version: 1:2.3-4+deb12u1
Architecture: arm64
Description: an example
 Version: not a field
`

// list runs the command over this test's own program.
func list(t *testing.T, args ...string) document {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := run(append([]string{"-binary", self, "-version", "v1.2.3"}, args...), "86400", &out); err != nil {
		t.Fatal(err)
	}
	var d document
	decoder := json.NewDecoder(&out)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&d); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestDocumentNamesAllParts(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "libexample1"), []byte(dpkgRecord), 0o600); err != nil {
		t.Fatal(err)
	}
	d := list(t, "-packages", dir)

	urls := make(map[string]bool)
	ids := make(map[string]bool)
	for _, p := range d.Packages {
		if ids[p.ID] {
			t.Errorf("identifier %s twice", p.ID)
		}
		ids[p.ID] = true
		for _, r := range p.References {
			name, _, _ := strings.Cut(r.Locator, "@")
			urls[name] = true
			urls[r.Locator] = true
		}
	}
	for _, want := range []string{"pkg:golang/stdlib", "pkg:deb/debian/libexample1@1:2.3-4+deb12u1?arch=arm64"} {
		if !urls[want] {
			t.Errorf("%s is not listed", want)
		}
	}
	for _, r := range d.Relationships {
		if r.Type != "DESCRIBES" && (r.From != agentID || !ids[r.To]) {
			t.Errorf("relationship %+v leads nowhere", r)
		}
	}
	if got, want := d.Creation.Created, "1970-01-02T00:00:00Z"; got != want {
		t.Errorf("created %s, want %s", got, want)
	}
}

func TestSameInputGivesTheSameDocument(t *testing.T) {
	first, second := list(t), list(t)
	if first.Namespace != second.Namespace || len(first.Packages) != len(second.Packages) {
		t.Errorf("%s and %s differ", first.Namespace, second.Namespace)
	}
}

func TestRefused(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "empty"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		args  []string
		epoch string
		want  string
	}{
		"no program":      {nil, "", "-binary is missing"},
		"not a program":   {[]string{"-binary", filepath.Join(dir, "empty")}, "", "read modules of"},
		"empty record":    {[]string{"-binary", self, "-packages", dir}, "", "package record empty: no field Package"},
		"time is no time": {[]string{"-binary", self}, "noon", "SOURCE_DATE_EPOCH"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := run(test.args, test.epoch, &bytes.Buffer{})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want one with %q", err, test.want)
			}
		})
	}
}
