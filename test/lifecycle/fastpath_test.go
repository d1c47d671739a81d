// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ip-masq-agent/internal/lab"
)

// newFastNode is a node with a pod that the host routes to and one on a bridge.
func newFastNode(t *testing.T, conntrack bool) *node {
	t.Helper()
	return newNode(t, lab.Options{Pods: 1, RoutedPods: 1, Conntrack: conntrack})
}

func (n *node) fast() uint64 {
	n.t.Helper()
	return n.status().FastPath.Packets
}

// takesFastPath waits until packets of connections that go on are seen there, or
// holds that none are.
func (n *node) takesFastPath(want bool, open ...*lab.Conn) {
	n.t.Helper()
	const exchanges = 100
	ask := func() {
		for range exchanges {
			for _, c := range open {
				n.goesOn(c)
			}
		}
	}
	before := n.fast()
	if !want {
		ask()
		if more := n.fast() - before; more > 0 {
			n.t.Errorf("%d packets took the fast path", more)
		}
		return
	}
	n.within(promptly, "packets take the fast path both ways", func() bool {
		before = n.fast()
		ask()
		return n.fast()-before >= uint64(exchanges*len(open)*3/2)
	})
}

// dialFrom opens a connection from any pod.
func (n *node) dialFrom(pod *lab.Pod, network string, to netip.AddrPort) *lab.Conn {
	n.t.Helper()
	conn, err := pod.Dial(n.t.Context(), network, netip.AddrPort{}, to)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// fastPins are the pins of programs at pods' links.
func (n *node) fastPins() (pins []string) {
	n.t.Helper()
	for _, pin := range n.pins() {
		if strings.HasSuffix(pin, "_fast") {
			pins = append(pins, pin)
		}
	}
	return pins
}

// The fast path comes, goes on without an agent, goes with the flag, and comes
// again: connections do not notice, and nothing of it is left behind.
func TestFastPathComesAndGoes(t *testing.T) {
	t.Parallel()
	n := newFastNode(t, false)
	clean := n.footprint()
	flags := n.flags("ebpf", "--enable-ipv6", "--fast-path")
	a := lab.StartAgent(t, n.Node, flags...)
	n.forget()
	var open []*lab.Conn
	for _, network := range []string{"tcp", "udp"} {
		for _, remote := range []netip.Addr{n.Remote.V4, n.Remote.V6} {
			server := n.serve(network, remote)
			open = append(open, n.dialFrom(n.Pods[0], network, server), n.dialFrom(n.RoutedPods[0], network, server))
		}
	}
	for _, c := range open {
		n.takesFastPath(true, c)
	}
	if got, want := n.status().FastPath.Interfaces, []string{"cbr0", "routed0"}; !cmp.Equal(got, want) {
		t.Errorf("fast path from %v, want %v", got, want)
	}

	a.Kill()
	n.takesFastPath(true, open...)

	a = lab.StartAgent(t, n.Node, flags...)
	n.takesFastPath(true, open...)

	a.Kill()
	a = lab.StartAgent(t, n.Node, n.flags("ebpf", "--enable-ipv6")...)
	n.takesFastPath(false, open...)
	if pins := n.fastPins(); len(pins) > 0 || n.status().FastPath.Enabled {
		t.Errorf("without the flag: %v, %+v", pins, n.status().FastPath)
	}

	a.Kill()
	a = lab.StartAgent(t, n.Node, flags...)
	n.takesFastPath(true, open...)
	n.noLeak()
	n.wholePairs()

	a.Kill()
	n.cleanup()
	if diff := cmp.Diff(clean, n.footprint()); diff != "" {
		t.Errorf("what is left after cleanup (-before +after):\n%s", diff)
	}
}

// The link of a pod that ends takes its program and its pin with it.
func TestFastPathOfAPodThatEnds(t *testing.T) {
	t.Parallel()
	n := newFastNode(t, false)
	a := lab.StartAgent(t, n.Node, n.flags("ebpf", "--fast-path")...)
	n.takesFastPath(true, n.dialFrom(n.RoutedPods[0], "udp", n.serve("udp", n.Remote.V4)))
	n.ip("link del routed0")
	if err := a.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	n.within(promptly, "nothing of it is left", func() bool {
		return len(n.fastPins()) == 0 && len(n.status().FastPath.Interfaces) == 0
	})
	if errors := n.metric(a, "sync_errors_total"); errors > 0 {
		t.Errorf("%v errors", errors)
	}
}

// asks sends a datagram and waits a moment for the answer.
func asks(c *lab.Conn) bool {
	if err := c.SetDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
		return false
	}
	answer := make([]byte, 100)
	if _, err := c.Write(nil); err != nil {
		return false
	}
	_, err := c.Read(answer)
	return err == nil
}

// The stack is asked again within a second, with or without an agent: a rule in
// FORWARD ends a flow, and the flow goes on when the rule goes; a route leads it
// elsewhere.
func TestFastPathAsksTheStackAgain(t *testing.T) {
	for name, running := range map[string]bool{"agent": true, "no agent": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newFastNode(t, false)
			a := lab.StartAgent(t, n.Node, n.flags("ebpf", "--fast-path")...)
			c := n.dialFrom(n.RoutedPods[0], "udp", n.serve("udp", n.Remote.V4))
			n.takesFastPath(true, c)
			if !running {
				a.Kill()
			}
			if err := n.Node.NFT("table ip rules { chain c { type filter hook forward priority 0; ip saddr " + n.RoutedPods[0].V4.String() + " drop; }; }"); err != nil {
				t.Fatal(err)
			}
			n.within(promptly, "the rule counts", func() bool { return !asks(c) })
			if err := n.Node.NFT("delete table ip rules"); err != nil {
				t.Fatal(err)
			}
			n.within(promptly, "the flow goes on", func() bool { return asks(c) })
			n.takesFastPath(true, n.dialFrom(n.RoutedPods[0], "udp", n.serve("udp", n.Remote.V4)))

			n.ip("route add blackhole " + n.Remote.V4.String() + "/32")
			n.within(promptly, "the route counts", func() bool { return !asks(c) })
			n.ip("route del blackhole " + n.Remote.V4.String() + "/32")
			n.within(promptly, "the flow goes on", func() bool { return asks(c) })
		})
	}
}

// conntrack that minds gaps sees all of a TCP connection, or a rule of the usual
// kind would end it. Told to mind none, it lets the connection go fast.
func TestFastPathAndConntrack(t *testing.T) {
	t.Parallel()
	n := newFastNode(t, true)
	if err := n.Node.NFT("table inet proxy { chain c { type filter hook forward priority 0; ct state invalid drop; }; }"); err != nil {
		t.Fatal(err)
	}
	a := lab.StartAgent(t, n.Node, n.flags("ebpf", "--fast-path")...)
	pod := n.RoutedPods[0]
	tcp, udp := n.dialFrom(pod, "tcp", n.serve("tcp", n.Remote.V4)), n.dialFrom(pod, "udp", n.serve("udp", n.Remote.V4))
	n.takesFastPath(true, udp)
	n.takesFastPath(false, tcp)
	if warnings := n.status().Warnings; len(warnings) != 1 || !strings.Contains(warnings[0], "nf_conntrack_tcp_be_liberal") {
		t.Errorf("warnings %q", warnings)
	}
	if err := n.Node.Sysctl("net/netfilter/nf_conntrack_tcp_be_liberal", "1"); err != nil {
		t.Fatal(err)
	}
	if err := a.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	n.takesFastPath(true, tcp)
	if warnings := n.status().Warnings; len(warnings) > 0 {
		t.Errorf("warnings %q", warnings)
	}
	n.takesFastPath(true, tcp, udp)
	if err := tcp.Close(); err != nil {
		t.Fatal(err)
	}
	n.within(promptly, "the connection's end is seen", func() bool {
		list := n.agent("nat", "list", "--proto=tcp")
		return !strings.Contains(list, "ESTABLISHED")
	})
}

// Forwarding keeps to a route's MTU, which the kernel does not tell the fast
// path: it keeps to that of any route, at once when there is a new one, and until
// the next sync after it is gone.
func TestFastPathKeepsToTheMTUOfRoutes(t *testing.T) {
	t.Parallel()
	n := newFastNode(t, false)
	a := lab.StartAgent(t, n.Node, n.flags("ebpf", "--enable-ipv6", "--fast-path")...)
	for unused, remote := range map[string]netip.Addr{"198.51.100.99": n.Remote.V4, "2001:db8:99::1": n.Remote.V6} {
		c := n.dialFrom(n.RoutedPods[0], "udp", n.serve("udp", remote))
		n.within(promptly, "long packets are fast", func() bool { return n.fastOnes(c) > 100 })
		n.ip("route add " + unused + " dev routed0 mtu 1301")
		n.within(promptly, "they are not", func() bool { return n.fastOnes(c) == 0 })
		n.takesFastPath(true, c)
		n.ip("route del " + unused)
		if err := a.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		n.within(promptly, "they are again", func() bool { return n.fastOnes(c) > 100 })
	}
}

// fastOnes is how many of 200 long packets take the fast path.
func (n *node) fastOnes(c *lab.Conn) uint64 {
	n.t.Helper()
	before, long := n.fast(), strings.Repeat("x", 1300)
	for range 100 {
		if _, err := c.Exchange(long); err != nil {
			n.t.Fatal(err)
		}
	}
	return n.fast() - before
}
