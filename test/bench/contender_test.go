// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/lab"
	"ip-masq-agent/test/bench/report"
)

const (
	flowMaps     = "/sys/fs/bpf/ip-masq-agent/v*"
	fastPathFlag = "--fast-path"

	fastPathTimeout = 30 * time.Second

	longTime = "1h" // between resyncs: none should come in the middle
)

// contender is a node that translates in its way, in a lab of its own.
type contender struct {
	*lab.Lab

	name      string // one of report's
	conntrack bool   // whether the node tracks connections
	size      int    // of the list of exempt ranges

	agent  *lab.Agent // nil: none
	config string     // its config file
	turn   int        // how often the list of exempt ranges has changed

	flows, reverse *ebpf.Map // of the eBPF datapath
}

// options are of a contender's lab.
type options struct {
	size       int // of the list of exempt ranges
	conntrack  bool
	noOffloads bool
	flags      []string // of our agent
}

func newContender(tb testing.TB, g *generator, name string, o options) *contender {
	tb.Helper()
	c := &contender{
		Lab:       lab.New(tb, lab.Options{Pods: -1, RoutedPods: 1, Conntrack: o.conntrack, NoOffloads: o.noOffloads}),
		name:      name,
		size:      o.size,
		conntrack: o.conntrack,
		config:    filepath.Join(tb.TempDir(), "config"),
	}
	if err := errors.Join(c.prepareNode(), c.writeConfig(exemptRanges(o.size, 0))); err != nil {
		tb.Fatal(err)
	}
	if flags := c.datapathFlags(); flags != nil {
		c.agent = lab.StartAgent(tb, c.Node, slices.Concat(flags, o.flags, []string{"--config=" + c.config})...)
	} else if _, err := c.exempt(o.size); err != nil {
		tb.Fatal(err)
	}
	switch {
	case c.ebpf():
		c.openMaps(tb)
	case name == report.Iptables:
		c.requireNFT(tb)
	}
	g.countAt(tb, c.Wires[0], link.Head())
	if err := errors.Join(g.aim(c.toMasqueraded(), someFlows), g.settle(c.toMasqueraded().at), c.awaitFastPath(tb, g), c.forget()); err != nil {
		tb.Fatal(err)
	}
	return c
}

// datapathFlags have our agent do the translating, if it is to.
func (c *contender) datapathFlags() []string {
	switch c.name {
	case report.EBPF:
		return []string{"--datapath=ebpf"}
	case report.FastPath:
		return []string{"--datapath=ebpf", fastPathFlag}
	case report.Iptables:
		return []string{"--datapath=iptables"}
	}
	return nil
}

func (c *contender) ebpf() bool { return c.name == report.EBPF || c.name == report.FastPath }

// prepareNode makes the node one of the usual kind, where one masquerade
// address goes with every next hop, and has it take packets from the pod's
// link for its own.
func (c *contender) prepareNode() error {
	uplink, err := c.Node.Netlink().LinkByIndex(c.Uplinks[0].Index)
	if err != nil {
		return fmt.Errorf("find uplink: %w", err)
	}
	second, err := netlink.ParseAddr(c.Subnet2.V4.String() + "/24")
	if err != nil {
		return err
	}
	if err := c.Node.Netlink().AddrDel(uplink, second); err != nil {
		return fmt.Errorf("remove second subnet: %w", err)
	}
	if c.name == report.FastPath && c.conntrack {
		if err := c.Node.Sysctl("net/netfilter/nf_conntrack_tcp_be_liberal", "1"); err != nil {
			return err
		}
	}
	return c.Node.Sysctl("net/ipv4/conf/"+c.RoutedPods[0].Host.Name+"/accept_local", "1")
}

// requireNFT: on a node where nobody has rules, that is the agent's choice.
func (c *contender) requireNFT(tb testing.TB) {
	tb.Helper()
	var status struct{ Backend struct{ Name string } }
	out := lab.RunAgent(tb, c.Node, "status", "-o", "json")
	if err := json.Unmarshal([]byte(out.Stdout), &status); err != nil || status.Backend.Name != "nft" {
		tb.Fatalf("backend %q, %v: %s", status.Backend.Name, err, out.Stderr)
	}
}

func (c *contender) String() string {
	if c.conntrack {
		return c.name + ", conntrack"
	}
	return c.name
}

func (c *contender) key(f report.Figure, at int) report.Key {
	return report.Key{Figure: f, Subject: c.name, Conntrack: c.conntrack, At: at}
}

// toMasqueraded is the way of the pod's packets to masqueraded destinations.
func (c *contender) toMasqueraded() route {
	r := route{
		at:         c.RoutedPods[0].Host,
		inside:     c.RoutedPods[0].V4,
		translated: c.nodeAddress(),
		remote:     netip.MustParseAddr("8.0.0.0"),
	}
	if c.name == report.Plain {
		r.translated = r.inside
	}
	return r
}

// toExempt is that to the first of the exempt ranges.
func (c *contender) toExempt() route {
	r := c.toMasqueraded()
	r.translated, r.remote = r.inside, firstExempt()
	return r
}

// ofNode is the way of the node's own packets. They come in through the pod's
// link.
func (c *contender) ofNode() route {
	r := c.toMasqueraded()
	r.inside, r.translated = c.nodeAddress(), c.nodeAddress()
	return r
}

// nodeAddress is the node's masquerade address.
func (c *contender) nodeAddress() netip.Addr { return c.Addresses.Node.V4 }

// openMaps opens the maps that hold the flows.
func (c *contender) openMaps(tb testing.TB) {
	tb.Helper()
	for name, to := range map[string]**ebpf.Map{bpf.MasqMapFlowsV4: &c.flows, bpf.MasqMapReverseV4: &c.reverse} {
		if err := c.Node.Do(func() error {
			paths, err := filepath.Glob(filepath.Join(flowMaps, name))
			if err != nil || len(paths) != 1 {
				return fmt.Errorf("find %s: %q, %w", name, paths, err)
			}
			*to, err = ebpf.LoadPinnedMap(paths[0], nil)
			return err
		}); err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() {
			if err := (*to).Close(); err != nil {
				tb.Error(err)
			}
		})
	}
}

// forget ends all flows, so that no table fills up.
func (c *contender) forget() error {
	if c.ebpf() {
		// In the order in which the datapath deletes them.
		if err := errors.Join(empty[bpf.MasqReverseV4](c.reverse), empty[bpf.MasqMappingV4](c.flows)); err != nil {
			return fmt.Errorf("empty maps: %w", err)
		}
	}
	return c.Node.Do(func() error {
		if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
			return fmt.Errorf("flush conntrack: %w", err)
		}
		return nil
	})
}

// awaitFastPath waits until the program is at the pod's link.
func (c *contender) awaitFastPath(tb testing.TB, g *generator) error {
	if c.name != report.FastPath {
		return nil
	}
	r := c.toMasqueraded()
	for end := time.Now().Add(fastPathTimeout); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if _, err := g.send(r.at, someFlows, forever); err != nil {
			return err
		}
		if err := c.warm(g, r); err != nil {
			return err
		}
		var status struct {
			FastPath struct{ Interfaces []string } `json:"fast_path"`
		}
		out := lab.RunAgent(tb, c.Node, "status", "-o", "json")
		if err := json.Unmarshal([]byte(out.Stdout), &status); err != nil {
			return fmt.Errorf("ask for status: %w: %s", err, out.Stderr)
		}
		if len(status.FastPath.Interfaces) > 0 {
			return nil
		}
	}
	return fmt.Errorf("no fast path after %v", fastPathTimeout)
}

// warm has open flows take the fast path: they have to be answered for that,
// and to show their way once more.
func (c *contender) warm(g *generator, r route) error {
	if c.name != report.FastPath {
		return nil
	}
	keys, values := make([]bpf.MasqTupleV4, someFlows), make([]bpf.MasqMappingV4, someFlows)
	n, err := c.flows.BatchLookup(new(ebpf.MapBatchCursor), keys, values, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("read flows: %w", err)
	}
	for i := range n {
		values[i].Flow.Replied = 1
		if err := c.flows.Put(keys[i], values[i]); err != nil {
			return fmt.Errorf("answer flow: %w", err)
		}
	}
	_, err = g.send(r.at, someFlows, forever)
	return err
}

func empty[value any](m *ebpf.Map) error {
	const batch = 4096
	keys, values := make([]bpf.MasqTupleV4, batch), make([]value, batch)
	for cursor := new(ebpf.MapBatchCursor); ; {
		_, err := m.BatchLookupAndDelete(cursor, keys, values, nil)
		switch {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			return nil
		case err != nil:
			return err
		}
	}
}
