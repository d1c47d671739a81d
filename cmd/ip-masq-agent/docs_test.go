// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
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

// A statement that rests on a test rests on one that exists.
func TestDocsNameTestsThatExist(t *testing.T) {
	tests := make(map[string]bool)
	declaration := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w*)\(`)
	err := filepath.WalkDir(repository, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		for _, match := range declaration.FindAllStringSubmatch(string(text), -1) {
			tests[match[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for file, text := range pages(t) {
		for _, match := range regexp.MustCompile("`((?:Test|Fuzz|Benchmark)[A-Z]\\w*)").FindAllStringSubmatch(text, -1) {
			if !tests[match[1]] {
				t.Errorf("%s names %s, which does not exist", file, match[1])
			}
		}
	}
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
