// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/lab"
)

const (
	plain    = "plain" // routing and nothing else
	iptables = "iptables"
	datapath = "ebpf"

	cidrs    = 1000
	flowMaps = "/sys/fs/bpf/ip-masq-agent/v*"
)

// contender is a node that translates in its way, in a lab of its own.
type contender struct {
	*lab.Lab

	name      string
	conntrack bool // whether the node tracks connections

	flows, reverse *ebpf.Map // of the eBPF datapath
}

func newContender(tb testing.TB, g *generator, name string, conntrack bool, flags ...string) *contender {
	tb.Helper()
	c := &contender{
		Lab:       lab.New(tb, lab.Options{Pods: -1, RoutedPods: 1, Conntrack: conntrack}),
		name:      name,
		conntrack: conntrack || name == iptables,
	}
	if err := c.leaveOneSubnet(); err != nil {
		tb.Fatal(err)
	}
	if c.translates() {
		lab.StartAgent(tb, c.Node, append(flags, "--datapath="+name, "--config="+writeConfig(tb))...)
	}
	switch name {
	case datapath:
		c.openMaps(tb)
	case iptables:
		c.requireNFT(tb)
	}
	g.countAt(tb, c.Wires[0], link.Head())
	if err := errors.Join(g.aim(c.path(), someFlows), g.settle(c.path().at), c.forget()); err != nil {
		tb.Fatal(err)
	}
	return c
}

// leaveOneSubnet makes the node one of the usual kind, where one masquerade
// address goes with every next hop.
func (c *contender) leaveOneSubnet() error {
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
	return nil
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

// writeConfig exempts ranges that no packet goes to, so that all are looked at.
func writeConfig(tb testing.TB) string {
	tb.Helper()
	exempt := make([]netip.Prefix, cidrs)
	for i := range exempt {
		exempt[i] = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)
	}
	text, err := json.Marshal(map[string]any{"nonMasqueradeCIDRs": exempt, "cidrLimit": cidrs})
	if err != nil {
		tb.Fatal(err)
	}
	path := filepath.Join(tb.TempDir(), "config")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		tb.Fatal(err)
	}
	return path
}

func (c *contender) translates() bool { return c.name != plain }

func (c *contender) String() string {
	if c.conntrack {
		return c.name + ", conntrack"
	}
	return c.name
}

// path is the way of the pod's packets to masqueraded destinations.
func (c *contender) path() route {
	return route{
		at:         c.RoutedPods[0].Host,
		inside:     c.RoutedPods[0].V4,
		translated: c.Addresses.Node.V4,
		remote:     netip.MustParseAddr("8.0.0.0"),
	}
}

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
	if c.name == datapath {
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
