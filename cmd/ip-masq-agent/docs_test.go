// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const repository = "../.."

// pages are the project's Markdown files with their text.
func pages(t *testing.T) map[string]string {
	t.Helper()
	found := make(map[string]string)
	for _, pattern := range []string{"*.md", "docs/*.md"} {
		files, err := filepath.Glob(filepath.Join(repository, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			found[file] = string(text)
		}
	}
	if len(found) < 5 {
		t.Fatalf("only %d pages", len(found))
	}
	return found
}

// tests are the names of all tests, and the text of the files that they are in
// and of their data.
func tests(t *testing.T) (names map[string]bool, text string) {
	t.Helper()
	names = make(map[string]bool)
	declaration := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w*)\(`)
	var all strings.Builder
	err := filepath.WalkDir(repository, func(path string, entry fs.DirEntry, err error) error {
		data := strings.Contains(path, "/testdata/") && strings.HasSuffix(path, ".yaml")
		if err != nil || entry.IsDir() || !data && !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, match := range declaration.FindAllStringSubmatch(string(text), -1) {
			names[match[1]] = true
		}
		all.Write(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names, all.String()
}

// A statement that rests on a test, or on a row of one, rests on one that
// exists.
func TestDocsNameTestsThatExist(t *testing.T) {
	names, all := tests(t)
	for file, text := range pages(t) {
		for _, match := range regexp.MustCompile("`((?:Test|Fuzz|Benchmark)[A-Z]\\w*)(?: \"([^\"`]*)\"`)?").FindAllStringSubmatch(text, -1) {
			if !names[match[1]] {
				t.Errorf("%s names %s, which does not exist", file, match[1])
			}
			if !strings.Contains(all, match[2]) {
				t.Errorf("%s names row %q of %s, which does not exist", file, match[2], match[1])
			}
		}
	}
}

// The page on RFCs has a row for each requirement, with a mark and, unless
// there is nothing to require, with the test that shows it.
func TestRFCPage(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(repository, "docs/rfc-compliance.md"))
	if err != nil {
		t.Fatal(err)
	}
	sections := strings.Split(string(text), "\n## ")[1:]
	for rfc, numbered := range map[string]int{"RFC 4787": 14, "RFC 5382": 10, "RFC 5508": 11, "RFC 7857": 12} {
		i := slices.IndexFunc(sections, func(s string) bool { return strings.HasPrefix(s, rfc) })
		if i < 0 {
			t.Fatalf("no section on %s", rfc)
		}
		marked := checkRequirements(t, rfc, sections[i])
		for n := range numbered {
			name := fmt.Sprintf("REQ-%d", n+1)
			if rfc == "RFC 7857" {
				if name = strconv.Itoa(n + 1); n == 0 {
					continue // its introduction
				}
			}
			if !marked[name] && !marked[name+"a"] {
				t.Errorf("%s: no mark for %s", rfc, name)
			}
		}
	}
}

// checkRequirements gives the requirements that the rows of a section mark.
func checkRequirements(t *testing.T, rfc, section string) map[string]bool {
	t.Helper()
	marked := make(map[string]bool)
	for line := range strings.Lines(section) {
		cells := strings.Split(strings.Trim(line, "| \n"), "|")
		name := strings.TrimSpace(cells[0])
		if len(cells) < 4 || !regexp.MustCompile(`^(REQ-)?\d`).MatchString(name) {
			continue
		}
		marked[name] = true
		switch mark := strings.TrimSpace(cells[2]); mark {
		case "–":
		case "yes", "partly", "no":
			if len(cells) < 5 || !strings.Contains(cells[4], "`Test") {
				t.Errorf("%s %s: no test shows %q", rfc, name, mark)
			}
			if mark == "no" && strings.TrimSpace(cells[3]) == "" {
				t.Errorf("%s %s: no reason", rfc, name)
			}
		default:
			t.Errorf("%s %s: mark %q", rfc, name, mark)
		}
	}
	return marked
}

// Links within the project lead somewhere.
func TestDocsLinks(t *testing.T) {
	for file, text := range pages(t) {
		for _, match := range regexp.MustCompile(`\]\(([^)\s]+)\)`).FindAllStringSubmatch(text, -1) {
			target, anchor, _ := strings.Cut(match[1], "#")
			if strings.Contains(target, "://") {
				continue
			}
			linked := file
			if target != "" {
				linked = filepath.Join(filepath.Dir(file), target)
			}
			if _, err := os.Stat(linked); err != nil {
				t.Errorf("%s: %v", file, err)
				continue
			}
			if anchor == "" {
				continue
			}
			content, err := os.ReadFile(linked)
			if err != nil || !hasHeading(string(content), anchor) {
				t.Errorf("%s: no heading %s in %s; %v", file, anchor, linked, err)
			}
		}
	}
}

func hasHeading(page, anchor string) bool {
	for line := range strings.Lines(page) {
		heading := strings.TrimLeft(line, "#")
		if heading == line {
			continue
		}
		heading = strings.ToLower(strings.TrimSpace(heading))
		heading = regexp.MustCompile(`[^\w\- ]`).ReplaceAllString(heading, "")
		if strings.ReplaceAll(heading, " ", "-") == anchor {
			return true
		}
	}
	return false
}
