// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ip-masq-agent/internal/prefix"
)

func TestDefaults(t *testing.T) {
	want := Config{
		NonMasqueradeCIDRs: prefixes("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
		CIDRLimit:          64,
		ResyncInterval:     60 * time.Second,
	}
	if diff := cmp.Diff(want, Defaults(Options{}), equal()); diff != "" {
		t.Errorf("Defaults (-want +got):\n%s", diff)
	}
	want.NonMasqueradeCIDRs = prefixes("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10",
		"192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4")
	if diff := cmp.Diff(want, Defaults(Options{AllReservedRanges: true}), equal()); diff != "" {
		t.Errorf("Defaults with all reserved ranges (-want +got):\n%s", diff)
	}
}

// TestConfigValidate has the cases of the classic agent's test of that name.
func TestConfigValidate(t *testing.T) {
	tests := []struct {
		cidrs []string
		want  string
	}{
		{cidrs: []string{}},
		{cidrs: []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"}},
		{[]string{"abcdefg"}, `CIDR "abcdefg" could not be parsed, invalid CIDR address: abcdefg`},
		{[]string{"10.0.0.0/8", "abcdefg"}, `CIDR "abcdefg" could not be parsed, invalid CIDR address: abcdefg`},
		{[]string{"10.256.0.0/16"}, `CIDR "10.256.0.0/16" could not be parsed, invalid CIDR address: 10.256.0.0/16`},
		{[]string{"10.0.0.1/8"}, `CIDR "10.0.0.1/8" is not aligned to a CIDR block, ip: "10.0.0.1" network: "10.0.0.0/8"`},
	}
	for _, tt := range tests {
		t.Run(strings.Join(tt.cidrs, ","), func(t *testing.T) {
			content, err := json.Marshal(map[string]any{keyNonMasquerade: tt.cidrs})
			if err != nil {
				t.Fatal(err)
			}
			_, err = Load(Options{Path: file(t, string(content))})
			if tt.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			faults := faultsOf(t, err)
			bad := tt.cidrs[len(tt.cidrs)-1]
			if len(faults) != 1 || faults[0].Text != tt.want || faults[0].Value != bad || faults[0].Key != keyNonMasquerade {
				t.Errorf("faults = %#v, want one with %q", faults, tt.want)
			}
		})
	}
}

// TestSyncConfig has the cases of the classic agent's test of that name.
func TestSyncConfig(t *testing.T) {
	allKeys := with(func(c *Config) {
		c.NonMasqueradeCIDRs = prefixes("172.16.0.0/12", "10.0.0.0/8")
		c.MasqLinkLocal = true
		c.ResyncInterval = 5 * time.Second
	})
	onlyCIDRs := with(func(c *Config) { c.NonMasqueradeCIDRs = prefixes("192.168.0.0/16") })
	onlyLinkLocal := with(func(c *Config) { c.MasqLinkLocal = true })
	onlyInterval := with(func(c *Config) { c.ResyncInterval = 5 * time.Minute })
	tests := []struct {
		name, content string
		want          Config
		wantErr       string
	}{
		{name: "yaml all keys", want: allKeys, content: `
nonMasqueradeCIDRs:
  - 172.16.0.0/12
  - 10.0.0.0/8
cidrLimit: 64
masqLinkLocal: true
resyncInterval: 5s
`},
		{name: "yaml only CIDRs", content: "nonMasqueradeCIDRs:\n  - 192.168.0.0/16\n", want: onlyCIDRs},
		{name: "yaml only masqLinkLocal", content: "masqLinkLocal: true\n", want: onlyLinkLocal},
		{name: "yaml only resyncInterval", content: "resyncInterval: 5m\n", want: onlyInterval},
		{name: "invalid yaml", content: "*", wantErr: "yaml: did not find expected alphabetic or numeric character"},
		{name: "json all keys", want: allKeys, content: `
{
  "nonMasqueradeCIDRs": ["172.16.0.0/12", "10.0.0.0/8"],
  "masqLinkLocal": true,
  "resyncInterval": "5s"
}
`},
		{name: "json only CIDRs", content: `{"nonMasqueradeCIDRs": ["192.168.0.0/16"]}`, want: onlyCIDRs},
		{name: "json only masqLinkLocal", content: `{"masqLinkLocal": true}`, want: onlyLinkLocal},
		{name: "json only resyncInterval", content: `{"resyncInterval": "5m"}`, want: onlyInterval},
		{name: "json with escapes", content: `{"resyncInterval": "\u0035\u006d"}`, want: onlyInterval},
		{name: "invalid json", content: "{*", wantErr: "invalid character '*' looking for beginning of object key string"},
		{name: "json with IPv6", content: `{"nonMasqueradeCIDRs": ["172.16.0.0/12", "10.0.0.0/8", "fc00::/7"]}`, want: with(func(c *Config) {
			c.NonMasqueradeCIDRs = prefixes("172.16.0.0/12", "10.0.0.0/8", "fc00::/7")
		})},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			result, err := Load(Options{Path: file(t, tt.content), EnableIPv6: true})
			if tt.wantErr != "" {
				if faults := faultsOf(t, err); len(faults) != 1 || faults[0].Text != tt.wantErr {
					t.Errorf("faults = %#v, want one with %q", faults, tt.wantErr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(Result{Config: tt.want, Present: true}, result, equal()); diff != "" {
				t.Errorf("Load (-want +got):\n%s", diff)
			}
		})
	}
}

func TestLoadOfNothingGivesTheDefaults(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("nowhere", filepath.Join(dir, "dangling")); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{
		"no file":         filepath.Join(dir, "ip-masq-agent"),
		"no directory":    filepath.Join(dir, "a", "b", "ip-masq-agent"),
		"dangling link":   filepath.Join(dir, "dangling"),
		"empty directory": t.TempDir(),
	} {
		t.Run(name, func(t *testing.T) {
			result, err := Load(Options{Path: path, AllReservedRanges: true})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(Result{Config: Defaults(Options{AllReservedRanges: true})}, result, equal()); diff != "" {
				t.Errorf("Load (-want +got):\n%s", diff)
			}
		})
	}
}

func TestLoadOfUnreadable(t *testing.T) {
	result, err := Load(Options{Path: filepath.Join(file(t, "a: b"), "ip-masq-agent")})
	if err == nil || !strings.Contains(err.Error(), "find config: ") || !strings.Contains(err.Error(), "not a directory") {
		t.Errorf("Load below a file: result %v, error %v", result, err)
	}
}

func TestLoadOfTooMuch(t *testing.T) {
	most := "resyncInterval: 5s\n#" + strings.Repeat("x", maxFileSize-20)
	if result, err := Load(Options{Path: file(t, most)}); err != nil || result.Config.ResyncInterval != 5*time.Second {
		t.Errorf("Load of %d bytes: %v, %v", len(most), result, err)
	}
	path := file(t, most+"x")
	_, err := Load(Options{Path: path})
	if want := path + ": is larger than 4 MiB"; err == nil || err.Error() != want {
		t.Errorf("Load of one byte more: %v, want %s", err, want)
	}
}

func BenchmarkLoad(b *testing.B) {
	for _, n := range []int{10_000, 50_000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			var content strings.Builder
			content.WriteString("cidrLimit: 50000\nnonMasqueradeCIDRs:\n")
			addr := netip.MustParseAddr("10.0.0.0")
			for range n {
				content.WriteString("  - " + addr.String() + "/32\n")
				addr = addr.Next()
			}
			path := file(b, content.String())
			for b.Loop() {
				if result, err := Load(Options{Path: path}); err != nil || len(result.Config.NonMasqueradeCIDRs) != n {
					b.Fatalf("%d prefixes, %v", len(result.Config.NonMasqueradeCIDRs), err)
				}
			}
		})
	}
}

func TestMergesDoNotExpand(t *testing.T) {
	var content strings.Builder
	content.WriteString("a0: &a0 {resyncInterval: 5s}\n")
	for i := 1; i < 100; i++ {
		n, prev := "a"+strconv.Itoa(i), "*a"+strconv.Itoa(i-1)
		content.WriteString(n + ": &" + n + " {<<: [" + prev + ", " + prev + "]}\n")
	}
	content.WriteString("<<: *a99\n")
	result, err := Load(Options{Path: file(t, content.String())})
	if err != nil || result.Config.ResyncInterval != 5*time.Second {
		t.Errorf("Load = %v, %v", result.Config, err)
	}
}

// TestWrittenFormReadsBack: what `validate` prints is a config file.
func TestWrittenFormReadsBack(t *testing.T) {
	for name, want := range map[string]Config{
		"defaults": with(nil),
		"empty":    with(func(c *Config) { c.NonMasqueradeCIDRs = nil }),
		"all": {
			NonMasqueradeCIDRs: prefixes("0.0.0.0/0", "fc00::/7", "::/0"),
			MasqueradeCIDRs:    prefixes("10.0.0.0/8", "2001:db8::/32"),
			CIDRLimit:          7,
			MasqLinkLocal:      true,
			MasqLinkLocalIPv6:  true,
			ResyncInterval:     90 * time.Minute,
		},
	} {
		t.Run(name, func(t *testing.T) {
			asJSON, err := json.Marshal(want)
			if err != nil {
				t.Fatal(err)
			}
			asYAML, err := want.YAML()
			if err != nil {
				t.Fatal(err)
			}
			for _, content := range []string{string(asJSON), string(asYAML)} {
				got, err := Validate(Options{Path: file(t, content)})
				if err != nil {
					t.Fatalf("%v in:\n%s", err, content)
				}
				if diff := cmp.Diff(want, got, equal()); diff != "" {
					t.Errorf("(-want +got):\n%s\nin:\n%s", diff, content)
				}
				if strings.Contains(content, "null") {
					t.Errorf("an empty list reads as null:\n%s", content)
				}
			}
		})
	}
}

func TestYAMLForm(t *testing.T) {
	got, err := with(func(c *Config) { c.MasqLinkLocal = true }).YAML()
	if err != nil {
		t.Fatal(err)
	}
	want := `nonMasqueradeCIDRs:
  - 10.0.0.0/8
  - 172.16.0.0/12
  - 192.168.0.0/16
masqueradeCIDRs: []
cidrLimit: 64
masqLinkLocal: true
masqLinkLocalIPv6: false
resyncInterval: 1m0s
`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("YAML (-want +got):\n%s", diff)
	}
}

func TestPolicy(t *testing.T) {
	config := with(func(c *Config) {
		c.NonMasqueradeCIDRs = prefixes("fc00::/7", "10.0.0.0/8")
		c.MasqueradeCIDRs = prefixes("fc01::/16", "10.1.0.0/16")
	})
	masqLinkLocal := config
	masqLinkLocal.MasqLinkLocal, masqLinkLocal.MasqLinkLocalIPv6 = true, true
	tests := []struct {
		name   string
		config Config
		ipv6   bool
		want   prefix.Lists
	}{
		{"IPv4", config, false, prefix.Lists{
			LinkLocal:     prefixes("169.254.0.0/16"),
			NonMasquerade: prefixes("10.0.0.0/8"),
			Masquerade:    prefixes("10.1.0.0/16"),
		}},
		{"both families", config, true, prefix.Lists{
			LinkLocal:     prefixes("169.254.0.0/16", "fe80::/10"),
			NonMasquerade: config.NonMasqueradeCIDRs,
			Masquerade:    config.MasqueradeCIDRs,
		}},
		{"link-local masqueraded", masqLinkLocal, true, prefix.Lists{
			NonMasquerade: config.NonMasqueradeCIDRs,
			Masquerade:    config.MasqueradeCIDRs,
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, tt.config.Policy(tt.ipv6).Lists(), equal()); diff != "" {
				t.Errorf("lists (-want +got):\n%s", diff)
			}
		})
	}
}
