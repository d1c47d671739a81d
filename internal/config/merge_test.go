// SPDX-License-Identifier: Apache-2.0

package config

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestDirectory(t *testing.T) {
	tests := []struct {
		name     string
		files    map[string]string
		want     Config
		warnings []string
	}{
		{
			name: "lists are united without duplicates, in the order of names",
			files: map[string]string{
				"ip-masq-b": "nonMasqueradeCIDRs: [172.16.0.0/12, 10.0.0.0/8, 1.0.0.0/8, 1.0.0.0/8]\nmasqueradeCIDRs: [1.1.0.0/16]\n",
				"ip-masq-a": `{"nonMasqueradeCIDRs": ["10.0.0.0/8", "9.0.0.0/8"]}`,
				"ip-masq":   "masqueradeCIDRs: [9.1.0.0/16, 1.1.0.0/16]",
			},
			want: with(func(c *Config) {
				c.NonMasqueradeCIDRs = prefixes("10.0.0.0/8", "9.0.0.0/8", "172.16.0.0/12", "1.0.0.0/8")
				c.MasqueradeCIDRs = prefixes("9.1.0.0/16", "1.1.0.0/16")
			}),
		},
		{
			name:  "a single file keeps its duplicates",
			files: map[string]string{"ip-masq-agent": "nonMasqueradeCIDRs: [10.0.0.0/8, 10.0.0.0/8]\n"},
			want:  with(func(c *Config) { c.NonMasqueradeCIDRs = prefixes("10.0.0.0/8", "10.0.0.0/8") }),
		},
		{
			name: "other names are ignored",
			files: map[string]string{
				"ip-masq-config": "nonMasqueradeCIDRs: [10.0.0.0/8]\n",
				"not-ip-masq":    "*",
				"IP-MASQ":        "*",
				"sub/ip-masq":    "*",
			},
			want: with(func(c *Config) { c.NonMasqueradeCIDRs = prefixes("10.0.0.0/8") }),
		},
		{
			name:  "only other names give the defaults",
			files: map[string]string{"config": "*"},
			want:  with(nil),
		},
		{
			name: "booleans are OR-ed",
			files: map[string]string{
				"ip-masq-1": "masqLinkLocal: true\nmasqLinkLocalIPv6: false\n",
				"ip-masq-2": "masqLinkLocal: false\nmasqLinkLocalIPv6: true\n",
				"ip-masq-3": "masqLinkLocal: false\nmasqLinkLocalIPv6: false\n",
			},
			want: with(func(c *Config) { c.MasqLinkLocal, c.MasqLinkLocalIPv6 = true, true }),
		},
		{
			name: "a key that a file lacks is left to the others",
			files: map[string]string{
				"ip-masq-1": "# nothing\n",
				"ip-masq-2": "masqLinkLocal: yes\n",
				"ip-masq-3": "cidrLimit: ~\n",
				"ip-masq-4": "cidrLimit: 5\n",
			},
			want: with(func(c *Config) { c.MasqLinkLocal, c.CIDRLimit = true, 5 }),
		},
		{
			name: "equal values agree, however they are written",
			files: map[string]string{
				"ip-masq-1": "resyncInterval: 120s\ncidrLimit: 0x10\n",
				"ip-masq-2": "resyncInterval: 2m\ncidrLimit: 16\n",
			},
			want: with(func(c *Config) { c.ResyncInterval, c.CIDRLimit = 2*time.Minute, 16 }),
		},
		{
			name: "an empty list adds nothing to that of another file",
			files: map[string]string{
				"ip-masq-1": "nonMasqueradeCIDRs: []\n",
				"ip-masq-2": "nonMasqueradeCIDRs: [10.0.0.0/8]\n",
			},
			want: with(func(c *Config) { c.NonMasqueradeCIDRs = prefixes("10.0.0.0/8") }),
		},
		{
			name: "lists that are empty in all files are empty",
			files: map[string]string{
				"ip-masq-1": "masqLinkLocal: true\nnonMasqueradeCIDRs: []\n",
				"ip-masq-2": "nonMasqueradeCIDRs:\n",
			},
			want: with(func(c *Config) { c.NonMasqueradeCIDRs, c.MasqLinkLocal = nil, true }),
			warnings: []string{
				"ip-masq-1:2: nonMasqueradeCIDRs: the list is empty: traffic to every destination is masqueraded",
			},
		},
		{
			name: "the limit of one file counts the lists of all, without duplicates",
			files: map[string]string{
				"ip-masq-1": "cidrLimit: 3\nnonMasqueradeCIDRs: [10.0.0.0/8, 9.0.0.0/8]\n",
				"ip-masq-2": "nonMasqueradeCIDRs: [10.0.0.0/8]\nmasqueradeCIDRs: [10.1.0.0/16]\n",
			},
			want: with(func(c *Config) {
				c.CIDRLimit = 3
				c.NonMasqueradeCIDRs = prefixes("10.0.0.0/8", "9.0.0.0/8")
				c.MasqueradeCIDRs = prefixes("10.1.0.0/16")
			}),
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := directory(t, tt.files)
			result, err := Load(Options{Path: dir})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, result.Config, equal()); diff != "" {
				t.Errorf("Load (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.warnings, belowDirectory(result.Warnings, dir), equal()); diff != "" {
				t.Errorf("warnings (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDirectoryRefused(t *testing.T) {
	tests := []struct {
		name  string
		files map[string]string
		want  []string // below the directory
	}{
		{
			name: "one bad file among good ones",
			files: map[string]string{
				"ip-masq-1": "nonMasqueradeCIDRs: [10.0.0.0/8]\n",
				"ip-masq-2": "nonMasqueradeCIDRs:\n  - 10.0.0.0/8\n  - 10.0.0.1/8\n",
			},
			want: []string{`ip-masq-2:3: nonMasqueradeCIDRs: CIDR "10.0.0.1/8" is not aligned to a CIDR block, ip: "10.0.0.1" network: "10.0.0.0/8"`},
		},
		{
			name: "faults of all files at once",
			files: map[string]string{
				"ip-masq-2": `{"nonMasqueradeCIDRs": [null]}`,
				"ip-masq-1": "nonMasqueradeCIDRs:\n  - 10.0.0.0/8\n  - \n",
				"ip-masq-3": "nonMasqueradeCIDRs: ['']\n",
			},
			want: []string{
				"ip-masq-1:3: nonMasqueradeCIDRs: want a CIDR as a string, got null",
				"ip-masq-2:1: nonMasqueradeCIDRs: want a CIDR as a string, got null",
				`ip-masq-3:1: nonMasqueradeCIDRs: CIDR "" could not be parsed, invalid CIDR address: `,
			},
		},
		{
			name:  "a directory of that name",
			files: map[string]string{"ip-masq-dir/ip-masq": "", "ip-masq-file": ""},
			want:  []string{"ip-masq-dir: is a directory, ip-masq* must be files"},
		},
		{
			name: "values that do not agree",
			files: map[string]string{
				"ip-masq-1": "cidrLimit: 5\n",
				"ip-masq-2": "\nresyncInterval: 5s\n",
				"ip-masq-3": "cidrLimit: 6\nresyncInterval: 10s\n",
			},
			want: []string{
				"ip-masq-3:1: cidrLimit: 6 here, but 5 at DIR/ip-masq-1:1",
				"ip-masq-3:2: resyncInterval: 10s here, but 5s at DIR/ip-masq-2:2",
			},
		},
		{
			name: "too many together",
			files: map[string]string{
				"ip-masq-1": "cidrLimit: 2\nnonMasqueradeCIDRs: [10.0.0.0/8, 9.0.0.0/8]\n",
				"ip-masq-2": "masqueradeCIDRs: [10.1.0.0/16]\n",
			},
			want: []string{"ip-masq-1:2: nonMasqueradeCIDRs: the daemon can only accept up to 2 CIDRs (excluding link-local), but got 3 CIDRs (excluding link local)"},
		},
		{
			name: "too many, bad ones counted too",
			files: map[string]string{
				"ip-masq-1": "cidrLimit: 2\nnonMasqueradeCIDRs: [10.0.0.0/8, a]\n",
				"ip-masq-2": "nonMasqueradeCIDRs: [b]\n",
			},
			want: []string{
				`ip-masq-1:2: nonMasqueradeCIDRs: CIDR "a" could not be parsed, invalid CIDR address: a`,
				"ip-masq-1:2: nonMasqueradeCIDRs: the daemon can only accept up to 2 CIDRs (excluding link-local), but got 3 CIDRs (excluding link local)",
				`ip-masq-2:1: nonMasqueradeCIDRs: CIDR "b" could not be parsed, invalid CIDR address: b`,
			},
		},
		{
			name: "a prefix in the lists of two files",
			files: map[string]string{
				"ip-masq-1": "nonMasqueradeCIDRs: [9.0.0.0/8, 10.1.0.0/16]\n",
				"ip-masq-2": "masqueradeCIDRs: [10.1.0.0/16]\n",
			},
			want: []string{`ip-masq-2:1: masqueradeCIDRs: CIDR "10.1.0.0/16" is in nonMasqueradeCIDRs too, at DIR/ip-masq-1:1`},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := directory(t, tt.files)
			result, err := Load(Options{Path: dir})
			if diff := cmp.Diff(tt.want, belowDirectory(faultsOf(t, err), dir)); diff != "" {
				t.Errorf("faults (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(Result{}, result, equal()); diff != "" {
				t.Errorf("result (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDirectoryWithOddEntries(t *testing.T) {
	dir := directory(t, map[string]string{"elsewhere/config": "resyncInterval: 5s\n"})
	for name, target := range map[string]string{"ip-masq-gone": "nowhere", "ip-masq-link": "elsewhere/config"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	result, err := Load(Options{Path: dir})
	if err != nil || result.Config.ResyncInterval != 5*time.Second {
		t.Errorf("links: Load = %v, %v", result, err)
	}
	if err := os.Symlink("/dev/zero", filepath.Join(dir, "ip-masq-zero")); err != nil {
		t.Fatal(err)
	}
	_, err = Load(Options{Path: dir})
	if diff := cmp.Diff([]string{"ip-masq-zero: is not a regular file"}, belowDirectory(faultsOf(t, err), dir)); diff != "" {
		t.Errorf("faults (-want +got):\n%s", diff)
	}
}
