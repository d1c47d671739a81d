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
// makes things happen sooner: ways are good for a second at most.
type pathWatcher struct {
	socket  *nl.NetlinkSocket
	path    *fastPath
	known   atomic.Pointer[[]int] // links that Sync has seen
	changed chan<- struct{}
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
	w := &pathWatcher{socket: socket, path: path, changed: changed, log: log, end: make(chan struct{})}
	w.known.Store(&[]int{})
	w.running.Go(w.listen)
	w.running.Go(w.look)
	return w, nil
}

func (w *pathWatcher) listen() {
	for {
		_, _, err := w.socket.Receive()
		switch {
		case errors.Is(err, os.ErrClosed):
			return
		case errors.Is(err, unix.EAGAIN): // closed while it waited, as the next call says
			continue
		case err != nil && !errors.Is(err, unix.ENOBUFS):
			w.log.Warn("routes are not watched for the fast path any more, it follows them within a second", "error", err)
			return
		}
		if err := w.path.forget(); err != nil {
			w.log.Warn("the fast path follows changed routes within a second only", "error", err)
		}
		select {
		case <-time.After(pathQuiet):
		case <-w.end:
		}
	}
}

// look finds links that flows have begun to come from.
func (w *pathWatcher) look() {
	ticker := time.NewTicker(lookInterval)
	defer ticker.Stop()
	for {
		select {
		case <-w.end:
			return
		case <-ticker.C:
		}
		now, err := w.path.announced()
		if err != nil || slices.Equal(now, *w.known.Load()) {
			continue
		}
		select {
		case w.changed <- struct{}{}:
		default:
		}
	}
}

func (w *pathWatcher) stop() {
	close(w.end)
	w.socket.Close()
	w.running.Wait()
}
