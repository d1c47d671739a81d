// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/rlimit"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/portrange"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

// Options are what the datapath is made with. They stay for its life.
type Options struct {
	// PinPath is the directory on a bpffs where maps and links are pinned. It
	// is made if it is missing.
	PinPath string
	// IPv6 translates IPv6 too.
	IPv6 bool
	// RandomFully gives every flow a random port; otherwise a flow keeps its
	// port where it is free.
	RandomFully bool
	// ToPorts are the ports that flows may get. Optional: as netfilter does.
	ToPorts []portrange.Range
	// NodePorts are never given to flows, unless ToPorts covers them. Optional.
	NodePorts []portrange.Range
	// DropInvalid drops what cannot open a flow and belongs to none.
	DropInvalid bool
	// FastPath takes packets of open flows past the stack, where the kernel can
	// (Linux 6.6, with CAP_PERFMON).
	FastPath bool
	// NATTableSize is how many flows of a family fit.
	NATTableSize int
	// Log gets one line per change.
	Log *slog.Logger

	noTCX   bool           // for tests: do as on a kernel before 6.6
	formats map[int]format // for tests: of older layouts
}

// Datapath translates in TC programs on the node's uplinks.
type Datapath struct {
	opts     Options
	log      *slog.Logger
	spec     *ebpf.CollectionSpec
	maps     *maps
	families []*family
	counters counters
	sweeper  *sweeper
	events   *events
	fast     *fastPath
	changed  chan struct{}

	mu       sync.Mutex // guards what follows against Status and Stats
	features features
	tracking bool             // nf_conntrack was there when features were probed
	loose    bool             // as nf_conntrack_tcp_loose was then
	ending6  bool             // IPv6 is off, but flows of an agent before us go on
	uplinks  map[int]*uplink  // by interface index
	usable   map[outside]bool // where flows may live
	seeded   bool             // connections that were open before are noted
	ahead    []string         // warnings of programs before ours
	left     left             // what Sync wrote last
	repairs  uint64

	watcher   *watcher // nil: there are no filters to watch
	unwatched bool     // they cannot be watched
}

// New loads what needs no uplink: probes, maps, the sweep programs. The first
// Sync attaches. If the kernel or the rights lack something, the error is an
// *UnsupportedError that names all of it.
func New(opts Options) (*Datapath, error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, &UnsupportedError{Missing: []string{
			fmt.Sprintf("locked memory limit: %v; the container needs the capability BPF, and before kernel 5.11 SYS_RESOURCE", err),
		}}
	}
	if missing := checkKernel(); len(missing) > 0 {
		return nil, &UnsupportedError{Missing: missing}
	}
	if err := ensureBPFFS(opts.PinPath, opts.Log); err != nil {
		return nil, err
	}
	if err := own(opts.PinPath); err != nil {
		return nil, err
	}
	spec, err := bpf.LoadMasq()
	if err != nil {
		return nil, fmt.Errorf("read programs: %w", err)
	}
	if opts.formats == nil {
		opts.formats = formats()
	}
	d := &Datapath{
		opts:    opts,
		log:     opts.Log,
		spec:    spec,
		changed: make(chan struct{}, 1),
		uplinks: make(map[int]*uplink),
		left:    left{timeouts: make(map[string]uint32)},
	}
	if err := d.prepare(); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// prepare makes the parts of d that must be given back.
func (d *Datapath) prepare() (err error) {
	types := btf.NewCache()
	d.tracking, d.loose = isTracking(), isLoose()
	d.features = probe(d.spec, types)
	d.log.Info("kernel features", "features", d.features)
	if err := d.checkPerfmon(types); err != nil {
		return err
	}
	if missing := d.missingForFastPath(); len(missing) > 0 {
		return &UnsupportedError{Missing: missing}
	}
	if d.maps, err = openMaps(d.spec, d.opts); err != nil {
		return err
	}
	d.maps.types = types
	if d.ending6, err = d.endingIPv6(); err != nil {
		return err
	}
	if d.fast, err = newFastPath(d.maps, d.changed, d.opts); err != nil {
		return err
	}
	if d.families, err = newFamilies(d.spec, d.maps, d.opts.IPv6 || d.ending6); err != nil {
		return err
	}
	d.counters = counters{d.maps.Counters}
	d.sweeper = startSweeper(d.families, d.maps.Timeouts, d.counters, d.log)
	d.events, err = startEvents(d.maps.Events, d.log, d.sweeper.soon)
	return err
}

// endingIPv6 reports whether IPv6 is off while translations of it are live: off
// means that no new ones begin. The programs go on with them, until an agent
// starts that finds none.
func (d *Datapath) endingIPv6() (bool, error) {
	if d.opts.IPv6 {
		return false, nil
	}
	timeouts, err := readTimeouts(d.maps.Timeouts)
	if err != nil {
		return false, err
	}
	live, now := 0, monotonic()
	f := family{is6: true, flows: d.maps.FlowsV6}
	if err := f.eachFlow(func(e *flow) {
		if e.left(timeouts, now) > 0 {
			live++
		}
	}); err != nil {
		return false, fmt.Errorf("look for %s flows: %w", &f, err)
	}
	if live > 0 {
		d.log.Info("IPv6 is off: its open connections go on, no new one is translated", "flows", live)
	}
	return live > 0, nil
}

// Name is the value of --datapath that selects this datapath.
func (*Datapath) Name() string { return "ebpf" }

// Changed delivers when somebody took a filter of ours away. What else is done
// to links and maps by hand the next Sync finds by itself.
func (d *Datapath) Changed() <-chan struct{} { return d.changed }

// Sync makes maps and programs agree with policy and network. What new flows
// need is there before the programs that use it.
func (d *Datapath) Sync(ctx context.Context, policy *prefix.Policy, network *route.Snapshot) error {
	d.mu.Lock()
	defer d.mu.Unlock()

	needed := []struct {
		name string
		do   func() error
	}{
		{"set timeouts", d.syncTimeouts},
		{"set ports", d.syncPorts},
		{"set node addresses", func() error { return d.syncNodeAddresses(network) }},
		{"set CIDRs", func() error { return d.syncCIDRs(policy) }},
		{"learn open connections", func() error { return d.seed(policy, network) }},
		{"reserve what netfilter translates", func() error { return d.reserve(network) }},
		{"use new kernel features", d.syncFeatures},
	}
	for _, step := range needed {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	// A link that cannot be served must not keep the others' flows waiting.
	err := errors.Join(d.syncUplinks(network), d.syncFastPath(), d.keepPins())
	d.watch()
	d.maps.types = nil // megabytes, and a link that comes later can wait for them
	if err == nil {
		err = d.endTakeover()
	}
	d.settle()
	return errors.Join(err, d.endStrandedFlows(network))
}

// settle has flows be searched once the CIDRs are in place, unless programs run
// that use other maps of flows.
func (d *Datapath) settle() {
	changed := false
	for _, f := range d.families {
		changed = len(d.maps.before) == 0 && f.sticky.settle() || changed
	}
	if changed {
		d.sweeper.soon()
	}
}

// Close gives up handles and goroutines. The programs go on.
func (d *Datapath) Close() error {
	var errs []error
	if d.events != nil {
		errs = append(errs, d.events.stop())
	}
	if d.sweeper != nil {
		d.sweeper.stop()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.watcher != nil {
		d.watcher.stop()
	}
	if d.fast != nil {
		errs = append(errs, d.fast.close())
	}
	for _, u := range d.uplinks {
		errs = append(errs, u.close())
	}
	for _, f := range d.families {
		errs = append(errs, f.sweep.Close())
	}
	if d.maps != nil {
		errs = append(errs, d.maps.Close())
	}
	return errors.Join(errs...)
}
