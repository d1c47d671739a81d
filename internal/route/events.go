// SPDX-License-Identifier: Apache-2.0

package route

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// eventBuffer is what the socket holds until it is read: hundreds of pods that
	// come or go at once, on a busy node. It takes no memory meanwhile.
	eventBuffer = 8 << 20

	largestRead = 64 << 10 // of messages that the kernel gives at once

	// gatherTime lets events come together before they are read: to wake up for
	// each of them costs far more than to look at it.
	gatherTime = 10 * time.Millisecond
)

// events is the socket on which the kernel tells of changes. It has one buffer
// for all that it reads: a node on which pods come and go sees thousands of
// events that do not concern it.
type events struct {
	file   *os.File
	conn   syscall.RawConn
	buffer []byte
}

// subscribe listens in the calling thread's network namespace.
func subscribe() (*events, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open event socket: %w", err)
	}
	e := &events{file: os.NewFile(uintptr(fd), "network events"), buffer: make([]byte, largestRead)}
	if err := e.join(fd); err != nil {
		return nil, errors.Join(fmt.Errorf("subscribe to link, address and route changes: %w", err), e.close())
	}
	return e, nil
}

func (e *events) join(fd int) (err error) {
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	for _, group := range []int{
		unix.RTNLGRP_LINK,
		unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
	} {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group); err != nil {
			return err
		}
	}
	// Best effort: the default buffer works too, it only overflows earlier.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, eventBuffer)
	e.conn, err = e.file.SyscallConn()
	return err
}

// receive waits for messages. Their data is valid until the next call. An error
// of the kernel's, ENOBUFS for one, does not end the subscription.
func (e *events) receive() ([]syscall.NetlinkMessage, error) {
	var n int
	var from unix.Sockaddr
	var failed error
	idle := false
	err := e.conn.Read(func(fd uintptr) bool {
		if idle {
			time.Sleep(gatherTime)
		}
		n, from, failed = unix.Recvfrom(int(fd), e.buffer, 0)
		idle = errors.Is(failed, unix.EAGAIN)
		return !idle
	})
	if err := errors.Join(err, failed); err != nil {
		return nil, err
	}
	if sender, ok := from.(*unix.SockaddrNetlink); !ok || sender.Pid != 0 {
		return nil, nil // not the kernel
	}
	return syscall.ParseNetlinkMessage(e.buffer[:n])
}

func (e *events) close() error { return e.file.Close() }
