// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Ping is an ICMP or ICMPv6 echo socket with an identifier of its own.
type Ping struct {
	ID uint16

	conn   net.PacketConn
	remote netip.Addr
	seq    uint16
}

// NewPing makes a socket for pings to remote. Identifier 0 leaves the choice
// to the kernel, the zero source too. The caller closes it.
func (ns *Namespace) NewPing(source, remote netip.Addr, id uint16) (*Ping, error) {
	p := &Ping{remote: remote}
	err := ns.Do(func() error { return p.open(source, id) })
	return p, inNamespace(err, ns)
}

func (p *Ping) open(source netip.Addr, id uint16) error {
	family, proto := unix.AF_INET, unix.IPPROTO_ICMP
	var address unix.Sockaddr = &unix.SockaddrInet4{Port: int(id)}
	switch {
	case p.remote.Is6() && source.IsValid():
		address = &unix.SockaddrInet6{Port: int(id), Addr: source.As16()}
	case p.remote.Is6():
		address = &unix.SockaddrInet6{Port: int(id)}
	case source.IsValid():
		address = &unix.SockaddrInet4{Port: int(id), Addr: source.As4()}
	}
	if p.remote.Is6() {
		family, proto = unix.AF_INET6, unix.IPPROTO_ICMPV6
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, proto)
	if err != nil {
		return fmt.Errorf("open echo socket: %w", err)
	}
	file := os.NewFile(uintptr(fd), "ping")
	defer func() { _ = file.Close() }()
	if err := unix.Bind(fd, address); err != nil {
		return fmt.Errorf("bind echo socket: %w", err)
	}
	if p.conn, err = net.FilePacketConn(file); err != nil {
		return err
	}
	p.ID = p.conn.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	return nil
}

// Echo sends an echo request with data and waits up to five seconds for the
// reply.
func (p *Ping) Echo(data []byte) error {
	p.seq++
	message := append(make([]byte, 8), data...)
	message[0] = 8
	if p.remote.Is6() {
		message[0] = 128
	}
	binary.BigEndian.PutUint16(message[6:], p.seq)
	if err := p.conn.SetDeadline(time.Now().Add(Patience(exchangeTimeout))); err != nil {
		return err
	}
	if _, err := p.conn.WriteTo(message, &net.UDPAddr{IP: p.remote.AsSlice()}); err != nil {
		return fmt.Errorf("ping %s: %w", p.remote, err)
	}
	answer := make([]byte, 64<<10)
	for {
		n, _, err := p.conn.ReadFrom(answer)
		if err != nil {
			return fmt.Errorf("wait for the reply of %s: %w", p.remote, err)
		}
		if n < 8 || binary.BigEndian.Uint16(answer[6:]) != p.seq {
			continue // the late answer to an earlier request
		}
		if !bytes.Equal(answer[8:n], data) {
			return fmt.Errorf("reply of %s differs from the request", p.remote)
		}
		return nil
	}
}

// Close closes the socket.
func (p *Ping) Close() error { return p.conn.Close() }
