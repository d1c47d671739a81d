// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// equal compares configurations; a list without entries may be nil.
func equal() cmp.Options {
	return cmp.Options{
		cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
		cmpopts.EquateEmpty(),
	}
}

func prefixes(texts ...string) []netip.Prefix {
	var list []netip.Prefix
	for _, text := range texts {
		list = append(list, netip.MustParsePrefix(text))
	}
	return list
}

// write makes path with its directories.
func write(t testing.TB, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// file makes a file with content and gives its path.
func file(t testing.TB, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ip-masq-agent")
	write(t, path, content)
	return path
}

// directory makes one with the files and gives its path.
func directory(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		write(t, filepath.Join(dir, name), content)
	}
	return dir
}

// with is the defaults as change makes them.
func with(change func(*Config)) Config {
	c := Defaults(Options{})
	if change != nil {
		change(&c)
	}
	return c
}

func faultsOf(t *testing.T, err error) Faults {
	t.Helper()
	faults, ok := errors.AsType[Faults](err)
	if !ok {
		t.Fatalf("error = %v, want faults", err)
	}
	return faults
}

// belowDirectory is faults as lines, without the directory of their files.
func belowDirectory(faults []Fault, dir string) []string {
	var lines []string
	for _, f := range faults {
		line := strings.TrimPrefix(f.Error(), dir+"/")
		lines = append(lines, strings.ReplaceAll(line, dir, "DIR"))
	}
	return lines
}
