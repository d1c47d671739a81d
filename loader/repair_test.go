// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/lab"
)

// What somebody changes in the pinned maps, or unpins, is as it was after the
// next Sync, is counted once, and costs no flow.
func TestRepairs(t *testing.T) {
	key := func(prefix string) any { return cidrKey(netip.MustParsePrefix(prefix)) }
	put := func(m string, key, value any) func(*node) error {
		return func(n *node) error { return n.d.maps.byName[m].Put(key, value) }
	}
	remove := func(m string, key any) func(*node) error {
		return func(n *node) error { return n.d.maps.byName[m].Delete(key) }
	}
	unpin := func(path string) func(*node) error {
		return func(*node) error { return os.RemoveAll(testPinPath + path) }
	}
	for _, tt := range []struct {
		name   string
		do     func(*node) error
		counts uint64
	}{
		{"nothing", func(*node) error { return nil }, 0},
		{"a CIDR removed", remove(bpf.MasqMapNonmasqV4, key("10.0.0.0/8")), 1},
		{"a CIDR added", put(bpf.MasqMapNonmasqV4, key("8.8.8.0/24"), bpf.MasqCidrVerdictCIDR_KEEP), 1},
		{"a CIDR's verdict changed", put(bpf.MasqMapNonmasqV4, key("10.0.0.0/8"), bpf.MasqCidrVerdictCIDR_MASQUERADE), 1},
		{"an uplink forgotten", put(bpf.MasqMapUplinks, uint32(0), bpf.MasqUplink{}), 1},
		{"an uplink of nobody's", put(bpf.MasqMapUplinks, uint32(3), bpf.MasqUplink{Ifindex: 4711}), 0},
		{"no ports", put(bpf.MasqMapPortPool, uint32(0), new(bpf.MasqPortPool)), 1},
		{"a timeout", put(bpf.MasqMapTimeouts, uint32(bpf.MasqFlowStateFLOW_UDP), uint32(1)), 1},
		{"an address of the node removed", func(n *node) error { return n.d.maps.NodeV4.Delete(addr4(n.Addresses.Node.V4)) }, 1},
		{"a masquerade address", func(n *node) error {
			return n.d.maps.AddressesV4.Put(addressRuleKey(n.Uplinks[0].Index, netip.MustParsePrefix("0.0.0.0/0")), addr4(n.Remote3.V4))
		}, 1},
		{"a map unpinned", unpin("/nonmasq_v4"), 1},
		{"a link unpinned", func(n *node) error { return os.Remove(linkPin(testPinPath, n.Uplinks[0].Index, directions()[1])) }, 1},
		{"all links unpinned", unpin("/" + linksDir), 2},
		{"the layout unpinned", unpin("/" + layout), 23},
		{"all unpinned", unpin(""), 29},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, lab.Options{}, testOptions4(t))
			conn := n.dial("tcp", n.serve("tcp", n.Remote.V4))
			before := n.everything()
			n.do(func() error { return tt.do(n) })
			if tt.counts > 0 && n.everything() == before {
				t.Fatal("nothing is changed")
			}
			for range 2 {
				n.sync()
				if got := n.everything(); got != before {
					t.Errorf("before\n%s\nafter\n%s", before, got)
				}
				if stats, err := n.d.Stats(); err != nil || stats.Repairs != tt.counts {
					t.Errorf("%d repairs, want %d; %v", stats.Repairs, tt.counts, err)
				}
			}
			n.goesOn(conn)
			n.translates("tcp", false)
		})
	}
}

// everything is what is pinned, with what the agent writes into it, as bpftool
// shows it: by the pins, not by the handles of the agent.
func (n *node) everything() string {
	n.t.Helper()
	files := strings.Fields(n.run("find", "/sys/fs/bpf", "-type", "f", "-path", testPinPath+"*"))
	slices.Sort(files)
	var text strings.Builder
	fmt.Fprintln(&text, strings.Join(files, "\n"))
	n.do(func() error {
		for _, name := range []string{
			bpf.MasqMapNonmasqV4, bpf.MasqMapUplinks, bpf.MasqMapPortPool, bpf.MasqMapTimeouts, bpf.MasqMapNodeV4, bpf.MasqMapAddressesV4,
		} {
			m, err := ebpf.LoadPinnedMap(pinOf(testPinPath, name), nil)
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			if err != nil {
				return err
			}
			entries, err := dump(m)
			m.Close()
			if err != nil {
				return err
			}
			fmt.Fprintf(&text, "%s\n%s", name, entries)
		}
		return nil
	})
	return text.String()
}

func dump(m *ebpf.Map) (string, error) {
	var lines []string
	var key, value []byte
	entries := m.Iterate()
	for entries.Next(&key, &value) {
		lines = append(lines, fmt.Sprintf("%x: %x\n", key, value))
	}
	slices.Sort(lines)
	return strings.Join(lines, ""), entries.Err()
}
