// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	// pathQuiet is the time between two times that flows learn their ways
	// again, however many routes change.
	pathQuiet = 50 * time.Millisecond
	// lookInterval is how soon the fast path begins for flows of another link.
	lookInterval = time.Second
)

// pathWatcher has flows learn their ways again when routes, rules, addresses or
// links change, and calls for a Sync when flows come from another link. It only
// makes things happen sooner, since ways are good for a second at most; but the
// MTU of a new route is known by it alone until the next Sync.
type pathWatcher struct {
	socket  *nl.NetlinkSocket
	path    *fastPath
	known   atomic.Pointer[[]int] // links that Sync has seen
	changed chan<- struct{}
	stale   chan struct{} // there has been an event
	log     *slog.Logger
	end     chan struct{}
	running sync.WaitGroup
}

// startPathWatcher listens in the calling thread's network namespace.
func startPathWatcher(path *fastPath, changed chan<- struct{}, log *slog.Logger) (*pathWatcher, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV4_IFADDR,
		unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return nil, fmt.Errorf("subscribe to route changes: %w", err)
	}
	w := &pathWatcher{socket: socket, path: path, changed: changed, stale: make(chan struct{}, 1), log: log, end: make(chan struct{})}
	w.known.Store(&[]int{})
	w.running.Go(w.listen)
	w.running.Go(w.follow)
	return w, nil
}

func (w *pathWatcher) listen() {
	for {
		messages, _, err := w.socket.Receive()
		switch {
		case errors.Is(err, os.ErrClosed):
			return
		case errors.Is(err, unix.EAGAIN): // closed while it waited, as the next call says
			continue
		case errors.Is(err, unix.ENOBUFS):
			deliver(w.changed) // the next Sync asks for what was lost
		case err != nil:
			w.log.Warn("routes are not watched for the fast path any more, it follows them within a second", "error", err)
			return
		}
		w.noteMTUs(messages)
		deliver(w.stale)
	}
}

// noteMTUs has packets keep to the MTUs of new routes at once.
func (w *pathWatcher) noteMTUs(messages []syscall.NetlinkMessage) {
	var mtu uint32
	for _, m := range messages {
		if m.Header.Type == unix.RTM_NEWROUTE {
			mtu = lesserMTU(mtu, routeMTU(m.Data))
		}
	}
	if mtu == 0 {
		return
	}
	if err := w.path.limit(mtu); err != nil {
		w.log.Warn("the fast path does not keep to the MTU of a new route", "mtu", mtu, "error", err)
	}
}

// follow acts on events, and finds links that flows have begun to come from.
func (w *pathWatcher) follow() {
	ticker := time.NewTicker(lookInterval)
	defer ticker.Stop()
	for {
		select {
		case <-w.end:
			return
		case <-w.stale:
			w.forget()
		case <-ticker.C:
			w.look()
		}
	}
}

func (w *pathWatcher) forget() {
	if err := w.path.forget(); err != nil {
		w.log.Warn("the fast path follows changed routes within a second only", "error", err)
	}
	select {
	case <-time.After(pathQuiet):
	case <-w.end:
	}
}

func (w *pathWatcher) look() {
	now, err := w.path.announced()
	if err == nil && !slices.Equal(now, *w.known.Load()) {
		deliver(w.changed)
	}
}

func (w *pathWatcher) stop() {
	close(w.end)
	w.socket.Close()
	w.running.Wait()
}
