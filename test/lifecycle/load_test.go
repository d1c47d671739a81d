// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"

	"ip-masq-agent/internal/lab"
)

// load is connections that pods open to outside and close, one after the other.
type load struct {
	opened, lost, refused, broken atomic.Int64
	wrong                         atomic.Pointer[netip.AddrPort] // seen from there
	last                          atomic.Pointer[error]
	end                           func()
}

// load opens connections in workers, each of them in turn by TCP and by UDP.
func (n *node) load(workers int) *load {
	n.t.Helper()
	servers := map[string]netip.AddrPort{"tcp": n.serve("tcp", n.Remote2.V4), "udp": n.serve("udp", n.Remote2.V4)}
	ctx, cancel := context.WithCancel(n.t.Context())
	l := &load{}
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for ctx.Err() == nil {
				for network, server := range servers {
					l.one(n.Pods[0], network, server)
				}
			}
		})
	}
	l.end = sync.OnceFunc(func() {
		cancel()
		all.Wait()
	})
	n.t.Cleanup(l.end)
	return l
}

// one opens a connection, asks once more, and closes it.
func (l *load) one(pod *lab.Pod, network string, server netip.AddrPort) {
	l.opened.Add(1)
	conn, err := pod.Dial(context.Background(), network, netip.AddrPort{}, server)
	if err != nil && l.mayLose(network) {
		conn, err = pod.Dial(context.Background(), network, netip.AddrPort{}, server)
	}
	if err != nil {
		l.refused.Add(1)
		l.last.Store(&err)
		return
	}
	defer conn.Close()
	seen, err := conn.Ask()
	if err != nil && l.mayLose(network) {
		seen, err = conn.Ask()
	}
	if err != nil || seen != conn.Seen {
		err = fmt.Errorf("%s connection seen from %s, before from %s: %w", network, seen, conn.Seen, err)
		l.broken.Add(1)
		l.last.Store(&err)
	}
	if lab.IsPod(conn.Seen.Addr()) {
		l.wrong.Store(&conn.Seen)
	}
}

// mayLose reports whether a protocol is one whose users ask again: a busy machine
// drops a datagram in a million at a full queue.
func (l *load) mayLose(network string) bool {
	l.lost.Add(1)
	return network == "udp"
}

// unharmed fails the test if a connection was, or had a pod's address.
func (n *node) unharmed(l *load) {
	n.t.Helper()
	n.untranslatedNone(l)
	if refused, broken := l.refused.Load(), l.broken.Load(); refused > 0 || broken > 0 {
		n.t.Errorf("of %d connections %d could not be opened, %d broke: %v", l.opened.Load(), refused, broken, *l.last.Load())
	}
}

// untranslatedNone fails the test if something left with a pod's address.
func (n *node) untranslatedNone(l *load) {
	n.t.Helper()
	n.noLeak()
	if wrong := l.wrong.Load(); wrong != nil {
		n.t.Errorf("a connection was seen from %s", wrong)
	}
}
