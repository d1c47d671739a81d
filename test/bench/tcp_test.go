// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"ip-masq-agent/test/bench/report"
)

const writeBytes = 256 << 10

// server is a host outside that connections from the pod lead to.
type server struct {
	sink netip.AddrPort // swallows what comes
	echo netip.AddrPort // sends it back
}

func (c *contender) serve(tb testing.TB) server {
	tb.Helper()
	return server{
		sink: c.listen(tb, func(conn net.Conn) {
			_, _ = io.CopyBuffer(onlyWriter{io.Discard}, onlyReader{conn}, make([]byte, writeBytes))
		}),
		echo: c.listen(tb, func(conn net.Conn) { _, _ = io.Copy(onlyWriter{conn}, onlyReader{conn}) }),
	}
}

// onlyReader and onlyWriter hide shortcuts, so that all is done by reading and
// writing.
type (
	onlyReader struct{ io.Reader }
	onlyWriter struct{ io.Writer }
)

func (c *contender) listen(tb testing.TB, handle func(net.Conn)) netip.AddrPort {
	tb.Helper()
	listener, err := c.Outside.Listen(tb.Context(), "tcp", netip.AddrPortFrom(c.Remote.V4, 0))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				handle(conn)
				conn.Close()
			}()
		}
	}()
	return listener.Addr().(*net.TCPAddr).AddrPort()
}

// tcp measures a figure for a while, from the pod.
func (c *contender) tcp(f report.Figure, to server, atLeast time.Duration) (value float64, err error) {
	measure := map[report.Figure]func(server, time.Duration) (float64, error){
		report.Throughput: throughput, report.Unaided: throughput, report.Latency: latency, report.Connections: connections,
	}[f]
	err = c.RoutedPods[0].Do(func() error {
		value, err = measure(to, atLeast)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("%s, %s: %w", c, f, err)
	}
	return value, c.forget()
}

// throughput is in Gbit/s.
func throughput(to server, atLeast time.Duration) (float64, error) {
	conn, err := dial(to.sink)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	buffer, sent, begin := make([]byte, writeBytes), 0, time.Now()
	for time.Since(begin) < atLeast {
		n, err := conn.Write(buffer)
		if err != nil {
			return 0, err
		}
		sent += n
	}
	if err := conn.CloseWrite(); err != nil {
		return 0, err
	}
	if _, err := conn.Read(buffer); !errors.Is(err, io.EOF) {
		return 0, fmt.Errorf("wait until all has come: %w", err)
	}
	return float64(sent) * 8 / time.Since(begin).Seconds() / 1e9, nil
}

// latency is the time that an octet there and back takes, in microseconds.
func latency(to server, atLeast time.Duration) (float64, error) {
	conn, err := dial(to.echo)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	asked, begin := 0, time.Now()
	for time.Since(begin) < atLeast {
		if err := ask(conn); err != nil {
			return 0, err
		}
		asked++
	}
	return float64(time.Since(begin).Microseconds()) / float64(asked), nil
}

// connections is how many a second are opened, used for an octet there and
// back, and closed.
func connections(to server, atLeast time.Duration) (float64, error) {
	opened, begin := 0, time.Now()
	for time.Since(begin) < atLeast {
		conn, err := dial(to.echo)
		if err != nil {
			return 0, err
		}
		if err := errors.Join(ask(conn), conn.Close()); err != nil {
			return 0, err
		}
		opened++
	}
	return float64(opened) / time.Since(begin).Seconds(), nil
}

// dial is called in the pod's namespace.
func dial(to netip.AddrPort) (*net.TCPConn, error) {
	conn, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(to))
	if err != nil {
		return nil, err
	}
	return conn, conn.SetDeadline(time.Now().Add(time.Minute))
}

func ask(conn net.Conn) error {
	octet := make([]byte, 1)
	if _, err := conn.Write(octet); err != nil {
		return err
	}
	_, err := io.ReadFull(conn, octet)
	return err
}
