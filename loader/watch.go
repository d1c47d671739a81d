// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// watcher tells when somebody takes a filter or a qdisc from a link that has
// filters of ours. Of TCX links the kernel tells nothing: the next resync sees
// to them.
type watcher struct {
	socket  *nl.NetlinkSocket
	served  atomic.Pointer[map[int]bool] // by interface index: where to look
	changed chan<- struct{}
	log     *slog.Logger
	done    chan struct{}
}

// startWatcher listens in the calling thread's network namespace.
func startWatcher(changed chan<- struct{}, log *slog.Logger) (*watcher, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_TC)
	if err != nil {
		return nil, fmt.Errorf("subscribe to filter changes: %w", err)
	}
	w := &watcher{socket: socket, changed: changed, log: log, done: make(chan struct{})}
	w.served.Store(&map[int]bool{})
	go w.run()
	return w, nil
}

func (w *watcher) run() {
	defer close(w.done)
	for {
		messages, _, err := w.socket.Receive()
		switch {
		case errors.Is(err, os.ErrClosed):
			return
		case errors.Is(err, unix.EAGAIN): // closed while it waited, as the next call says
			continue
		case errors.Is(err, unix.ENOBUFS):
			deliver(w.changed) // what was lost may have been about us
		case err != nil:
			w.log.Warn("filters are not watched any more, the next resync sees what is done to them", "error", err)
			return
		}
		for _, m := range messages {
			if w.concerns(m.Header.Type, m.Data) {
				deliver(w.changed)
			}
		}
	}
}

// concerns reads the head of a struct tcmsg: family and padding, then the
// interface index.
func (w *watcher) concerns(kind uint16, data []byte) bool {
	if kind != unix.RTM_DELTFILTER && kind != unix.RTM_DELQDISC || len(data) < 8 {
		return false
	}
	return (*w.served.Load())[int(int32(binary.NativeEndian.Uint32(data[4:])))]
}

// deliver leaves word for whoever reads c next.
func deliver(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (w *watcher) stop() {
	w.socket.Close()
	<-w.done
}

// watch listens to what is done to the links that have filters of ours, if any.
func (d *Datapath) watch() {
	served := make(map[int]bool)
	for index, u := range d.uplinks {
		if u.attach() == "tc" {
			served[index] = true
		}
	}
	if d.watcher == nil {
		if len(served) == 0 || d.unwatched {
			return
		}
		var err error
		if d.watcher, err = startWatcher(d.changed, d.log); err != nil {
			d.unwatched = true
			d.log.Warn("filters are not watched, the next resync sees what is done to them", "error", err)
			return
		}
	}
	d.watcher.served.Store(&served)
}
