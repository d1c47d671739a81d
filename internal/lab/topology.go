// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
)

const defaultMTU = 1500

func (l *Lab) makeUplinks() error {
	if err := l.addUplink("eth0", "node0"); err != nil {
		return err
	}
	if err := l.Node.assign("eth0",
		"203.0.113.10/24", "203.0.113.11/24", "198.51.100.10/24",
		// Where nothing else decides, the kernel prefers the IPv6 address that came last.
		"2001:db8:113::11/64 deprecated", "2001:db8:51::10/64", "2001:db8:113::10/64",
	); err != nil {
		return err
	}
	if err := l.Router.assign("node0",
		"203.0.113.1/24", "198.51.100.1/24", "2001:db8:113::1/64", "2001:db8:51::1/64",
	); err != nil {
		return err
	}
	if err := l.Node.route("eth0",
		"0.0.0.0/0 203.0.113.1", "::/0 2001:db8:113::1",
		host(l.ViaSubnet2.V4)+" 198.51.100.1", host(l.ViaSubnet2.V6)+" 2001:db8:51::1",
	); err != nil {
		return err
	}
	if err := l.Router.route("node0",
		"10.244.0.0/16 203.0.113.10", "fd00:10:244::/48 2001:db8:113::10",
		host(l.VIP.V4)+" 203.0.113.10", host(l.VIP.V6)+" 2001:db8:113::10",
	); err != nil {
		return err
	}
	if !l.options.SecondUplink {
		return nil
	}
	return l.makeSecondUplink()
}

func (l *Lab) makeSecondUplink() error {
	if err := l.addUplink("eth1", "node1"); err != nil {
		return err
	}
	uplink, wire, err := l.makeShape()
	if err != nil {
		return err
	}
	if l.options.Shape == IPIP {
		return errors.Join(l.Node.assign(uplink, "192.0.2.10/24"), l.Router.assign(wire, "192.0.2.1/24"),
			l.Node.route(uplink, host(l.ViaUplink2.V4)+" 192.0.2.1"))
	}
	if err := l.Node.assign(uplink, "192.0.2.10/24", "2001:db8:2::10/64"); err != nil {
		return err
	}
	if err := l.Router.assign(wire, "192.0.2.1/24", "2001:db8:2::1/64"); err != nil {
		return err
	}
	return l.Node.route(uplink, host(l.ViaUplink2.V4)+" 192.0.2.1", host(l.ViaUplink2.V6)+" 2001:db8:2::1")
}

func (l *Lab) addUplink(name, wireName string) error {
	uplink, wire, err := l.connect(l.Node, name, l.Router, wireName, l.options.UplinkMTU)
	if err != nil {
		return err
	}
	l.Uplinks, l.Wires = append(l.Uplinks, uplink), append(l.Wires, wire)
	return nil
}

func (l *Lab) makeOutside() error {
	_, end, err := l.connect(l.Router, "out0", l.Outside, "eth0", l.options.OutsideMTU)
	if err != nil {
		return err
	}
	l.End = end
	if err := l.Router.assign("out0", "100.64.0.1/30", "2001:db8:64::1/64"); err != nil {
		return err
	}
	if err := l.Outside.assign("eth0", "100.64.0.2/30", "2001:db8:64::2/64"); err != nil {
		return err
	}
	if err := l.Outside.route("eth0", "0.0.0.0/0 100.64.0.1", "::/0 2001:db8:64::1"); err != nil {
		return err
	}
	for _, addr := range l.outside() {
		if err := l.Outside.assign("lo", host(addr)); err != nil {
			return err
		}
		gateway := " 100.64.0.2"
		if addr.Is6() {
			gateway = " 2001:db8:64::2"
		}
		if err := l.Router.route("out0", host(addr)+gateway); err != nil {
			return err
		}
	}
	return nil
}

func (l *Lab) makeBridgedPods() error {
	n := count(l.options.Pods)
	if n == 0 {
		return nil
	}
	bridge := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}
	bridge.Name = "cbr0"
	if err := l.Node.handle.LinkAdd(bridge); err != nil {
		return fmt.Errorf("add bridge: %w", err)
	}
	if err := l.Node.setUp("cbr0"); err != nil {
		return err
	}
	if err := l.Node.assign("cbr0", l.PodGate.V4.String()+"/24", l.PodGate.V6.String()+"/64"); err != nil {
		return err
	}
	for i := range n {
		pod, err := l.addPod(true, i)
		if err != nil {
			return err
		}
		if err := l.joinBridge(pod, bridge); err != nil {
			return err
		}
		l.Pods = append(l.Pods, pod)
	}
	return nil
}

func (l *Lab) joinBridge(pod *Pod, bridge *netlink.Bridge) error {
	if err := l.Node.handle.LinkSetMasterByIndex(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: pod.Host.Index}}, bridge.Index); err != nil {
		return fmt.Errorf("join %s to the bridge: %w", pod.Host.Name, err)
	}
	// The bridge takes its MAC from its ports unless told.
	current, err := l.Node.handle.LinkByName("cbr0")
	if err != nil {
		return err
	}
	if err := l.Node.handle.LinkSetHardwareAddr(current, current.Attrs().HardwareAddr); err != nil {
		return fmt.Errorf("fix the bridge's address: %w", err)
	}
	pod.Link.Next = [6]byte(current.Attrs().HardwareAddr)
	if err := pod.assign("eth0", pod.V4.String()+"/24", pod.V6.String()+"/64"); err != nil {
		return err
	}
	return pod.route("eth0", "0.0.0.0/0 "+l.PodGate.V4.String(), "::/0 "+l.PodGate.V6.String())
}

// makeRoutedPods wires pods as Calico does: the gateway is an address that
// nobody has, for which the node answers ARP.
func (l *Lab) makeRoutedPods() error {
	for i := range count(l.options.RoutedPods) {
		pod, err := l.addPod(false, i)
		if err != nil {
			return err
		}
		if err := l.Node.sysctls("net/ipv4/conf/"+pod.Host.Name+"/proxy_arp", "1"); err != nil {
			return err
		}
		if err := l.Node.assign(pod.Host.Name, "fe80::1/64"); err != nil {
			return err
		}
		if err := l.Node.route(pod.Host.Name, host(pod.V4), host(pod.V6)); err != nil {
			return err
		}
		if err := pod.assign("eth0", host(pod.V4), host(pod.V6)); err != nil {
			return err
		}
		if err := pod.route("eth0", "169.254.1.1/32", "0.0.0.0/0 169.254.1.1", "::/0 fe80::1"); err != nil {
			return err
		}
		l.RoutedPods = append(l.RoutedPods, pod)
	}
	return nil
}

func (l *Lab) addPod(bridged bool, n int) (*Pod, error) {
	name := fmt.Sprintf("pod%d", n)
	if !bridged {
		name = fmt.Sprintf("routed%d", n)
	}
	ns, err := l.addNamespace(name)
	if err != nil {
		return nil, err
	}
	inner, outer, err := l.connect(ns, "eth0", l.Node, name, l.options.PodMTU)
	if err != nil {
		return nil, err
	}
	return &Pod{Namespace: ns, Pair: podAddress(bridged, n), Link: inner, Host: outer}, nil
}

// connect joins two namespaces with a veth pair and sets both ends up.
func (l *Lab) connect(a *Namespace, aName string, b *Namespace, bName string, mtu int) (*Link, *Link, error) {
	if mtu == 0 {
		mtu = defaultMTU
	}
	veth := netlink.NewVeth(netlink.NewLinkAttrs())
	veth.Name, veth.MTU = aName, mtu
	veth.PeerName, veth.PeerMTU = bName, uint32(mtu)
	veth.PeerNamespace = netlink.NsFd(b.network.Fd())
	if err := a.handle.LinkAdd(veth); err != nil {
		return nil, nil, fmt.Errorf("connect %s in %s to %s in %s: %w", aName, a.name, bName, b.name, err)
	}
	aLink, err := l.readyLink(a, aName)
	if err != nil {
		return nil, nil, err
	}
	bLink, err := l.readyLink(b, bName)
	if err != nil {
		return nil, nil, err
	}
	aLink.Next, bLink.Next = bLink.MAC, aLink.MAC
	return aLink, bLink, nil
}

func (l *Lab) readyLink(ns *Namespace, name string) (*Link, error) {
	if l.options.NoOffloads {
		if err := ns.turnOffloadsOff(name); err != nil {
			return nil, err
		}
	}
	if err := ns.setUp(name); err != nil {
		return nil, err
	}
	link, err := ns.Link(name)
	if err != nil {
		return nil, err
	}
	link.offloads = !l.options.NoOffloads
	return link, nil
}

// Link is one interface of the namespace. Its Next is zero.
func (ns *Namespace) Link(name string) (*Link, error) {
	l, err := ns.handle.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("find %s in %s: %w", name, ns.name, err)
	}
	link := &Link{NS: ns, Name: name, Index: l.Attrs().Index, offloads: true}
	copy(link.MAC[:], l.Attrs().HardwareAddr)
	return link, nil
}

func count(n int) int {
	if n == 0 {
		return 2
	}
	return max(n, 0)
}
