// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"ip-masq-agent/internal/lab"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

const testPinPath = "/sys/fs/bpf/ip-masq-agent"

// testWriter passes log lines to the test.
type testWriter struct{ tb testing.TB }

func (w testWriter) Write(line []byte) (int, error) {
	w.tb.Helper()
	w.tb.Logf("%s", line)
	return len(line), nil
}

func testOptions(tb testing.TB) Options {
	return Options{
		PinPath: testPinPath, IPv6: true, RandomFully: true, DropInvalid: true, NATTableSize: 4096,
		Log: slog.New(slog.NewTextHandler(testWriter{tb}, nil)),
	}
}

func testPolicy(keep ...string) *prefix.Policy {
	lists := prefix.Lists{LinkLocal: []netip.Prefix{netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("fe80::/10")}}
	for _, p := range keep {
		lists.NonMasquerade = append(lists.NonMasquerade, netip.MustParsePrefix(p))
	}
	return prefix.New(lists)
}

// start makes a datapath on the lab's node that lives until the test ends.
func start(tb testing.TB, l *lab.Lab, opts Options, policy *prefix.Policy) *Datapath {
	tb.Helper()
	var d *Datapath
	err := l.Node.Do(func() (err error) {
		if d, err = New(opts); err != nil {
			return err
		}
		return syncNow(d, policy)
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := d.Close(); err != nil {
			tb.Error(err)
		}
	})
	return d
}

// syncNow runs one Sync with what the node's network is now. It must be called
// inside the node's namespace.
func syncNow(d *Datapath, policy *prefix.Policy) error {
	tracker, err := route.NewTracker(route.Options{Log: d.log})
	if err != nil {
		return err
	}
	defer tracker.Close()
	return d.Sync(context.Background(), policy, tracker.Snapshot())
}

func TestTranslates(t *testing.T) {
	lab.RequireRoot(t)
	for _, conntrack := range []bool{false, true} {
		name := "without conntrack"
		if conntrack {
			name = "with conntrack"
		}
		t.Run(name, func(t *testing.T) {
			l := lab.New(t, lab.Options{Conntrack: conntrack})
			d := start(t, l, testOptions(t), testPolicy("10.0.0.0/8"))
			for _, network := range []string{"tcp", "udp"} {
				for _, remote := range []netip.Addr{l.Remote.V4, l.Remote.V6} {
					server := l.Outside.Serve(t, network, netip.AddrPortFrom(remote, 7777))
					ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
					conn, err := l.Pods[0].Dial(ctx, network, netip.AddrPort{}, server)
					cancel()
					if err != nil {
						t.Fatal(err)
					}
					seen, err := conn.Ask()
					if err != nil {
						t.Fatal(err)
					}
					t.Log(network, remote, seen)
					if lab.IsPod(seen.Addr()) {
						t.Errorf("%s to %s: outside saw the pod's address %s", network, remote, seen)
					}
				}
			}
			list, err := d.Translations()
			t.Logf("%+v %v", list, err)
			st, err := d.Stats()
			t.Logf("%+v %v", st, err)
		})
	}
}
