// SPDX-License-Identifier: Apache-2.0

package config

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files")

// TestValidateFaulty compares what Validate says of each file (or directory) in
// testdata/faulty with the .golden file beside it.
func TestValidateFaulty(t *testing.T) {
	entries, err := os.ReadDir("testdata/faulty")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".golden") {
			continue
		}
		t.Run(e.Name(), func(t *testing.T) {
			path := filepath.Join("testdata/faulty", e.Name())
			config, err := Validate(Options{Path: path})
			got := faultsOf(t, err).Error() + "\n"
			if diff := cmp.Diff(Config{}, config, equal()); diff != "" {
				t.Errorf("refused, but the config is not empty:\n%s", diff)
			}
			golden := path + ".golden"
			if *update {
				write(t, golden, got)
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestValidateIsStricterThanLoad: what Load warns of because it has no effect
// is a fault; what does more than one may think stays a warning.
func TestValidateIsStricterThanLoad(t *testing.T) {
	path := file(t, "nonMasqueradeCIDRs: []\nresyncInterval: 5s\nresyncInterval: 10s\nfoo: bar\n")
	notice := "1: nonMasqueradeCIDRs: the list is empty: traffic to every destination but link-local is masqueraded"
	mistakes := []string{
		"3: resyncInterval: duplicate key, line 2 has it too: the last one counts",
		"4: foo: unknown key, it has no effect",
	}

	result, err := Load(Options{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(append([]string{notice}, mistakes...), inFile(result.Warnings, path)); diff != "" {
		t.Errorf("Load warns (-want +got):\n%s", diff)
	}
	if result.Config.ResyncInterval != 10*time.Second {
		t.Errorf("the last of two keys does not count: %v", result.Config.ResyncInterval)
	}

	_, err = Validate(Options{Path: path})
	if diff := cmp.Diff(mistakes, inFile(faultsOf(t, err), path)); diff != "" {
		t.Errorf("Validate (-want +got):\n%s", diff)
	}

	write(t, path, "nonMasqueradeCIDRs: []\n")
	result, err = Check(Options{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{notice}, inFile(result.Warnings, path)); diff != "" {
		t.Errorf("Check warns (-want +got):\n%s", diff)
	}
}

func TestValidateTakesIPv6(t *testing.T) {
	path := file(t, "nonMasqueradeCIDRs: ['fc00::/7']\n")
	if _, err := Load(Options{Path: path}); err == nil {
		t.Error("Load takes an IPv6 prefix without IPv6")
	}
	config, err := Validate(Options{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(prefixes("fc00::/7"), config.NonMasqueradeCIDRs, equal()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestFaultText(t *testing.T) {
	for want, fault := range map[string]Fault{
		"f:3: cidrLimit: oops": {File: "f", Line: 3, Key: keyLimit, Value: "x", Text: "oops"},
		"f:3: oops":            {File: "f", Line: 3, Text: "oops"},
		"f: oops":              {File: "f", Text: "oops"},
	} {
		if got := fault.Error(); got != want {
			t.Errorf("%#v prints as %q, want %q", fault, got, want)
		}
	}
}
