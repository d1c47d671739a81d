// SPDX-License-Identifier: Apache-2.0

// Package agent is the reconcile loop: it keeps the datapath in agreement with
// the config and the node's network, tells how it fares, and answers on the
// control socket.
package agent

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/config"
	"ip-masq-agent/internal/httpserver"
	"ip-masq-agent/internal/route"
)

// stopTimeout is how long Run waits for what runs when its context ends. The
// promise is 5 s for the whole process.
const stopTimeout = 4 * time.Second

// Network is what the agent needs of a route.Tracker.
type Network interface {
	Run(ctx context.Context) error
	Snapshot() *route.Snapshot
	Changed() <-chan struct{}
	Path(dst, src netip.Addr) (route.Path, error)
}

// Build says which build of the agent this is.
type Build struct {
	Version   string
	Revision  string // of the source
	GoVersion string
}

// Options of an agent.
type Options struct {
	Build    Build
	Config   config.Options
	Datapath Datapath // the agent closes it
	Network  Network

	// Control is where commands are answered, from Listen. Optional.
	Control net.Listener

	// MetricsBindAddress is host:port. Empty or "0": neither metrics nor health.
	MetricsBindAddress string

	// Retire has the other datapath give way. It is called after the first
	// successful sync, so that translation never ceases, and again after later
	// ones until the other is gone. Optional.
	Retire func(context.Context, *route.Snapshot) (Retirement, error)

	// Readable is an error for an uplink that the eBPF datapath refuses. Optional.
	Readable func(route.Uplink) error

	Log *slog.Logger
}

// Retirement is how far the other datapath has given way.
type Retirement struct {
	Gone     bool      // it need not be asked again
	Drain    api.Drain // what it translates still
	Warnings []string  // what keeps it there
}

// Agent keeps one datapath in agreement with what is wanted.
type Agent struct {
	options  Options
	settings *settings
	loop     *runner
	beat     heartbeat
	metrics  *metrics
	watch    func(path string, log *slog.Logger) watchFunc

	mu   sync.Mutex
	last outcome
}

// watchFunc calls changed whenever the config has changed, until ctx ends.
type watchFunc func(ctx context.Context, changed func()) error

func watchConfig(path string, log *slog.Logger) watchFunc {
	return config.NewWatcher(path, log).Run
}

// New makes an agent. It touches nothing until Run or Once.
func New(o Options) *Agent {
	a := &Agent{
		options:  o,
		settings: newSettings(o.Config, o.Log),
		loop:     newRunner(),
		watch:    watchConfig,
	}
	a.metrics = newMetrics(a)
	return a
}

// Metrics gives the agent's metrics.
func (a *Agent) Metrics() prometheus.Gatherer { return a.metrics.registry }

// Resync asks for a sync now.
func (a *Agent) Resync() {
	a.options.Log.Info("resync asked for")
	a.loop.trigger()
}

// Run syncs until ctx ends, and then returns nil within stopTimeout: what the
// kernel runs stays. It fails only if the network can no longer be followed.
func (a *Agent) Run(ctx context.Context) error {
	a.beat.expect(syncTimeout)
	group, running := errgroup.WithContext(ctx)
	start := func(f func(context.Context)) {
		group.Go(func() error { f(running); return nil })
	}
	group.Go(func() error { return endedWith(running, a.options.Network.Run(running)) })
	// From here on no change of the config is missed: the loop reads it later.
	watch := a.watch(a.options.Config.Path, a.options.Log)
	start(func(ctx context.Context) { a.followConfig(ctx, watch) })
	start(a.forwardChanges)
	start(a.serveHTTP)
	start(a.serveControl)
	start(func(ctx context.Context) { a.loop.run(ctx, a.turn) })

	ended := make(chan error, 1)
	go func() { ended <- group.Wait() }()
	<-running.Done() // Network.Run failed, or ctx ended: nothing else ends by itself
	select {
	case err := <-ended:
		return a.close(err)
	case <-time.After(stopTimeout):
		a.options.Log.Warn("ending while a sync still runs", "waited", stopTimeout)
		return endedWith(ctx, context.Cause(running))
	}
}

// Once syncs once. A refused config is an error, though the defaults were
// synced then.
func (a *Agent) Once(ctx context.Context) error {
	_, err := a.turn(ctx)
	if err == nil {
		err = a.settings.view().fault
	}
	return a.close(err)
}

func (a *Agent) close(err error) error {
	if closeErr := a.options.Datapath.Close(); err == nil && closeErr != nil {
		a.options.Log.Warn("datapath not closed", "error", closeErr)
	}
	if err == nil {
		a.options.Log.Info("ip-masq-agent ends, the datapath stays in place")
	}
	return err
}

// endedWith is err, or nil where ctx has ended: that is no failure.
func endedWith(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// followConfig triggers the loop when the config changes. Where that fails, the
// resync interval still finds changes.
func (a *Agent) followConfig(ctx context.Context, watch watchFunc) {
	if err := endedWith(ctx, watch(ctx, a.loop.trigger)); err != nil {
		a.options.Log.Warn("config is not watched, changes come with the resync interval",
			"path", a.options.Config.Path, "error", err)
	}
}

// forwardChanges triggers the loop when the network or the datapath changed.
func (a *Agent) forwardChanges(ctx context.Context) {
	network, datapath := a.options.Network.Changed(), a.options.Datapath.Changed()
	for {
		select {
		case <-ctx.Done():
			return
		case _, open := <-network:
			if !open {
				network = nil
			}
		case _, open := <-datapath:
			if !open {
				datapath = nil
			}
		}
		a.loop.trigger()
	}
}

func (a *Agent) serveHTTP(ctx context.Context) {
	httpserver.Run(ctx, httpserver.Options{
		Address: a.options.MetricsBindAddress,
		Metrics: a.metrics.registry,
		Healthy: a.healthy,
		Ready:   a.ready,
		Log:     a.options.Log,
	})
}
