// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"time"

	"ip-masq-agent/internal/lab"
)

const (
	transferSize    = 15 << 20
	bareTransfer    = 4 << 20 // without offloads: a capture has room for as many packets
	shortTransfer   = 1 << 20
	transferPort    = 7778
	transferTimeout = 60 * time.Second
)

// transfer moves much data through one connection of the first pod.
func transfer(b *bench, is6 bool) {
	size := int64(transferSize)
	if !b.variant.offloads {
		size = bareTransfer
	}
	transferWith(b, is6, podA, size)
}

// transferWith moves data through one connection, first from the pod to the
// remote and then back.
func transferWith(b *bench, is6 bool, pod host, size int64) {
	b.Helper()
	at := netip.AddrPortFrom(b.lab.Remote.Addr(is6), transferPort)
	listener, err := b.namespace(outside).Listen(b.Context(), tcp, at)
	if err != nil {
		b.Fatal(err)
	}
	defer listener.Close()
	served := make(chan error, 1)
	go func() { served <- serveTransfer(listener, size) }()
	conn, err := b.namespace(pod).DialContext(b.Context(), tcp, netip.AddrPort{}, at.String())
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(lab.Patience(transferTimeout))); err != nil {
		b.Fatal(err)
	}
	if err := errors.Join(sendData(conn, 1, size), receiveData(conn, 2, size)); err != nil {
		b.Errorf("in the pod: %v", err)
	}
	conn.Close()
	if err := <-served; err != nil {
		b.Errorf("outside: %v", err)
	}
	b.checkOffloads(is6)
}

// checkOffloads checks that the data crossed the wire as the variant has it: traps
// 26 and 28 are about packets whose checksums and cutting are left to the device.
func (b *bench) checkOffloads(is6 bool) {
	b.Helper()
	to := netip.AddrPortFrom(b.lab.Remote.Addr(is6), transferPort)
	offloaded := b.wires[0].Select(func(p *lab.Packet) bool {
		return (p.Destination() == to || p.Source() == to) && (p.Partial || p.Length > 1500)
	})
	if len(offloaded) > 0 != b.variant.offloads {
		b.Errorf("%d packets of the transfer have partial checksums or are still to be cut", len(offloaded))
	}
}

func serveTransfer(listener net.Listener, size int64) error {
	conn, err := listener.Accept()
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(lab.Patience(transferTimeout))); err != nil {
		return err
	}
	return errors.Join(receiveData(conn, 1, size), sendData(conn, 2, size))
}

// data is the same for both ends and has no two parts alike.
func data(seed byte, size int64) io.Reader {
	return io.LimitReader(rand.NewChaCha8([32]byte{seed}), size)
}

func sendData(conn net.Conn, seed byte, size int64) error {
	if _, err := io.Copy(conn, data(seed, size)); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	return nil
}

func receiveData(conn net.Conn, seed byte, size int64) error {
	got, want := sha256.New(), sha256.New()
	if _, err := io.Copy(want, data(seed, size)); err != nil {
		return err
	}
	if n, err := io.CopyN(got, conn, size); err != nil {
		return fmt.Errorf("receive after %d bytes: %w", n, err)
	}
	if !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
		return errors.New("received other data than was sent")
	}
	return nil
}
