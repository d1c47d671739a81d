// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const commandTimeout = 30 * time.Second

// assign gives a link addresses, each "prefix" or "prefix deprecated".
func (ns *Namespace) assign(link string, addresses ...string) error {
	l, err := ns.handle.LinkByName(link)
	if err != nil {
		return fmt.Errorf("find %s in %s: %w", link, ns.name, err)
	}
	for _, text := range addresses {
		prefix, deprecated := strings.CutSuffix(text, " deprecated")
		p, err := netip.ParsePrefix(prefix)
		if err != nil {
			return err
		}
		addr := &netlink.Addr{IPNet: ipNet(p)}
		if p.Addr().Is6() {
			addr.Flags = unix.IFA_F_NODAD
		}
		if deprecated {
			addr.ValidLft, addr.PreferedLft = math.MaxInt32, 0
		}
		if err := ns.handle.AddrAdd(l, addr); err != nil {
			return fmt.Errorf("assign %s to %s in %s: %w", text, link, ns.name, err)
		}
	}
	return nil
}

// route adds routes through a link, each "prefix" or "prefix gateway".
func (ns *Namespace) route(link string, routes ...string) error {
	l, err := ns.handle.LinkByName(link)
	if err != nil {
		return fmt.Errorf("find %s in %s: %w", link, ns.name, err)
	}
	for _, text := range routes {
		prefix, gateway, _ := strings.Cut(text, " ")
		dst, err := netip.ParsePrefix(prefix)
		if err != nil {
			return err
		}
		route := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(dst), Scope: netlink.SCOPE_LINK}
		if gateway != "" {
			route.Gw, route.Scope = net.ParseIP(gateway), netlink.SCOPE_UNIVERSE
		}
		if dst.Addr().Is6() {
			route.Scope = netlink.SCOPE_UNIVERSE
		}
		if err := ns.handle.RouteAdd(route); err != nil {
			return fmt.Errorf("add route %s through %s in %s: %w", text, link, ns.name, err)
		}
	}
	return nil
}

// sysctls writes name, value pairs.
func (ns *Namespace) sysctls(pairs ...string) error {
	for i := 0; i+1 < len(pairs); i += 2 {
		if err := ns.Sysctl(pairs[i], pairs[i+1]); err != nil {
			return fmt.Errorf("set %s in %s: %w", pairs[i], ns.name, err)
		}
	}
	return nil
}

// NFT runs an nft script in the namespace.
func (ns *Namespace) NFT(script string) error {
	ctx, cancel := context.WithTimeout(context.Background(), Patience(commandTimeout))
	defer cancel()
	cmd := ns.Command(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script)
	_, err := cmd.CombinedOutput()
	return err
}

// makeConntrack needs one rule that looks at the connection: that registers
// the hooks which track every packet of the namespace.
func (l *Lab) makeConntrack() error {
	if !l.options.Conntrack {
		return nil
	}
	return l.Node.NFT(`table inet lab_conntrack {
		chain prerouting {
			type filter hook prerouting priority filter
			ct state new accept
		}
	}`)
}

// TrackedConnections is how many connections the node's conntrack holds: none
// where nothing has asked for tracking.
func (l *Lab) TrackedConnections() (int, error) {
	var text []byte
	if err := l.Node.Do(func() (err error) {
		text, err = os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		return err
	}); err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// Forward has the node send on to another address what arrives for at, as a
// service does: at may be the node's, VIP, or an address that only pods use.
// It makes the node track connections.
func (l *Lab) Forward(proto string, at, to netip.AddrPort) error {
	family := "ip"
	if to.Addr().Is6() {
		family = "ip6"
	}
	return l.Node.NFT(fmt.Sprintf(`table %[1]s lab_forward {
		chain prerouting {
			type nat hook prerouting priority dstnat
			%[1]s daddr %[2]s %[3]s dport %[4]d dnat to %[5]s
		}
	}`, family, at.Addr(), proto, at.Port(), to))
}

// NarrowRoute has the router forward packets to an outside host only up to a
// size, and tell the senders of larger ones.
func (l *Lab) NarrowRoute(to Pair, mtu int) error {
	link, err := l.Router.handle.LinkByName("out0")
	if err != nil {
		return err
	}
	for dst, gateway := range map[netip.Addr]string{to.V4: "100.64.0.2", to.V6: "2001:db8:64::2"} {
		route := &netlink.Route{
			LinkIndex: link.Attrs().Index, Dst: ipNet(netip.PrefixFrom(dst, dst.BitLen())),
			Gw: net.ParseIP(gateway), MTU: mtu,
		}
		if err := l.Router.handle.RouteReplace(route); err != nil {
			return fmt.Errorf("narrow the route to %s: %w", dst, err)
		}
	}
	return nil
}

func host(a netip.Addr) string { return netip.PrefixFrom(a, a.BitLen()).String() }

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
