// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	// debounce is how long the watcher collects events before it reports them:
	// whoever flushes a table usually goes on to fill it.
	debounce = 200 * time.Millisecond

	// eventBuffer holds the events of a kube-proxy that writes some ten
	// thousand rules at once.
	eventBuffer = 8 << 20

	// remembered is how many restores of ours are known by their pid.
	remembered = 16
)

// watched says which events matter.
type watched struct {
	families []uint8             // nfgen_family
	chains   map[string][]string // by table; POSTROUTING among them
}

func (d *Datapath) watched() watched {
	w := watched{
		families: []uint8{unix.NFPROTO_IPV4},
		chains:   map[string][]string{tableNAT: {postrouting, d.options.Chain}},
	}
	if d.options.IPv6 {
		w.families = append(w.families, unix.NFPROTO_IPV6)
	}
	if d.options.DropInvalid {
		w.chains[tableMangle] = []string{postrouting, InvalidChain}
	}
	return w
}

// watcher reports what others do to the watched chains through nftables.
type watcher struct {
	watched watched
	changed chan<- struct{}
	socket  *os.File
	done    chan struct{}

	mutex sync.Mutex
	own   []uint32 // netlink ports of our latest restores
}

// newWatcher subscribes to nftables events of the calling thread's network
// namespace. Reports go to changed, which has room for one.
func newWatcher(what watched, changed chan<- struct{}) (*watcher, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open netfilter netlink: %w", err)
	}
	w := &watcher{watched: what, changed: changed, socket: os.NewFile(uintptr(fd), "nftables events"), done: make(chan struct{})}
	if err := subscribe(fd); err != nil {
		return nil, errors.Join(err, w.socket.Close())
	}
	go w.run()
	return w, nil
}

func subscribe(fd int) error {
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("bind netfilter netlink: %w", err)
	}
	// Only root of the machine may pass the limit; others get what it allows.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, eventBuffer) != nil {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, eventBuffer); err != nil {
			return fmt.Errorf("set buffer of nftables events: %w", err)
		}
	}
	err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return fmt.Errorf("subscribe to nftables events: %w", err)
	}
	return nil
}

// run reads events until the socket is closed. A report goes out a moment after
// the first event that asks for it, whatever comes in meanwhile.
func (w *watcher) run() {
	defer close(w.done)
	buffer := make([]byte, 1<<16)
	var pending bool
	for {
		n, err := w.receive(buffer)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			pending = false
			w.report()
			if w.socket.SetReadDeadline(time.Time{}) != nil {
				return
			}
			continue
		case err != nil && !errors.Is(err, unix.ENOBUFS):
			return // closed
		}
		// ENOBUFS: events are lost, and any may have been one of ours.
		if !pending && (err != nil || w.concerns(buffer[:n])) {
			pending = true
			if w.socket.SetReadDeadline(time.Now().Add(debounce)) != nil {
				return
			}
		}
	}
}

func (w *watcher) receive(buffer []byte) (n int, err error) {
	conn, err := w.socket.SyscallConn()
	if err != nil {
		return 0, err
	}
	var failed error
	err = conn.Read(func(fd uintptr) bool {
		n, _, failed = unix.Recvfrom(int(fd), buffer, 0)
		for errors.Is(failed, unix.EINTR) {
			n, _, failed = unix.Recvfrom(int(fd), buffer, 0)
		}
		return !errors.Is(failed, unix.EAGAIN)
	})
	return max(n, 0), errors.Join(err, failed)
}

func (w *watcher) report() {
	select {
	case w.changed <- struct{}{}:
	default: // one report is waiting, and it means the same
	}
}

// concerns reports whether events touch a watched chain by another's hand.
func (w *watcher) concerns(events []byte) bool {
	messages, err := syscall.ParseNetlinkMessage(events)
	if err != nil {
		return true
	}
	return slices.ContainsFunc(messages, func(m syscall.NetlinkMessage) bool {
		return !w.isOwn(m.Header.Pid) && w.touches(m)
	})
}

// touches reads one message: struct nfgenmsg, then attributes. Events of rules
// are enough: neither a watched chain nor its table can go without its rules,
// and the kernel tells of each.
func (w *watcher) touches(m syscall.NetlinkMessage) bool {
	const newRule, delRule = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWRULE, unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELRULE
	if m.Header.Type != newRule && m.Header.Type != delRule || len(m.Data) < nl.SizeofNfgenmsg ||
		!slices.Contains(w.watched.families, m.Data[0]) {
		return false
	}
	attributes := m.Data[nl.SizeofNfgenmsg:]
	chains := w.watched.chains[attribute(attributes, unix.NFTA_RULE_TABLE)]
	return slices.Contains(chains, attribute(attributes, unix.NFTA_RULE_CHAIN))
}

// attribute is the text of one netlink attribute (struct nlattr: length with
// header, type, then the value padded to four bytes), or "".
func attribute(attributes []byte, kind uint16) string {
	for len(attributes) >= unix.SizeofNlAttr {
		length := int(binary.NativeEndian.Uint16(attributes))
		if length < unix.SizeofNlAttr || length > len(attributes) {
			return ""
		}
		if binary.NativeEndian.Uint16(attributes[2:]) == kind {
			return strings.TrimRight(string(attributes[unix.SizeofNlAttr:length]), "\x00")
		}
		attributes = attributes[min((length+3)&^3, len(attributes)):]
	}
	return ""
}

// ignore has the watcher overlook what a process with this pid does. The
// programs leave their netlink port to the kernel, which takes the pid.
func (w *watcher) ignore(pid int) {
	if w == nil {
		return
	}
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.own = append(w.own, uint32(pid))
	w.own = w.own[max(0, len(w.own)-remembered):]
}

func (w *watcher) isOwn(port uint32) bool {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return slices.Contains(w.own, port)
}

func (w *watcher) close() error {
	if w == nil {
		return nil
	}
	err := w.socket.Close()
	<-w.done
	return err
}
