// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Shape is the kind of device that a second uplink is, see Options.Shape.
type Shape string

// The shapes. Kernels differ in which they have.
const (
	Veth       Shape = "" // eth1 itself
	Tun        Shape = "tun"
	Bridge     Shape = "bridge"
	VXLAN      Shape = "vxlan"
	VLAN       Shape = "vlan"
	TaggedVLAN Shape = "vlan with the tag in frames that arrive"
	AllTagged  Shape = "vlan with the tag in all frames" // the link below cannot put it there
	Bond       Shape = "bond"
	IPIP       Shape = "ipip" // IPv4 only
	SIT        Shape = "sit"
	GRE        Shape = "gre"
	IP6Tunnel  Shape = "ip6tnl"
	IP6GRE     Shape = "ip6gre"
	WireGuard  Shape = "wireguard"
)

// Names of a shaped uplink and of the router's end, and what its tunnels and
// VLANs run between: eth1 and node1, which are an uplink by themselves.
const (
	shapedName = "up1"
	shapedPeer = "down1"
	tunnelID   = 100
)

var underlay = [2]Pair{pair("172.31.0.10", "2001:db8:31::10"), pair("172.31.0.1", "2001:db8:31::1")}

// makeShape puts a device of the shape between node and router, on the pair eth1
// and node1, and gives the names of its ends.
func (l *Lab) makeShape() (node, router string, err error) {
	switch l.options.Shape {
	case Veth:
		return "eth1", "node1", nil
	case Tun:
		return shapedName, shapedPeer, l.connectTuns()
	case Bridge, Bond:
		return shapedName, "node1", l.makeMaster()
	}
	for i, end := range l.shapedEnds() {
		if err := l.makeEnd(i, end); err != nil {
			return "", "", fmt.Errorf("make %s %s in %s: %w", l.options.Shape, end.name, end.ns.name, err)
		}
	}
	return shapedName, shapedPeer, nil
}

// makeEnd makes one end of a device that stands on another. The node has a gateway
// through that one, too, which makes it an uplink as well.
func (l *Lab) makeEnd(i int, end shapedEnd) error {
	if err := end.ns.assign(end.under, underlay[i].V4.String()+"/24", underlay[i].V6.String()+"/64"); err != nil {
		return err
	}
	if i == 0 {
		if err := end.ns.route(end.under, "172.31.1.0/24 "+underlay[1].V4.String()); err != nil {
			return err
		}
	}
	if l.options.Shape == AllTagged {
		if err := end.ns.turnVLANOff(end.under); err != nil {
			return err
		}
	}
	link, err := l.shaped(i, end)
	if err != nil {
		return err
	}
	if err := end.ns.handle.LinkAdd(link); err != nil {
		return err
	}
	if l.options.Shape == WireGuard {
		if err := end.ns.configureWireGuard(end.name, i); err != nil {
			return err
		}
	}
	return end.ns.setUp(end.name)
}

// shapedEnd is one end of a shaped uplink.
type shapedEnd struct {
	ns          *Namespace
	name, under string
}

func (l *Lab) shapedEnds() []shapedEnd {
	return []shapedEnd{{l.Node, shapedName, "eth1"}, {l.Router, shapedPeer, "node1"}}
}

// shaped is the device of one end.
func (l *Lab) shaped(i int, end shapedEnd) (netlink.Link, error) {
	under, err := end.ns.handle.LinkByName(end.under)
	if err != nil {
		return nil, err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = end.name
	ip := func(a netip.Addr) net.IP { return a.AsSlice() }
	here, there := underlay[i], underlay[1-i]
	switch l.options.Shape {
	case VLAN, TaggedVLAN, AllTagged:
		attrs.ParentIndex = under.Attrs().Index
		reorder := l.options.Shape == VLAN || i == 1 // the router's is the usual kind
		return &netlink.Vlan{LinkAttrs: attrs, VlanId: tunnelID, VlanProtocol: netlink.VLAN_PROTOCOL_8021Q, ReorderHdr: &reorder}, nil
	case VXLAN:
		return &netlink.Vxlan{LinkAttrs: attrs, VxlanId: tunnelID, SrcAddr: ip(here.V4), Group: ip(there.V4), Port: 4789}, nil
	case IPIP:
		return &netlink.Iptun{LinkAttrs: attrs, Local: ip(here.V4), Remote: ip(there.V4)}, nil
	case SIT:
		return &netlink.Sittun{LinkAttrs: attrs, Local: ip(here.V4), Remote: ip(there.V4)}, nil
	case GRE:
		return &netlink.Gretun{LinkAttrs: attrs, Local: ip(here.V4), Remote: ip(there.V4)}, nil
	case IP6GRE:
		return &netlink.Gretun{LinkAttrs: attrs, Local: ip(here.V6), Remote: ip(there.V6)}, nil
	case IP6Tunnel:
		return &netlink.Ip6tnl{LinkAttrs: attrs, Local: ip(here.V6), Remote: ip(there.V6)}, nil
	case WireGuard:
		return &netlink.Wireguard{LinkAttrs: attrs}, nil
	}
	return nil, fmt.Errorf("no shape %q", l.options.Shape)
}

// makeMaster makes eth1 the port of a bridge or a bond.
func (l *Lab) makeMaster() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = shapedName
	var master netlink.Link = &netlink.Bridge{LinkAttrs: attrs}
	if l.options.Shape == Bond {
		bond := netlink.NewLinkBond(attrs)
		bond.Mode = netlink.BOND_MODE_ACTIVE_BACKUP
		bond.Miimon = 100
		master = bond
	}
	if err := l.Node.handle.LinkAdd(master); err != nil {
		return fmt.Errorf("add %s: %w", l.options.Shape, err)
	}
	port, err := l.Node.handle.LinkByName("eth1")
	if err != nil {
		return err
	}
	if err := l.Node.handle.LinkSetDown(port); err != nil { // as a bond wants it
		return err
	}
	if err := l.Node.handle.LinkSetMaster(port, master); err != nil {
		return fmt.Errorf("join eth1 to %s: %w", l.options.Shape, err)
	}
	return errors.Join(l.Node.setUp("eth1"), l.Node.setUp(shapedName))
}

// connectTuns makes two tun devices and carries packets between them.
func (l *Lab) connectTuns() error {
	var files []*os.File
	for _, end := range l.shapedEnds() {
		err := end.ns.Do(func() error {
			file, err := openTun(end.name)
			if err == nil {
				files = append(files, file)
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("make tun %s in %s: %w", end.name, end.ns.name, err)
		}
		if err := end.ns.setUp(end.name); err != nil {
			return err
		}
	}
	l.cables = append(l.cables, files...)
	go carry(files[0], files[1])
	go carry(files[1], files[0])
	return nil
}

func openTun(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	request, err := unix.NewIfreq(name)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), name), nil
}

// carry copies packets until one of the files is closed.
func carry(from, to *os.File) {
	buffer := make([]byte, 1<<16)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		if _, err := to.Write(slices.Clip(buffer[:n])); errors.Is(err, os.ErrClosed) || errors.Is(err, syscall.EBADFD) {
			return
		}
	}
}
