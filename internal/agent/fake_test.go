// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/config"
	"ip-masq-agent/internal/lab"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

// fakeDatapath records what it is asked for. Each sync ends as its script says.
type fakeDatapath struct {
	name    string
	changed chan struct{}
	sync    func(ctx context.Context, call int) error // optional

	mu       sync.Mutex
	policies []*prefix.Policy
	times    []time.Time
	closed   bool
	stats    api.Stats
	statsErr error
	status   api.DatapathStatus
	flows    []api.Translation
}

func newFakeDatapath() *fakeDatapath {
	return &fakeDatapath{name: IPTables, changed: make(chan struct{}, 1)}
}

func (d *fakeDatapath) Name() string { return d.name }

func (d *fakeDatapath) Sync(ctx context.Context, policy *prefix.Policy, _ *route.Snapshot) error {
	d.mu.Lock()
	d.policies = append(d.policies, policy)
	d.times = append(d.times, time.Now())
	call := len(d.policies)
	d.mu.Unlock()
	if d.sync == nil {
		return nil
	}
	return d.sync(ctx, call)
}

func (d *fakeDatapath) Plan(*prefix.Policy, *route.Snapshot) (string, error) { return "a plan\n", nil }
func (d *fakeDatapath) Changed() <-chan struct{}                             { return d.changed }
func (d *fakeDatapath) Stats() (api.Stats, error)                            { return d.stats, d.statsErr }
func (d *fakeDatapath) Status() (api.DatapathStatus, error)                  { return d.status, nil }
func (d *fakeDatapath) EachTranslation(visit func(api.Translation)) error {
	for _, flow := range d.flows {
		visit(flow)
	}
	return nil
}
func (d *fakeDatapath) Close() error { d.closed = true; return nil }

// syncs is how many syncs began.
func (d *fakeDatapath) syncs() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.policies)
}

// keeps are the non-masquerade prefixes of the last sync.
func (d *fakeDatapath) keeps() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return prefixList(d.policies[len(d.policies)-1].Lists().NonMasquerade)
}

// fakeNetwork is a node with one uplink.
type fakeNetwork struct {
	changed chan struct{}
	fails   chan error
	paths   map[netip.Addr]route.Path
}

func newFakeNetwork() *fakeNetwork {
	return &fakeNetwork{changed: make(chan struct{}, 1), fails: make(chan error, 1)}
}

func (n *fakeNetwork) Run(ctx context.Context) error {
	select {
	case err := <-n.fails:
		return err
	case <-ctx.Done():
		return nil
	}
}

func (n *fakeNetwork) Changed() <-chan struct{} { return n.changed }

func (n *fakeNetwork) Snapshot() *route.Snapshot {
	rule := func(prefix, address string) []route.AddressRule {
		return []route.AddressRule{{Prefix: netip.MustParsePrefix(prefix), Address: netip.MustParseAddr(address)}}
	}
	return &route.Snapshot{Uplinks: []route.Uplink{
		{Index: 2, Name: "eth0", Up: true, V4: rule("0.0.0.0/0", "192.0.2.1"), V6: rule("::/0", "2001:db8::1")},
		{Index: 3, Name: "eth1", Up: true},
		{Index: 4, Name: "eth2", Up: true, V4: rule("0.0.0.0/0", "192.0.2.99")},
	}, Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}}
}

func (n *fakeNetwork) Path(dst, _ netip.Addr) (route.Path, error) {
	if path, ok := n.paths[dst]; ok {
		return path, nil
	}
	return route.Path{}, errors.New("network is unreachable")
}

func testLogger(b *lab.Log) *slog.Logger {
	return slog.New(slog.NewTextHandler(b, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, attr slog.Attr) slog.Attr {
			if attr.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return attr
		},
	}))
}

// bench is an agent with all that it stands on.
type bench struct {
	*Agent
	t         *testing.T
	datapath  *fakeDatapath
	network   *fakeNetwork
	log       *lab.Log
	file      string
	rewritten chan struct{}
}

func newBench(t *testing.T, adjust ...func(*Options)) *bench {
	t.Helper()
	b := &bench{
		t:         t,
		datapath:  newFakeDatapath(),
		network:   newFakeNetwork(),
		log:       &lab.Log{},
		file:      filepath.Join(t.TempDir(), "ip-masq-agent"),
		rewritten: make(chan struct{}),
	}
	options := Options{
		Build:    Build{Version: "v1.2.3", Revision: "abc", GoVersion: "go1"},
		Config:   config.Options{Path: b.file},
		Datapath: b.datapath,
		Network:  b.network,
		Log:      testLogger(b.log),
	}
	for _, f := range adjust {
		f(&options)
	}
	b.Agent = New(options)
	// The real watcher sleeps in the kernel, where a bubble's clock stands still.
	b.watch = func(string, *slog.Logger) watchFunc {
		return func(ctx context.Context, changed func()) error {
			for {
				select {
				case <-ctx.Done():
					return nil
				case <-b.rewritten:
					changed()
				}
			}
		}
	}
	return b
}

// start runs the agent until the test ends, and lets it make its first turn.
func (b *bench) start() (stop func() error) {
	ctx, cancel := context.WithCancel(b.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	stop = sync.OnceValue(func() error { cancel(); return <-ended })
	b.t.Cleanup(func() { _ = stop() })
	synctest.Wait()
	return stop
}

// put writes the config without telling anyone, lines joined.
func (b *bench) put(lines ...string) {
	b.t.Helper()
	if err := os.WriteFile(b.file, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

// rewrite writes the config and lets the agent act on it.
func (b *bench) rewrite(lines ...string) {
	b.t.Helper()
	b.put(lines...)
	b.rewritten <- struct{}{}
	b.settle()
}

// settle lets a triggered turn be made.
func (b *bench) settle() { time.Sleep(minGap + settleTime); synctest.Wait() }

func (b *bench) wantKeeps(want string) {
	b.t.Helper()
	if got := b.datapath.keeps(); got != want {
		b.t.Errorf("the last sync kept %q, want %q", got, want)
	}
}

func (b *bench) wantSyncs(want int) {
	b.t.Helper()
	if got := b.datapath.syncs(); got != want {
		b.t.Errorf("got %d syncs, want %d", got, want)
	}
}

// wantLog compares what was logged since the last call.
func (b *bench) wantLog(lines ...string) {
	b.t.Helper()
	want := ""
	if len(lines) > 0 {
		want = strings.Join(lines, "\n") + "\n"
	}
	got := strings.ReplaceAll(b.log.Take(), b.file, "FILE")
	if got != want {
		b.t.Errorf("logged\n%swant\n%s", got, want)
	}
}
