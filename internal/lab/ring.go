// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	slotSize    = 2048
	slotCount   = 16384
	blockSize   = 64 << 10
	copyBuffer  = 64 << 20 // bytes of long frames that wait in the kernel
	longestCopy = 128 << 10

	// sizes of linux/if_packet.h
	slotHeaderLen = int(unsafe.Sizeof(unix.Tpacket2Hdr{}))
	packetTypeAt  = slotHeaderLen + int(unsafe.Offsetof(unix.RawSockaddrLinklayer{}.Pkttype))
)

// ring is a packet socket that copies each frame at the moment it passes. A
// plain one shares the frame with who sends it on, and a fragment's header
// that the next hop writes anew would be seen changed. Frames that do not fit
// a slot, which are never fragments, come through the socket all the same.
type ring struct {
	fd    int
	slots []byte
	next  int
	copy  []byte // of a long frame
}

// frame is what passed; its bytes are valid until the next one is taken.
type frame struct {
	at       time.Time
	bytes    []byte
	outgoing bool
	partial  bool // the transport checksum was left to the device
}

// newRing listens on an interface of the calling thread's network namespace.
func newRing(fd, ifindex int) (*ring, error) {
	for option, value := range map[int]int{unix.PACKET_VERSION: unix.TPACKET_V2, unix.PACKET_COPY_THRESH: 1} {
		if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, option, value); err != nil {
			return nil, fmt.Errorf("set packet option %d: %w", option, err)
		}
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, copyBuffer); err != nil {
		return nil, fmt.Errorf("set buffer: %w", err)
	}
	request := unix.TpacketReq{
		Block_size: blockSize, Block_nr: slotSize * slotCount / blockSize,
		Frame_size: slotSize, Frame_nr: slotCount,
	}
	if err := unix.SetsockoptTpacketReq(fd, unix.SOL_PACKET, unix.PACKET_RX_RING, &request); err != nil {
		return nil, fmt.Errorf("make ring: %w", err)
	}
	slots, err := unix.Mmap(fd, 0, slotSize*slotCount, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map ring: %w", err)
	}
	r := &ring{fd: fd, slots: slots, copy: make([]byte, longestCopy)}
	address := &unix.SockaddrLinklayer{Protocol: networkOrder(unix.ETH_P_ALL), Ifindex: ifindex}
	if err := unix.Bind(fd, address); err != nil {
		return nil, errors.Join(fmt.Errorf("bind: %w", err), r.close())
	}
	return r, nil
}

// take hands the next frame to use. False: there is none.
func (r *ring) take(use func(frame)) (bool, error) {
	slot := r.slots[r.next*slotSize : (r.next+1)*slotSize]
	header := (*unix.Tpacket2Hdr)(unsafe.Pointer(&slot[0]))
	status := atomic.LoadUint32(&header.Status)
	if status&unix.TP_STATUS_USER == 0 {
		return false, nil
	}
	f := frame{
		at:       time.Unix(int64(header.Sec), int64(header.Nsec)),
		bytes:    slot[header.Mac:][:header.Snaplen],
		outgoing: slot[packetTypeAt] == unix.PACKET_OUTGOING,
		partial:  status&unix.TP_STATUS_CSUMNOTREADY != 0,
	}
	var err error
	switch {
	case status&unix.TP_STATUS_COPY != 0:
		f.bytes, err = r.longFrame()
	case header.Snaplen < header.Len:
		err = fmt.Errorf("frame of %d bytes was cut", header.Len)
	}
	if err == nil {
		use(f)
	}
	atomic.StoreUint32(&header.Status, unix.TP_STATUS_KERNEL)
	r.next = (r.next + 1) % slotCount
	return true, err
}

func (r *ring) longFrame() ([]byte, error) {
	n, _, err := unix.Recvfrom(r.fd, r.copy, unix.MSG_DONTWAIT|unix.MSG_TRUNC)
	switch {
	case err != nil:
		return nil, fmt.Errorf("receive long frame: %w", err)
	case n > len(r.copy):
		return nil, fmt.Errorf("frame of %d bytes was cut", n)
	}
	return r.copy[:n], nil
}

// lost says how many frames found no room.
func (r *ring) lost() (int, error) {
	stats, err := unix.GetsockoptTpacketStats(r.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err != nil {
		return 0, fmt.Errorf("read statistics: %w", err)
	}
	return int(stats.Drops), nil
}

// close unmaps the slots. The descriptor is the caller's.
func (r *ring) close() error { return unix.Munmap(r.slots) }
