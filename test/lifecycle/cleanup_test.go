// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"ip-masq-agent/internal/lab"
)

// foreign is what others have on the node and keep: rules in both backends, a
// filter, a pin, a mount.
func (n *node) foreign() {
	n.t.Helper()
	if err := n.Node.NFT("table inet others { chain c { type filter hook forward priority 0; counter; }; }"); err != nil {
		n.t.Fatal(err)
	}
	for _, rule := range []string{
		"iptables-nft -t nat -N OTHERS", "iptables-nft -t nat -A POSTROUTING -d 192.0.2.0/24 -j OTHERS",
		"iptables-legacy -t nat -A POSTROUTING -d 192.0.2.0/24 -j RETURN",
		"tc qdisc add dev eth0 clsact",
		"tc filter add dev eth0 egress protocol ip pref 7 u32 match ip dst 192.88.99.1/32 classid 1:1",
		"mount -t tmpfs others /run/others",
	} {
		if strings.HasPrefix(rule, "mount") {
			n.run("mkdir", "/run/others")
		}
		words := strings.Fields(rule)
		n.run(words[0], words[1:]...)
	}
}

// After cleanup all is as before the first start, whatever the agent had been
// told, and whatever others have there.
func TestCleanup(t *testing.T) {
	for _, tt := range []struct {
		name    string
		foreign bool
		agents  [][]string
	}{
		{"iptables", false, [][]string{{"iptables"}}},
		{"iptables, others' things", true, [][]string{{"iptables", "--invalid=drop", "--enable-ipv6"}}},
		{"ebpf", false, [][]string{{"ebpf", "--enable-ipv6"}}},
		{"ebpf, others' things", true, [][]string{{"ebpf"}}},
		{"one after the other", false, [][]string{{"iptables", "--invalid=drop"}, {"ebpf"}, {"iptables"}, {"ebpf", "--nat-table-size=1000"}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, lab.Options{})
			if tt.foreign {
				n.foreign()
			}
			before := n.footprint()
			for _, a := range tt.agents {
				n.once(a[0], a[1:]...)
			}
			n.translates("tcp", n.serve("tcp", n.Remote.V4))
			if n.footprint() == before {
				t.Fatal("there is nothing to clean up")
			}
			for range 2 {
				n.cleanup()
				if diff := cmp.Diff(before, n.footprint()); diff != "" {
					t.Errorf("(-before +after):\n%s", diff)
				}
			}
		})
	}
}

// Each pin may be missing: cleanup works, and so does the next agent.
func TestEveryPinMayBeMissing(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{})
	before := n.footprint()
	server := n.serve("tcp", n.Remote.V4)
	n.once("ebpf")
	for i, pin := range n.files() {
		n.do(func() error { return os.Remove(filepath.Join(pinPath, pin)) })
		if i%2 == 0 || long() {
			n.once("ebpf")
			n.translates("tcp", server)
			if got := n.status(); len(got.Interfaces) != 1 || len(got.Warnings) > 1 { // one says that no agent runs
				t.Errorf("without %s: status %+v", pin, got)
			}
			n.do(func() error {
				if _, err := os.Lstat(filepath.Join(pinPath, pin)); err != nil {
					t.Errorf("without %s: %v", pin, err)
				}
				return nil
			})
		}
		if i%2 == 1 || long() {
			n.cleanup()
			n.within(promptly, "a node without agent after "+pin, func() bool { return n.footprint() == before })
			n.once("ebpf")
		}
	}
}

// files are the pins, without directories.
func (n *node) files() []string {
	n.t.Helper()
	return strings.Fields(n.run("find", pinPath, "-not", "-type", "d", "-printf", "%P\n"))
}

// A clean-up that is killed in the middle is finished by the next one.
func TestCleanupIsKilled(t *testing.T) {
	lab.AgentBinary(t) // built outside of any namespace
	for _, datapath := range []string{"iptables", "ebpf"} {
		t.Run(datapath, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, lab.Options{})
			clean := n.footprint()
			trace := func(step func(string) bool) {
				t.Helper()
				n.once(datapath, "--enable-ipv6")
				if err := runTraced(n.Node, []string{lab.AgentBinary(t), "cleanup"}, false, step); err != nil {
					t.Fatal(err)
				}
			}
			var steps []string
			trace(func(what string) bool {
				steps = append(steps, what)
				return true
			})
			for _, c := range chosen(steps) {
				left := c.nth
				trace(func(what string) bool {
					if what == c.what {
						left--
					}
					return left > 0
				})
				n.cleanup()
				if diff := cmp.Diff(clean, n.footprint()); diff != "" {
					t.Errorf("after a kill before %s (-before +after):\n%s", c, diff)
				}
			}
			t.Logf("%d changes: %s", len(steps), summary(steps))
		})
	}
}
