// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestFailedRestoreLeavesTheOldStateWhole: whatever happens to the program, the
// kernel has the old rules or the new ones, and an error says what happened.
func TestFailedRestoreLeavesTheOldStateWhole(t *testing.T) {
	tests := []struct{ name, script, want string }{
		{"swallows its input", "cat >/dev/null", "exited 0, but what it was given is not there"},
		{"does not read its input", "exit 0", "exited 0, but what it was given is not there"},
		{"killed before", "kill -9 $$", "signal: killed"},
		{"killed in the middle", `exec 3<&0; (head -n 3 <&3; sleep 0.5) | "$REAL" "$@" & sleep 0.2; kill -9 $$`, "signal: killed"},
		{"gets half of its input", `head -n 3 | "$REAL" "$@"`, "COMMIT expected"},
		{"gets a bad line", `sed 's/^COMMIT/-A IP-MASQ-AGENT -j NOSUCHTARGET\nCOMMIT/' | "$REAL" "$@"`, "NOSUCHTARGET"},
		{"hangs", "sleep 60", "deadline exceeded"},
	}
	eachMode(t, func(t *testing.T, n *node, m mode) {
		d := n.datapath(n.options())
		n.sync(d, defaultPolicy())
		want := n.save(m, ipv4, tableNAT)
		path := os.Getenv("PATH")
		for _, tt := range tests {
			t.Run(tt.name, func(t *testing.T) {
				fakeProgram(t, n.tool(m, ipv4).program("-restore"), tt.script)
				err := n.ns.Do(func() error {
					limit := 20 * time.Second
					if tt.name == "hangs" {
						limit = time.Second
					}
					ctx, cancel := context.WithTimeout(t.Context(), limit)
					defer cancel()
					return d.Sync(ctx, manyCIDRs(5), nil)
				})
				if err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("got error %v, want %q", err, tt.want)
				}
				if diff := cmp.Diff(want, n.save(m, ipv4, tableNAT)); diff != "" {
					t.Errorf("-want +got:\n%s", diff)
				}
			})
		}
		t.Setenv("PATH", path)
		n.sync(d, manyCIDRs(5))
		if got := n.save(m, ipv4, tableNAT); countLines(got, "-j RETURN") != 6 {
			t.Errorf("not in order again:\n%s", got)
		}
	})
}

// TestSyncIsBounded: a program that hangs, or whose child holds the pipes, does
// not hold the agent.
func TestSyncIsBounded(t *testing.T) {
	n := newNode(t)
	for _, script := range []string{"sleep 60", "sleep 60 & exec $REAL \"$@\""} {
		fakeProgram(t, "iptables-nft", script)
		hanging := n.tool(nft, ipv4)
		hanging.timeout = 300 * time.Millisecond
		started := time.Now()
		err := n.ns.Do(func() error {
			_, err := hanging.list(t.Context(), tableNAT, postrouting)
			return err
		})
		if took := time.Since(started); took > 5*time.Second || err == nil {
			t.Errorf("%s: error %v after %v", script, err, took)
		}
	}
}

// TestErrorTexts: what the programs say, in versions that are not here, too.
func TestErrorTexts(t *testing.T) {
	tests := []struct {
		stderr               string
		missing, unsupported bool
	}{
		{"iptables: No chain/target/match by that name.", true, false},
		{"iptables-restore: line 7 failed", false, false},
		{"iptables: Bad rule (does a matching rule exist in that chain?).", true, false},
		{"iptables v1.8.2 (nf_tables): Couldn't load target `IP-MASQ-AGENT':No such file or directory\n\nTry `iptables -h' …", true, false},
		{"iptables v1.8.9 (nf_tables): Chain 'IP-MASQ-AGENT' does not exist\nTry `iptables -h' …", true, false},
		{"iptables v1.8.9 (legacy): can't initialize iptables table `nat': Table does not exist (do you need to insmod?)", false, true},
		{"iptables v1.8.9 (nf_tables): Could not fetch rule set generation id: Invalid argument", false, true},
		{"iptables: Failed to initialize nft: Protocol not supported", false, true},
		{"iptables v1.8.9 (nf_tables): Could not fetch rule set generation id: Permission denied (you must be root)", false, false},
		{"iptables v1.8.9 (nf_tables): unknown option \"--wait\"", false, false},
	}
	for _, tt := range tests {
		err := &commandError{program: "iptables", stderr: tt.stderr, err: errors.New("exit status 1")}
		if isMissing(err) != tt.missing || isUnsupported(err) != tt.unsupported {
			t.Errorf("%s: missing %t, unsupported %t", tt.stderr, isMissing(err), isUnsupported(err))
		}
	}
}

// TestLostRaceIsExplained: "line 7 failed" is what busy legacy nodes log.
func TestLostRaceIsExplained(t *testing.T) {
	for stderr, want := range map[string]bool{
		"iptables-restore: line 7 failed":                         true,
		"iptables-restore: line 7 failed.":                        true,
		"ip6tables-restore: line 12 failed":                       true,
		"iptables-nft-restore: line 4 failed: Bad rule (does a …": false,
		"Permission denied":                                       false,
	} {
		err := &commandError{program: "iptables-legacy-restore", stderr: stderr, err: errors.New("exit status 1")}
		if got := strings.Contains(err.Error(), "/run/xtables.lock"); got != want {
			t.Errorf("%s: %v", stderr, err)
		}
	}
}

// TestLock: the legacy programs share a lock with kube-proxy.
func TestLock(t *testing.T) {
	hold := func(n *node, seconds string) {
		t.Helper()
		holder := n.ns.Command(t.Context(), "flock", "/run/xtables.lock", "sleep", seconds)
		if err := holder.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := holder.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
				t.Error(err)
			}
			_ = holder.Wait() // killed
		})
		time.Sleep(200 * time.Millisecond)
	}
	start := func(t *testing.T) (*node, *Datapath) {
		n := newNode(t)
		n.prefer(legacy)
		options := n.options()
		options.IPv6 = false
		return n, n.datapath(options)
	}
	t.Run("given back in time", func(t *testing.T) {
		n, d := start(t)
		hold(n, "2")
		n.sync(d, defaultPolicy())
	})
	t.Run("held", func(t *testing.T) {
		n, d := start(t)
		hold(n, "60")
		err := n.trySync(d, defaultPolicy())
		if err == nil || !strings.Contains(err.Error(), "another program held the xtables lock for 5 seconds") {
			t.Errorf("got %v", err)
		}
	})
}
