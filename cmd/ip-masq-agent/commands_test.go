// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/lab"
	"ip-masq-agent/loader"
)

// shape replaces the values of a JSON text by their types.
func shape(t *testing.T, text string) any {
	t.Helper()
	var value any
	if err := json.Unmarshal([]byte(text), &value); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	var of func(any) any
	of = func(value any) any {
		switch v := value.(type) {
		case map[string]any:
			for key := range v {
				v[key] = of(v[key])
			}
			return v
		case []any:
			if len(v) > 0 {
				return []any{of(v[0])}
			}
			return v
		case string:
			return ""
		case float64:
			return 0
		case bool:
			return false
		}
		return value
	}
	return of(value)
}

func wantShape(t *testing.T, got, want string) {
	t.Helper()
	if diff := cmp.Diff(shape(t, want), shape(t, got)); diff != "" {
		t.Errorf("shape (-want +got):\n%s", diff)
	}
}

const statusShape = `{"version":"","datapath":"","backend":{"name":"","reason":""},
"interfaces":[{"name":"","attach":"","snat_v4":"","snat_v6":""}],"config":{"path":"","valid":true,"error":""},
"non_masquerade_cidrs":[""],"masquerade_cidrs":[],"nat":{"v4":{"entries":0,"capacity":0},"v6":{"entries":0,"capacity":0}},
"fast_path":{"enabled":true,"interfaces":[""],"packets":0},"drain":{"active":true,"entries":0},"warnings":[""]}`

func TestStatusOfARunningAgent(t *testing.T) {
	lab.RequireRoot(t)
	s := newStage(t)
	s.startAgent("--datapath=ebpf")
	got := s.run("status", "-o", "json")
	if got.code != exitFine {
		t.Fatalf("got %+v", got)
	}
	wantShape(t, got.stdout, statusShape)
	var status api.Status
	if err := json.Unmarshal([]byte(got.stdout), &status); err != nil {
		t.Fatal(err)
	}
	if status.Datapath != agent.EBPF || !status.Config.Valid || status.Version != thisVersion().Version {
		t.Errorf("got %+v", status)
	}

	path := status.Config.Path
	text := s.run("status").stdout
	text = strings.ReplaceAll(strings.ReplaceAll(text, path, "CONFIG"), status.Version, "VERSION")
	golden(t, "status.txt", text)
}

func TestStatusWithoutAgent(t *testing.T) {
	s := newStage(t)
	got := s.run("status", "-o", "json")
	var status api.Status
	if err := json.Unmarshal([]byte(got.stdout), &status); err != nil || got.code != exitFine {
		t.Fatalf("got %v, %+v", err, got)
	}
	if status.Datapath != "" || !cmp.Equal(status.Warnings, []string{agent.ErrNotRunning.Error()}) {
		t.Errorf("got %+v", status)
	}
	if strings.Contains(got.stdout, "null") {
		t.Errorf("want lists, got %s", got.stdout)
	}
	s.left = agent.IPTables
	got = s.run("status", "-o", "json")
	if err := json.Unmarshal([]byte(got.stdout), &status); err != nil || status.Datapath != agent.IPTables {
		t.Errorf("got %v, %+v", err, got)
	}
}

func TestExplainByARunningAgent(t *testing.T) {
	lab.RequireRoot(t)
	s := newStage(t)
	s.startAgent()
	got := s.run("explain", "--dst", "127.0.0.1", "-o", "json")
	if got.code != exitFine || got.stderr != "" {
		t.Fatalf("got %+v", got)
	}
	wantShape(t, got.stdout, `{"verdict":"","reason":"","cidr":"","snat_address":"","interface":""}`)
}

func TestExplainWithoutAgent(t *testing.T) {
	s := newStage(t)
	got := s.run("explain", "--dst", "127.0.0.1")
	if got.code != exitFine || !strings.Contains(got.stderr, "no ip-masq-agent runs") {
		t.Errorf("got %+v", got)
	}
	golden(t, "explain.txt", got.stdout)
}

func TestCleanup(t *testing.T) {
	lab.RequireRoot(t)
	s := newStage(t)
	for range 2 { // idempotent
		if got := s.run("cleanup"); got.code != exitFine {
			t.Errorf("got %+v", got)
		}
	}
	if got, want := s.events.String(), "clean up ebpf, clean up iptables, clean up ebpf, clean up iptables"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}

	s = newStage(t)
	s.startAgent()
	got := s.run("cleanup")
	if got.code != exitFailure || !strings.Contains(got.stderr, "end the agent first: another ip-masq-agent runs in this network namespace (pid") {
		t.Errorf("while an agent runs: got %+v", got)
	}
	if strings.Contains(s.events.String(), "clean up") {
		t.Errorf("cleaned up while an agent runs: %s", s.events)
	}
}

func TestSecondAgentExits(t *testing.T) {
	lab.RequireRoot(t)
	s := newStage(t)
	s.startAgent()
	before := s.events.String()
	got := s.once()
	if got.code != exitFailure || strings.Count(got.stderr, "another ip-masq-agent runs in this network namespace") != 1 {
		t.Errorf("got %+v", got)
	}
	if after := s.events.String(); after != before {
		t.Errorf("the second agent did something: %s", after)
	}
}

func TestValidate(t *testing.T) {
	put := func(text string) string {
		file := filepath.Join(t.TempDir(), "config")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	s := newStage(t)
	good := put("nonMasqueradeCIDRs: [10.0.0.0/8, fd00::/8]\nresyncInterval: 30s\n")
	got := s.run("validate", good)
	if got.code != exitFine || got.stderr != "" {
		t.Errorf("got %+v", got)
	}
	golden(t, "validate.yaml", got.stdout)
	if again := s.run("validate", put(got.stdout)); again.stdout != got.stdout {
		t.Errorf("its own output reads as\n%s", again.stdout)
	}
	wantShape(t, s.run("validate", "-o", "json", good).stdout, `{"nonMasqueradeCIDRs":[""],"masqueradeCIDRs":[],"cidrLimit":0,
"masqLinkLocal":true,"masqLinkLocalIPv6":true,"resyncInterval":""}`)

	bad := put("nonMasqueradeCIDRs: [10.0.0.1/8]\ncidrLimits: 3\n")
	got = s.run("validate", bad)
	want := `FILE:1: nonMasqueradeCIDRs: CIDR "10.0.0.1/8" is not aligned to a CIDR block, ip: "10.0.0.1" network: "10.0.0.0/8"
FILE:2: cidrLimits: `
	if text := strings.ReplaceAll(got.stderr, bad, "FILE"); got.code != exitFailure || !strings.HasPrefix(text, want) || got.stdout != "" {
		t.Errorf("got %+v, want\n%s", got, want)
	}
	if got := s.run("validate", put("nonMasqueradeCIDRs: []\n")); got.code != exitFine || !strings.Contains(got.stderr, "warning: ") {
		t.Errorf("an empty list: got %+v, want a warning", got)
	}
}

func TestDescribeBuild(t *testing.T) {
	vcs := []debug.BuildSetting{{Key: "vcs.revision", Value: "abc"}, {Key: "vcs.modified", Value: "true"}}
	for _, test := range []struct {
		name  string
		set   versionInfo
		build debug.BuildInfo
		want  versionInfo
	}{
		{"nothing is known", versionInfo{}, debug.BuildInfo{}, versionInfo{Version: "devel", Commit: "unknown"}},
		{"go build", versionInfo{}, debug.BuildInfo{Main: debug.Module{Version: "(devel)"}, Settings: vcs}, versionInfo{Version: "devel", Commit: "abc-dirty"}},
		{"go install", versionInfo{}, debug.BuildInfo{Main: debug.Module{Version: "v1.0.0"}}, versionInfo{Version: "v1.0.0", Commit: "unknown"}},
		{
			"release", versionInfo{Version: "v2.0.0", Commit: "def"},
			debug.BuildInfo{Main: debug.Module{Version: "v1.0.0"}, Settings: vcs},
			versionInfo{Version: "v2.0.0", Commit: "def"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := describeBuild(test.set, &test.build)
			if got.Go == "" {
				t.Error("no Go version")
			}
			got.Go = ""
			if got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}

func TestVersion(t *testing.T) {
	s := newStage(t)
	shown := s.run("version", "-o", "json").stdout
	wantShape(t, shown, `{"version":"","commit":"","go":"","clang":""}`)
	var got versionInfo
	if err := json.Unmarshal([]byte(shown), &got); err != nil || got.Clang != loader.Clang {
		t.Errorf("got %v, %+v, want clang %s", err, got, loader.Clang)
	}
	if a, b := s.run("version").stdout, s.run("--version").stdout; a != b || !strings.HasPrefix(a, "ip-masq-agent ") {
		t.Errorf("got %q and %q", a, b)
	}
}
