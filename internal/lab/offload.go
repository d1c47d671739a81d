// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ethtoolValue is struct ethtool_value of linux/ethtool.h.
type ethtoolValue struct{ command, data uint32 }

// ifreqData is struct ifreq with the union's ifr_data.
type ifreqData struct {
	name [unix.IFNAMSIZ]byte
	data unsafe.Pointer
	_    [24 - unsafe.Sizeof(uintptr(0))]byte
}

// turnOffloadsOff has the link's sender compute checksums and cut segments,
// and its receiver check and not join them.
func (ns *Namespace) turnOffloadsOff(link string) error {
	return ns.turnOff(link, unix.ETHTOOL_SGRO, unix.ETHTOOL_STSO, unix.ETHTOOL_SGSO, unix.ETHTOOL_SSG,
		unix.ETHTOOL_STXCSUM, unix.ETHTOOL_SRXCSUM)
}

// turnVLANOff has VLANs write their tags into frames by themselves.
func (ns *Namespace) turnVLANOff(link string) error { return ns.turnOff(link, unix.ETHTOOL_SFLAGS) }

func (ns *Namespace) turnOff(link string, commands ...uint32) error {
	return ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open ethtool socket: %w", err)
		}
		defer func() { _ = unix.Close(fd) }()
		for _, command := range commands {
			value := ethtoolValue{command: command}
			request := ifreqData{data: unsafe.Pointer(&value)}
			copy(request.name[:unix.IFNAMSIZ-1], link)
			if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
				return fmt.Errorf("turn offload %#x of %s in %s off: %w", command, link, ns.name, errno)
			}
		}
		return nil
	})
}
