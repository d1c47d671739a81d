// SPDX-License-Identifier: Apache-2.0

package route

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

const (
	quietTime  = 50 * time.Millisecond  // events that follow each other sooner are taken together
	maxDelay   = 500 * time.Millisecond // but none waits longer than this
	retryDelay = time.Second            // after a failure of the kernel's answer
	resyncTime = time.Minute            // some sysctls change the choice of an address without an event
)

// Options of a Tracker.
type Options struct {
	// Interfaces are the names or globs (path.Match) of the uplinks. Empty: they
	// are found by their routes.
	Interfaces []string

	// Log is optional.
	Log *slog.Logger
}

// Tracker follows the node's uplinks and addresses.
//
// Links are kept up to date from the events themselves; addresses and routes are
// listed again when an event says that they could matter. A pod that comes or
// goes is an event about a link that is no uplink, and costs no listing.
type Tracker struct {
	log      *slog.Logger
	patterns []string
	conn     *conn
	events   *events
	wake     chan struct{}
	changed  chan struct{}
	current  atomic.Pointer[Snapshot]

	mu     sync.Mutex // guards what events write
	links  map[int]link
	served map[int]bool
	gone   map[int]bool // links that went since refresh took the others
	stale  stale

	// Only refresh uses these.
	addresses map[int][]address
	uses      map[int]routeUse
	unmatched map[string]bool
	torn      stale
}

// stale says what has to be listed again.
type stale uint8

const (
	staleLinks stale = 1 << iota
	staleAddresses
	staleRoutes
	staleAll = staleLinks | staleAddresses | staleRoutes
)

// NewTracker opens its sockets in the calling thread's network namespace and
// takes the first snapshot. A malformed glob is an error; one that matches no
// link is not.
func NewTracker(o Options) (*Tracker, error) {
	for _, p := range o.Interfaces {
		if _, err := path.Match(p, ""); err != nil {
			return nil, fmt.Errorf("interface %q: %w", p, err)
		}
	}
	t := &Tracker{
		log:       o.Log,
		patterns:  o.Interfaces,
		wake:      make(chan struct{}, 1),
		changed:   make(chan struct{}, 1),
		stale:     staleAll,
		gone:      map[int]bool{},
		unmatched: map[string]bool{},
	}
	if t.log == nil {
		t.log = slog.New(slog.DiscardHandler)
	}
	var err error
	if t.conn, err = dial(); err != nil {
		return nil, err
	}
	if t.events, err = subscribe(); err != nil {
		t.conn.close()
		return nil, err
	}
	if err := t.refresh(); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

// Snapshot is the latest state. It is never nil.
func (t *Tracker) Snapshot() *Snapshot { return t.current.Load() }

// Changed delivers after Snapshot has become a different one. Changes that
// nobody has received yet are delivered once.
func (t *Tracker) Changed() <-chan struct{} { return t.changed }

// Close gives up the sockets.
func (t *Tracker) Close() error {
	err := t.events.close()
	t.conn.close()
	if errors.Is(err, os.ErrClosed) { // by Run
		return nil
	}
	return err
}

// Run follows the kernel's events until ctx ends, and then returns nil. It can
// be called once.
func (t *Tracker) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return t.listen(ctx) })
	g.Go(func() error { return t.follow(ctx) })
	return g.Wait()
}

// listen takes events off the socket as fast as they come and notes what they
// change. When some are lost, everything is listed again.
func (t *Tracker) listen(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() { _ = t.events.close() })()
	faults := faultLog{log: t.log, text: "receive network events"}
	for {
		messages, err := t.events.receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, os.ErrClosed):
			return fmt.Errorf("receive network events: %w", err)
		case errors.Is(err, unix.ENOBUFS):
			t.log.Debug("network events lost, listing everything")
			t.invalidate(staleAll)
		case err != nil:
			faults.note(err)
			t.invalidate(staleAll)
			pause(ctx, retryDelay)
		default:
			faults.note(nil)
			t.note(messages)
		}
	}
}

// follow takes a new snapshot when events have settled.
func (t *Tracker) follow(ctx context.Context) error {
	resync := time.NewTicker(resyncTime)
	defer resync.Stop()
	faults := faultLog{log: t.log, text: "follow the network"}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-resync.C:
			t.invalidate(staleLinks | staleAddresses)
			continue
		case <-t.wake:
			settle(ctx, t.wake)
		}
		err := t.refresh()
		if ctx.Err() != nil {
			continue
		}
		if faults.note(err); err != nil {
			pause(ctx, retryDelay)
		}
	}
}

// invalidate marks what to list again, and wakes follow.
func (t *Tracker) invalidate(s stale) {
	t.mu.Lock()
	t.stale |= s
	t.mu.Unlock()
	t.awake()
}

func (t *Tracker) awake() { deliver(t.wake) }

// deliver leaves at most one value in the channel.
func deliver(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// note applies events to the links and marks what to list again.
func (t *Tracker) note(messages []syscall.NetlinkMessage) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range messages {
		if t.noteOne(m.Header.Type, m.Data) {
			t.awake()
		}
	}
}

// noteOne reports whether the event can make a difference.
func (t *Tracker) noteOne(kind uint16, data []byte) bool {
	switch kind {
	case unix.RTM_NEWLINK:
		l, ok := decodeLink(data)
		if !ok || t.links[l.index] == l {
			return false
		}
		t.links[l.index] = l
		return true
	case unix.RTM_DELLINK:
		l, ok := decodeLink(data)
		if !ok {
			return false
		}
		delete(t.links, l.index)
		delete(t.served, l.index)
		t.gone[l.index] = true
		return true
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		a, ok := decodeAddress(data)
		if !ok || isLinkLocal(a.local) {
			return false
		}
		t.stale |= staleAddresses
		return true
	case unix.RTM_NEWROUTE:
		r, ok := decodeRoute(data)
		if !ok || !t.matters(r) {
			return false
		}
		t.stale |= staleRoutes
		return true
	}
	return false // a route that goes takes no uplink away
}

// matters reports whether a new route can make an uplink of a link that is none.
func (t *Tracker) matters(r route) bool {
	if len(t.patterns) > 0 || !r.counts() {
		return false
	}
	for _, h := range r.hops {
		if !t.served[h.link] && (r.use(h)&carriesGateway != 0 || !podFacing(t.links[h.link])) {
			return true
		}
	}
	return r.indirect()
}

// refresh lists what is stale and makes a new snapshot of it. After an error
// the same is stale again.
func (t *Tracker) refresh() error {
	n, todo, err := t.take()
	if err == nil && todo&staleAddresses != 0 {
		err = t.listAddresses()
	}
	var found []int
	if err == nil {
		found, err = t.selectUplinks(n, todo&staleRoutes != 0)
	}
	if err != nil {
		t.invalidate(todo)
		return err
	}
	t.publish(n.snapshot(found, t.addresses))
	if t.torn != 0 {
		t.invalidate(t.torn)
		t.torn = 0
	}
	return nil
}

// tolerate lets a list pass that changed while the kernel gave it, every time we
// asked: what it shows is better than nothing, and it is asked for again soon.
func (t *Tracker) tolerate(err error, s stale) error {
	if errors.Is(err, nl.ErrDumpInterrupted) {
		t.torn |= s
		return nil
	}
	return err
}

// take returns the links as they are now and what else is stale. Events wait
// while the links are listed, so that none is applied to an older list.
func (t *Tracker) take() (node, stale, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	todo := t.stale
	t.stale = 0
	clear(t.gone)
	if todo&staleLinks != 0 {
		links, err := t.conn.links()
		if err := t.tolerate(err, staleLinks); err != nil {
			return node{}, todo, err
		}
		t.links = links
	}
	return node{links: maps.Clone(t.links), served: maps.Clone(t.served)}, todo, nil
}

func (t *Tracker) listAddresses() error {
	addrs, err := t.conn.addresses()
	if err := t.tolerate(err, staleAddresses); err != nil {
		return err
	}
	t.addresses = map[int][]address{}
	for _, a := range addrs {
		t.addresses[a.link] = append(t.addresses[a.link], a)
	}
	return nil
}

// selectUplinks decides which links are uplinks. No link comes into service on
// old evidence, since the kernel drops routes without telling.
func (t *Tracker) selectUplinks(n node, list bool) ([]int, error) {
	n.uses = t.uses
	found := n.uplinks(t.patterns)
	if len(t.patterns) == 0 && (list || n.news(found)) {
		uses, err := t.conn.uses()
		if err := t.tolerate(err, staleRoutes); err != nil {
			return nil, err
		}
		t.uses, n.uses = uses, uses
		found = n.uplinks(t.patterns)
	}
	t.warnUnmatched(n)

	t.mu.Lock()
	defer t.mu.Unlock()
	t.served = map[int]bool{}
	for _, index := range found {
		t.served[index] = !t.gone[index]
	}
	return found, nil
}

// publish makes the snapshot the current one if it says something new.
func (t *Tracker) publish(s *Snapshot) {
	old := t.current.Load()
	if s.Equal(old) {
		return
	}
	t.current.Store(s)
	t.log.Info("network", "uplinks", s.String())
	if old != nil {
		deliver(t.changed)
	}
}

// warnUnmatched tells once of each pattern that has no link.
func (t *Tracker) warnUnmatched(n node) {
	for _, p := range t.patterns {
		missing := len(n.uplinks([]string{p})) == 0
		if missing && !t.unmatched[p] {
			t.log.Warn("no such uplink", "interface", p)
		}
		t.unmatched[p] = missing
	}
}
