// SPDX-License-Identifier: Apache-2.0

// Command probe is what runs in the test's pods and outside of the cluster: it
// tells whom it sees.
//
//	probe pause              waits; pods' sandboxes run it
//	probe serve PORT         answers each message, TCP or UDP, with its source
//	probe ask WAY...         asks servers, by ways such as tcp/10.0.0.1:7777, and
//	                         prints a line for each: whom it saw, or what failed
//	probe talk ADDRESS...    keeps asking: by one TCP and one UDP flow that stay
//	                         open, and by new ones; prints whom the server saw
//	                         whenever that changes, and every failure
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

const (
	patience = 3 * time.Second        // for an answer
	interval = 100 * time.Millisecond // between questions of talk
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	switch {
	case len(args) == 1 && args[0] == "pause":
		<-ctx.Done()
		return nil
	case len(args) == 2 && args[0] == "serve":
		return serve(ctx, args[1])
	case len(args) > 1 && args[0] == "ask":
		return askAll(args[1:])
	case len(args) > 1 && args[0] == "talk":
		talk(ctx, args[1:])
		return nil
	}
	return errors.New("usage: probe pause | serve PORT | ask WAY [WAY...] | talk ADDRESS [ADDRESS...]")
}

// serve answers until ctx ends.
func serve(ctx context.Context, port string) error {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", ":"+port)
	if err != nil {
		return err
	}
	// One socket an address: a reply must come from where the question went.
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		return err
	}
	for _, address := range addresses {
		ip, ok := address.(*net.IPNet)
		if !ok || ip.IP.IsLinkLocalUnicast() {
			continue
		}
		socket, err := config.ListenPacket(ctx, "udp", net.JoinHostPort(ip.IP.String(), port))
		if err != nil {
			return err
		}
		go answerDatagrams(socket)
	}
	context.AfterFunc(ctx, func() { _ = listener.Close() })
	for {
		conn, err := listener.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		go answerLines(conn)
	}
}

func answerDatagrams(socket net.PacketConn) {
	buffer := make([]byte, 64)
	for {
		_, from, err := socket.ReadFrom(buffer)
		if err != nil {
			return
		}
		_, _ = socket.WriteTo([]byte(from.String()+"\n"), from)
	}
}

func answerLines(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	lines := bufio.NewScanner(conn)
	for lines.Scan() {
		if _, err := fmt.Fprintln(conn, conn.RemoteAddr()); err != nil {
			return
		}
	}
}

// askAll asks by each way, whatever becomes of the others.
func askAll(ways []string) error {
	for _, way := range ways {
		network, address, ok := strings.Cut(way, "/")
		if !ok {
			return fmt.Errorf("no way to ask: %s", way)
		}
		seen, err := ask(network, address)
		if err != nil {
			seen = "failed: " + err.Error()
		}
		fmt.Println(seen)
	}
	return nil
}

// ask asks once, by a flow of its own.
func ask(network, address string) (string, error) {
	conn, err := net.DialTimeout(network, address, patience)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	return exchange(conn)
}

// exchange asks and waits for the answer.
func exchange(conn net.Conn) (string, error) {
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if _, err := conn.Write([]byte("who\n")); err != nil {
		return "", err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return "", err
	}
	return line[:len(line)-1], nil
}

// talk asks in all ways until ctx ends.
func talk(ctx context.Context, addresses []string) {
	last := make(map[string]string)
	open := make(map[string]net.Conn)
	report := func(way, now string) {
		if last[way] != now {
			last[way] = now
			fmt.Println(way, now)
		}
	}
	for ctx.Err() == nil {
		for _, address := range addresses {
			for _, network := range []string{"tcp", "udp"} {
				way := network + "/" + address
				report("new "+way, askAnew(network, address))
				report("open "+way, keepAsking(open, network, address))
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(interval):
		}
	}
}

// askAnew gives the address that a server saw, without the port.
func askAnew(network, address string) string {
	seen, err := ask(network, address)
	if err != nil {
		return "failed: " + err.Error()
	}
	host, _, err := net.SplitHostPort(seen)
	if err != nil {
		return "failed: " + err.Error()
	}
	return host
}

// keepAsking asks by the open flow of a way, or opens it.
func keepAsking(open map[string]net.Conn, network, address string) string {
	way := network + "/" + address
	if open[way] == nil {
		conn, err := net.DialTimeout(network, address, patience)
		if err != nil {
			return "failed to open: " + err.Error()
		}
		open[way] = conn
	}
	seen, err := exchange(open[way])
	if err != nil {
		_ = open[way].Close()
		open[way] = nil
		return "failed: " + err.Error()
	}
	return seen
}
