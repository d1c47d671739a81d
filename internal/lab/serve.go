// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const exchangeTimeout = 5 * time.Second

// Serve answers clients at an address of the namespace until the test ends and
// gives the address with its port. A TCP client is told in a first line which
// address it comes from, then all it sends comes back. A UDP client gets with
// every answer the line and what it sent.
func (ns *Namespace) Serve(tb testing.TB, network string, at netip.AddrPort) netip.AddrPort {
	tb.Helper()
	if strings.HasPrefix(network, "udp") {
		conn, err := ns.ListenPacket(tb.Context(), network, at)
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { _ = conn.Close() })
		go serveUDP(conn)
		return conn.LocalAddr().(*net.UDPAddr).AddrPort()
	}
	listener, err := ns.Listen(tb.Context(), network, at)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = listener.Close() })
	go serveTCP(listener)
	return listener.Addr().(*net.TCPAddr).AddrPort()
}

func serveUDP(conn net.PacketConn) {
	buffer := make([]byte, 64<<10)
	for {
		n, from, err := conn.ReadFrom(buffer)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error about an earlier answer
		}
		_, _ = conn.WriteTo(append([]byte(from.String()+"\n"), buffer[:n]...), from)
	}
}

func serveTCP(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = conn.Close() }()
			if _, err := fmt.Fprintln(conn, conn.RemoteAddr()); err == nil {
				_, _ = io.Copy(conn, conn)
			}
		}()
	}
}

// Conn is a connection to what Serve serves.
type Conn struct {
	net.Conn

	// Seen is the client's address as the server saw it first.
	Seen   netip.AddrPort
	Remote netip.AddrPort

	reader *bufio.Reader
	asked  int
}

// Dial connects to what Serve serves and exchanges a first message. The zero
// local address and port 0 leave the choice to the kernel.
func (ns *Namespace) Dial(ctx context.Context, network string, local, remote netip.AddrPort) (*Conn, error) {
	inner, err := ns.dialPort(ctx, network, local, remote)
	if err != nil {
		return nil, err
	}
	c := &Conn{Conn: inner, Remote: remote, reader: bufio.NewReaderSize(inner, 64<<10)}
	if c.isStream() {
		c.Seen, err = c.readSeen()
	} else {
		c.Seen, err = c.Ask()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("talk to %s %s: %w", network, remote, err), inner.Close())
	}
	return c, nil
}

// dialPort waits for a port that the process has just closed: a program that is
// being started elsewhere in it shares its sockets until its exec.
func (ns *Namespace) dialPort(ctx context.Context, network string, local, remote netip.AddrPort) (net.Conn, error) {
	for end := time.Now().Add(Patience(exchangeTimeout)); ; time.Sleep(time.Millisecond) {
		conn, err := ns.DialContext(ctx, network, local, remote.String())
		if !errors.Is(err, unix.EADDRNOTAVAIL) || time.Now().After(end) {
			return conn, err
		}
	}
}

// Ask exchanges a message and gives the client's address as the server sees it
// now. It fails if no answer comes within five seconds.
func (c *Conn) Ask() (netip.AddrPort, error) {
	c.asked++
	return c.Exchange(fmt.Sprintf("question %d\n", c.asked))
}

// Exchange is Ask with a text of the caller's.
func (c *Conn) Exchange(text string) (netip.AddrPort, error) {
	if err := c.SetDeadline(time.Now().Add(Patience(exchangeTimeout))); err != nil {
		return netip.AddrPort{}, err
	}
	if _, err := io.WriteString(c, text); err != nil {
		return netip.AddrPort{}, err
	}
	seen := c.Seen
	if !c.isStream() {
		var err error
		if seen, err = c.readSeen(); err != nil {
			return seen, err
		}
	}
	answer := make([]byte, len(text))
	if _, err := io.ReadFull(c.reader, answer); err != nil {
		return seen, err
	}
	if string(answer) != text {
		return seen, fmt.Errorf("answer differs from what was sent")
	}
	return seen, nil
}

func (c *Conn) readSeen() (netip.AddrPort, error) {
	if err := c.SetReadDeadline(time.Now().Add(Patience(exchangeTimeout))); err != nil {
		return netip.AddrPort{}, err
	}
	line, err := c.reader.ReadString('\n')
	if err != nil {
		return netip.AddrPort{}, err
	}
	return netip.ParseAddrPort(strings.TrimSuffix(line, "\n"))
}

func (c *Conn) isStream() bool { return strings.HasPrefix(c.RemoteAddr().Network(), "tcp") }

// Listen is net.Listen in the namespace.
func (ns *Namespace) Listen(ctx context.Context, network string, at netip.AddrPort) (net.Listener, error) {
	var listener net.Listener
	err := ns.Do(func() (err error) {
		listener, err = new(net.ListenConfig).Listen(ctx, network, at.String())
		return err
	})
	return listener, inNamespace(err, ns)
}

// ListenPacket is net.ListenPacket in the namespace.
func (ns *Namespace) ListenPacket(ctx context.Context, network string, at netip.AddrPort) (net.PacketConn, error) {
	var conn net.PacketConn
	err := ns.Do(func() (err error) {
		conn, err = new(net.ListenConfig).ListenPacket(ctx, network, at.String())
		return err
	})
	return conn, inNamespace(err, ns)
}

// DialContext is net.Dialer.DialContext in the namespace, from a local address
// that an earlier connection may still hold. remote has a literal IP address:
// a name would be looked up outside the namespace.
func (ns *Namespace) DialContext(ctx context.Context, network string, local netip.AddrPort, remote string) (net.Conn, error) {
	dialer := net.Dialer{Timeout: Patience(exchangeTimeout), Control: reuseAddress}
	switch {
	case !local.IsValid():
	case strings.HasPrefix(network, "tcp"):
		dialer.LocalAddr = net.TCPAddrFromAddrPort(local)
	default:
		dialer.LocalAddr = net.UDPAddrFromAddrPort(local)
	}
	var conn net.Conn
	err := ns.Do(func() (err error) {
		conn, err = dialer.DialContext(ctx, network, remote)
		return err
	})
	return conn, inNamespace(err, ns)
}

func reuseAddress(_, _ string, conn syscall.RawConn) error {
	var err error
	if controlErr := conn.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}); controlErr != nil {
		return controlErr
	}
	return err
}

func inNamespace(err error, ns *Namespace) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("in %s: %w", ns.name, err)
}
