// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
)

// part is something that the build contains.
type part struct {
	kind     string // "golang" or "deb", as package URLs have it
	name     string
	version  string
	url      string // package URL
	supplier string
}

// modules are those of a Go program, the standard library first.
func modules(info *debug.BuildInfo) []part {
	goVersion := strings.TrimPrefix(info.GoVersion, "go")
	parts := []part{{kind: "golang", name: "stdlib", version: goVersion, url: "pkg:golang/stdlib@" + goVersion}}
	for _, module := range info.Deps {
		if module.Replace != nil {
			module = module.Replace
		}
		parts = append(parts, part{
			kind: "golang", name: module.Path, version: module.Version,
			url: "pkg:golang/" + module.Path + "@" + url.PathEscape(module.Version),
		})
	}
	return parts
}

// debianPackages reads the dpkg records in dir, in the order of their names.
func debianPackages(dir string) ([]part, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list packages: %w", err)
	}
	var parts []part
	for _, entry := range entries {
		text, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		if err != nil {
			return nil, fmt.Errorf("read package record: %w", err)
		}
		p, err := debianPackage(text)
		if err != nil {
			return nil, fmt.Errorf("package record %s: %w", entry.Name(), err)
		}
		parts = append(parts, p)
	}
	return parts, nil
}

func debianPackage(record []byte) (part, error) {
	fields := make(map[string]string)
	for lines := bufio.NewScanner(bytes.NewReader(record)); lines.Scan(); {
		if name, value, ok := strings.Cut(lines.Text(), ": "); ok && !strings.HasPrefix(name, " ") {
			fields[name] = value
		}
	}
	for _, name := range []string{"Package", "Version", "Architecture"} {
		if fields[name] == "" {
			return part{}, fmt.Errorf("no field %s", name)
		}
	}
	return part{
		kind: "deb", name: fields["Package"], version: fields["Version"], supplier: "Organization: Debian",
		url: fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s", fields["Package"], url.PathEscape(fields["Version"]), fields["Architecture"]),
	}, nil
}
