// SPDX-License-Identifier: Apache-2.0

package route

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// enterNamespace moves the test into a new network namespace, in which lo is up.
// The thread is never unlocked, so that it dies with the test's goroutine, and
// the namespace with it.
func enterNamespace(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make network namespace: %v", err)
	}
	sysctl(t, "net/ipv6/conf/default/accept_dad", "0")
	ip(t, "link set lo up")
}

// ip runs lines of commands for iproute2 in the test's namespace.
func ip(t *testing.T, lines ...string) {
	t.Helper()
	batch(t, lines)
}

// ip6 is for those commands that do not show their family.
func ip6(t *testing.T, lines ...string) {
	t.Helper()
	batch(t, lines, "-6")
}

func batch(t *testing.T, lines []string, args ...string) {
	t.Helper()
	cmd := exec.Command("ip", append(args, "-batch", "-")...)
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("ip %q: %v\n%s", lines, err, out)
	}
}

func sysctl(t *testing.T, name, value string) {
	t.Helper()
	if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0); err != nil {
		t.Fatal(err)
	}
}

// track starts a tracker in the test's namespace.
func track(t *testing.T, o Options) *Tracker {
	t.Helper()
	tr := newTracker(t, o)
	run(t, tr)
	return tr
}

func newTracker(t *testing.T, o Options) *Tracker {
	t.Helper()
	tr, err := NewTracker(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	})
	return tr
}

func run(t *testing.T, tr *Tracker) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- tr.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// await waits until the snapshot is as wanted.
func await(t *testing.T, tr *Tracker, what string, ok func(*Snapshot) bool) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); !ok(tr.Snapshot()); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("no snapshot with %s, but %s", what, tr.Snapshot())
		}
	}
}

// barrier returns when everything that happened before has been taken in. It
// makes one change, to an address of lo.
func barrier(t *testing.T, tr *Tracker) {
	t.Helper()
	mark := netip.MustParseAddr("203.0.113.255")
	for has(mark, tr.Snapshot().Addresses) {
		mark = mark.Prev()
	}
	ip(t, "addr add "+mark.String()+"/32 dev lo")
	await(t, tr, mark.String(), func(s *Snapshot) bool { return has(mark, s.Addresses) })
}

func has(a netip.Addr, addrs []netip.Addr) bool { return slices.Contains(addrs, a) }

// names lists the uplinks.
func names(s *Snapshot) string {
	var names []string
	for _, u := range s.Uplinks {
		names = append(names, u.Name)
	}
	return strings.Join(names, " ")
}

func named(want string) func(*Snapshot) bool {
	return func(s *Snapshot) bool { return names(s) == want }
}

func uplink(t *testing.T, s *Snapshot, name string) *Uplink {
	t.Helper()
	for i := range s.Uplinks {
		if s.Uplinks[i].Name == name {
			return &s.Uplinks[i]
		}
	}
	t.Fatalf("%s is no uplink, but %q", name, names(s))
	return nil
}

// record is a log that the test can read.
type record struct{ lines chan string }

func newRecord() *record { return &record{lines: make(chan string, 1000)} }

func (r *record) Write(p []byte) (int, error) {
	r.lines <- string(p)
	return len(p), nil
}

func (r *record) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(r, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// all are the lines so far that contain part.
func (r *record) all(part string) []string {
	var found []string
	for {
		select {
		case line := <-r.lines:
			if strings.Contains(line, part) {
				found = append(found, line)
			}
		default:
			return found
		}
	}
}
