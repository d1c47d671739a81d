// SPDX-License-Identifier: Apache-2.0

// Command probe is what runs in the test's pods and outside of the cluster: it
// tells whom it sees.
//
//	probe pause              waits; pods' sandboxes run it
//	probe serve PORT         answers each message, TCP or UDP, with its source
//	probe ask PROTO ADDRESS  asks a server and prints whom it saw
//	probe talk ADDRESS       keeps asking: by one TCP and one UDP flow that stay
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
	case len(args) == 3 && args[0] == "ask":
		seen, err := ask(args[1], args[2])
		if err == nil {
			fmt.Println(seen)
		}
		return err
	case len(args) == 2 && args[0] == "talk":
		talk(ctx, args[1])
		return nil
	}
	return errors.New("usage: probe pause | serve PORT | ask PROTO ADDRESS | talk ADDRESS")
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
func talk(ctx context.Context, address string) {
	last := make(map[string]string)
	report := func(way, now string) {
		if last[way] != now {
			last[way] = now
			fmt.Println(way, now)
		}
	}
	open := make(map[string]net.Conn)
	for ctx.Err() == nil {
		for _, network := range []string{"tcp", "udp"} {
			if seen, err := ask(network, address); err != nil {
				report("new "+network, "failed: "+err.Error())
			} else {
				host, _, _ := net.SplitHostPort(seen)
				report("new "+network, host)
			}
			report("open "+network, keepAsking(open, network, address))
		}
		select {
		case <-ctx.Done():
		case <-time.After(interval):
		}
	}
}

// keepAsking asks by the open flow of a network, or opens it.
func keepAsking(open map[string]net.Conn, network, address string) string {
	if open[network] == nil {
		conn, err := net.DialTimeout(network, address, patience)
		if err != nil {
			return "failed to open: " + err.Error()
		}
		open[network] = conn
	}
	seen, err := exchange(open[network])
	if err != nil {
		_ = open[network].Close()
		open[network] = nil
		return "failed: " + err.Error()
	}
	return seen
}
