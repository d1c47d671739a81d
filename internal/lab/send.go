// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Sender puts packets on an interface as if the host had sent them, past its
// IP stack.
type Sender struct {
	link *Link
	file *os.File
}

// NewSender makes a Sender, to be closed by the caller.
func (l *Link) NewSender() (*Sender, error) {
	s := &Sender{link: l}
	err := l.NS.Do(func() error {
		fd, err := packetSocket(0)
		if err != nil {
			return err
		}
		s.file = os.NewFile(uintptr(fd), "sender")
		return unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: l.Index})
	})
	if err != nil {
		return nil, fmt.Errorf("open sender on %s in %s: %w", l.Name, l.NS.name, err)
	}
	return s, nil
}

// Send sends IP packets to the link's next hop.
func (s *Sender) Send(packets ...[]byte) error {
	for _, packet := range packets {
		frame := append(append([]byte(nil), s.link.Next[:]...), s.link.MAC[:]...)
		kind := uint16(unix.ETH_P_IP)
		if packet[0]>>4 == 6 {
			kind = unix.ETH_P_IPV6
		}
		frame = binary.BigEndian.AppendUint16(frame, kind)
		if err := s.SendFrame(append(frame, packet...)); err != nil {
			return err
		}
	}
	return nil
}

// SendFrame sends an Ethernet frame.
func (s *Sender) SendFrame(frame []byte) error {
	if _, err := s.file.Write(frame); err != nil {
		return fmt.Errorf("send on %s in %s: %w", s.link.Name, s.link.NS.name, err)
	}
	return nil
}

// Close closes the socket.
func (s *Sender) Close() error { return s.file.Close() }

// Send sends IP packets to the link's next hop.
func (l *Link) Send(packets ...[]byte) error {
	s, err := l.NewSender()
	if err != nil {
		return err
	}
	return errors.Join(s.Send(packets...), s.Close())
}

func packetSocket(protocol uint16) (int, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(networkOrder(protocol)))
	if err != nil {
		return 0, fmt.Errorf("open packet socket: %w", err)
	}
	return fd, nil
}

func networkOrder(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}
