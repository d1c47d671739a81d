// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"ip-masq-agent/internal/lab"
)

// crowd is connections that all exchange something all the time. The router
// notes each outside tuple that it sees of them.
type crowd struct {
	node    *node
	servers map[string]netip.AddrPort
	pause   time.Duration
	ended   []func()              // ends a member, one for each
	fault   atomic.Pointer[error] // the first
}

// newCrowd makes one towards Remote.
func (n *node) newCrowd(pause time.Duration) *crowd {
	n.t.Helper()
	c := &crowd{node: n, pause: pause, servers: map[string]netip.AddrPort{
		"tcp": n.serve("tcp", n.Remote.V4), "udp": n.serve("udp", n.Remote.V4),
	}}
	if err := n.Router.NFT(fmt.Sprintf(`table ip crowd {
		set tuples { type ipv4_addr . inet_proto . inet_service . ipv4_addr . inet_service; flags dynamic; size 65536; }
		set ids { type inet_service; flags dynamic; size 65536; }
		chain seen {
			type filter hook prerouting priority raw
			ip daddr %[1]s meta l4proto { tcp, udp } add @tuples { ip saddr . meta l4proto . th sport . ip daddr . th dport }
			ip daddr %[1]s icmp type echo-request add @ids { icmp id }
			ip daddr %[1]s tcp flags rst counter name resets
			ip saddr %[1]s tcp flags rst counter name resets
		}
		counter resets { }
	}`, n.Remote.V4)); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(c.end)
	return c
}

// member is who goes on until the crowd ends.
type member interface {
	exchange() error
	Close() error
}

type talk struct {
	*lab.Conn
	last time.Time // of the last exchange's end
}

func (t *talk) exchange() error {
	silent := time.Since(t.last)
	seen, err := t.Ask()
	if err == nil && seen != t.Seen {
		err = fmt.Errorf("seen from %s, before from %s", seen, t.Seen)
	}
	if err != nil {
		return fmt.Errorf("%s connection from %s, silent for %s: %w", t.LocalAddr().Network(), t.LocalAddr(), silent, err)
	}
	t.last = time.Now()
	return nil
}

type ping struct{ *lab.Ping }

func (p ping) exchange() error { return p.Echo([]byte("anyone there?")) }

// join adds connections of a pod, from these source ports on, or from any.
func (c *crowd) join(pod *lab.Pod, network string, count, sport int) {
	c.node.t.Helper()
	for i := range count {
		local := netip.AddrPort{}
		if sport > 0 {
			local = netip.AddrPortFrom(pod.V4, uint16(sport+i))
		}
		conn, err := pod.Dial(c.node.t.Context(), network, local, c.servers[network])
		if err != nil {
			c.node.t.Fatal(err)
		}
		if lab.IsPod(conn.Seen.Addr()) {
			c.node.t.Errorf("seen from %s", conn.Seen)
		}
		c.add(&talk{conn, time.Now()})
	}
}

// joinPings adds pings.
func (c *crowd) joinPings(pod *lab.Pod, count int) {
	c.node.t.Helper()
	for range count {
		p, err := pod.NewPing(netip.Addr{}, c.node.Remote.V4, 0)
		if err != nil {
			c.node.t.Fatal(err)
		}
		c.add(ping{p})
	}
}

func (c *crowd) add(m member) {
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		for ctx.Err() == nil {
			if err := m.exchange(); err != nil {
				c.fault.CompareAndSwap(nil, &err)
				return
			}
			time.Sleep(c.pause)
		}
	})
	c.ended = append(c.ended, func() {
		cancel()
		done.Wait()
		_ = m.Close()
	})
}

// leave ends the first members. From then on tuples are counted anew.
func (c *crowd) leave(count int) {
	c.node.t.Helper()
	c.stop(count)
	c.exchanged() // what they still had to say is said
	for _, set := range []string{"tuples", "ids"} {
		if err := c.node.Router.NFT("flush set ip crowd " + set); err != nil {
			c.node.t.Fatal(err)
		}
	}
}

func (c *crowd) stop(count int) {
	var all sync.WaitGroup
	for _, end := range c.ended[:count] {
		all.Go(end)
	}
	all.Wait()
	c.ended = c.ended[count:]
}

func (c *crowd) end() { c.stop(len(c.ended)) }

// unharmed fails the test if a member stopped, was reset, or was seen with more
// than one outside tuple, or shared one.
func (c *crowd) unharmed() {
	t := c.node.t
	t.Helper()
	if fault := c.fault.Load(); fault != nil {
		t.Fatalf("a connection broke: %v", *fault)
	}
	text, err := c.node.Router.Run(t.Context(), "nft", "list", "table", "ip", "crowd")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text, "packets 0 bytes 0") {
		t.Errorf("resets:\n%s", text)
	}
	seen := 0
	for _, set := range []string{"tuples", "ids"} {
		list, err := c.node.Router.Run(t.Context(), "nft", "-j", "list", "set", "ip", "crowd", set)
		if err != nil {
			t.Fatal(err)
		}
		seen += elements(t, list)
	}
	if seen != len(c.ended) {
		t.Errorf("%d connections were seen with %d outside tuples", len(c.ended), seen)
	}
}

// exchanged waits until all have exchanged something again.
func (c *crowd) exchanged() { time.Sleep(4 * c.pause) }
