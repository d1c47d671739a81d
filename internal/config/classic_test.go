// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"gopkg.in/yaml.v3"
)

type classicRow struct {
	Name              string   `yaml:"name"`
	Input             string   `yaml:"input"`
	IPv6              bool     `yaml:"ipv6"`
	AllReservedRanges bool     `yaml:"all_reserved_ranges"`
	Classic           string   `yaml:"classic"`
	Outcome           string   `yaml:"outcome"`
	Faults            []string `yaml:"faults"`
	Warnings          []string `yaml:"warnings"`
	Deviation         string   `yaml:"deviation"`
	OwnWords          bool     `yaml:"own_words"`
}

type classicTable struct {
	Deviations map[string]string `yaml:"deviations"`
	Rows       []classicRow      `yaml:"rows"`
}

func readClassicTable(t testing.TB) classicTable {
	t.Helper()
	data, err := os.ReadFile("testdata/classic.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var table classicTable
	if err := yaml.Unmarshal(data, &table); err != nil {
		t.Fatal(err)
	}
	return table
}

// TestAgainstClassicAgent holds every row of the table to three things: we do
// what the row says; where that is not what the classic agent does, it names a
// deviation; and where both refuse, ours has the words that people know.
func TestAgainstClassicAgent(t *testing.T) {
	table := readClassicTable(t)
	path := filepath.Join(t.TempDir(), "ip-masq-agent")
	unused := make(map[string]bool)
	for name := range table.Deviations {
		unused[name] = true
	}
	for _, row := range table.Rows {
		t.Run(row.Name, func(t *testing.T) {
			write(t, path, row.Input)
			row.checkOurs(t, path)
			row.checkDeviation(t, table.Deviations)
			row.checkWords(t)
		})
		delete(unused, row.Deviation)
	}
	if len(unused) > 0 {
		t.Errorf("no row shows %v", unused)
	}
}

func (row classicRow) checkOurs(t *testing.T, path string) {
	t.Helper()
	options := Options{Path: path, EnableIPv6: row.IPv6, AllReservedRanges: row.AllReservedRanges}
	result, err := Load(options)
	var faults Faults
	if err != nil {
		faults = faultsOf(t, err)
	}
	if diff := cmp.Diff(row.Faults, inFile(faults, path), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("faults (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(row.Warnings, inFile(result.Warnings, path), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
	if err != nil {
		if diff := cmp.Diff(Result{}, result, equal()); diff != "" {
			t.Errorf("refused, but the result is not empty (-want +got):\n%s", diff)
		}
		return
	}
	want := row.Classic
	if row.Outcome != "" {
		want = row.Outcome
	}
	if got := outcome(result.Config, Defaults(options)); got != want {
		t.Errorf("outcome = %s, want %s", got, want)
	}
}

func (row classicRow) checkDeviation(t *testing.T, known map[string]string) {
	t.Helper()
	theirs, ours := strings.HasPrefix(row.Classic, "error: "), len(row.Faults) > 0
	deviates := theirs != ours || row.Outcome != ""
	if deviates != (row.Deviation != "") {
		t.Errorf("deviates: %v, deviation: %q", deviates, row.Deviation)
	}
	if _, ok := known[row.Deviation]; deviates && !ok {
		t.Errorf("deviation %q has no reason", row.Deviation)
	}
}

// checkWords is about messages of ours that are promised to be the classic
// agent's. Those of encoding/json about types are not.
func (row classicRow) checkWords(t *testing.T) {
	t.Helper()
	theirs, refused := strings.CutPrefix(row.Classic, "error: ")
	if !refused || len(row.Faults) == 0 {
		return
	}
	promised := regexp.MustCompile(`^(CIDR|ipv6 is|the daemon|time:|yaml:|invalid character|unexpected end)`)
	theirs = regexp.MustCompile(`^yaml: line \d+:`).ReplaceAllString(theirs, "yaml:")
	same := slices.ContainsFunc(row.Faults, func(f string) bool { return strings.HasSuffix(f, ": "+theirs) })
	if promised.MatchString(theirs) && same == row.OwnWords {
		t.Errorf("%q is among ours: %v, want %v", theirs, same, !same)
	}
}

func inFile(faults []Fault, path string) []string {
	var texts []string
	for _, f := range faults {
		text := strings.TrimPrefix(f.Error(), path+":")
		texts = append(texts, strings.ReplaceAll(text, path+":", "FILE:"))
	}
	return texts
}

// outcome tells what differs from the defaults.
func outcome(c, defaults Config) string {
	var parts []string
	add := func(key string, got, normal any) {
		if g := fmt.Sprint(got); g != fmt.Sprint(normal) {
			parts = append(parts, key+"="+g)
		}
	}
	add(keyNonMasquerade, c.NonMasqueradeCIDRs, defaults.NonMasqueradeCIDRs)
	add(keyMasquerade, c.MasqueradeCIDRs, []netip.Prefix{})
	add(keyLimit, c.CIDRLimit, defaults.CIDRLimit)
	add(keyMasqLinkLocal, c.MasqLinkLocal, false)
	add(keyMasqLinkLocalIPv6, c.MasqLinkLocalIPv6, false)
	add(keyResyncInterval, c.ResyncInterval, defaults.ResyncInterval)
	if parts == nil {
		return "defaults"
	}
	return strings.Join(parts, " ")
}
