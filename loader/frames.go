// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"

	kernel "github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/route"
)

// linux514 is the kernel from which on what arrives through an IP tunnel begins
// with its own header. Before, TC programs see the outer headers in front.
const linux514 = 5<<16 | 14<<8

// Readable is an error where the programs would not find the IP header in the
// link's frames, so that Sync refuses it.
func Readable(link route.Uplink) error {
	why := ""
	switch {
	case link.HeaderLen == route.UnknownHeader && link.Type == unix.ARPHRD_ETHER:
		why = "as the VLAN below keeps its tags in them (reorder_hdr off)"
	case link.HeaderLen == route.UnknownHeader:
		why = fmt.Sprintf("as they are of link type %d", link.Type)
	case isTunnel(link) && olderThan(linux514):
		why = "before Linux 5.14, as it is an IP tunnel"
	default:
		return nil
	}
	return fmt.Errorf("its frames cannot be read %s: what leaves through it is not masqueraded; name other uplinks with --interfaces", why)
}

// isTunnel reports whether the link is one of the kernel's IP and GRE tunnels.
func isTunnel(link route.Uplink) bool {
	switch link.Type {
	case unix.ARPHRD_TUNNEL, unix.ARPHRD_TUNNEL6, unix.ARPHRD_SIT, unix.ARPHRD_IPGRE, unix.ARPHRD_IP6GRE:
		return true
	}
	return false
}

// olderThan is false where the kernel does not say its version.
func olderThan(version uint32) bool {
	running, err := kernel.LinuxVersionCode()
	return err == nil && running < version
}
