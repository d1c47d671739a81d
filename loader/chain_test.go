// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"ip-masq-agent/internal/lab"
	"ip-masq-agent/internal/route"
)

// What somebody takes away comes back with the next Sync.
func TestAttachedAgain(t *testing.T) {
	for name, tt := range map[string]struct {
		noTCX  bool
		detach func(*node)
	}{
		"tcx, detached": {false, func(n *node) {
			n.do(func() error {
				l, err := link.LoadPinnedLink(linkPin(testPinPath, n.Uplinks[0].Index, directions()[1]), nil)
				if err != nil {
					return err
				}
				defer l.Close()
				return l.Detach()
			})
		}},
		"tc, one filter": {true, func(n *node) { n.run("tc", "filter", "del", "dev", "eth0", "egress") }},
		"tc, the qdisc":  {true, func(n *node) { n.run("tc", "qdisc", "del", "dev", "eth0", "clsact") }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			opts := testOptions4(t)
			opts.noTCX = tt.noTCX
			n := newNode(t, lab.Options{}, opts)
			conn := n.dial("udp", n.serve("udp", n.Remote.V4))
			tt.detach(n)
			if tt.noTCX { // the kernel tells of it
				select {
				case <-n.d.Changed():
				case <-time.After(5 * time.Second):
					t.Error("no change is told")
				}
			}
			n.sync()
			n.goesOn(conn)
			n.translates("tcp", false)
			stats, err := n.d.Stats()
			if err != nil || stats.Repairs == 0 {
				t.Errorf("repairs %d, %v", stats.Repairs, err)
			}
			n.stop()
			n.cleanup(opts)
			if qdiscs := n.run("tc", "qdisc", "show", "dev", "eth0"); strings.Contains(qdiscs, "clsact") {
				t.Errorf("left: %s", qdiscs)
			}
		})
	}
}

// Trap 61: programs of others run on, before ours and behind, and are told of.
func TestForeignPrograms(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{}, testOptions4(t))
	n.attachForeign(ebpf.AttachTCXEgress, link.Tail())
	n.attachForeign(ebpf.AttachTCXIngress, link.Tail())
	n.sync()
	if warnings := n.status().Warnings; len(warnings) > 0 {
		t.Errorf("behind: %q", warnings)
	}
	n.translates("tcp", false)
	n.attachForeign(ebpf.AttachTCXIngress, link.Head())
	n.sync()
	if warnings := n.status().Warnings; len(warnings) != 1 || !strings.Contains(warnings[0], "eth0 ingress") {
		t.Errorf("before: %q", warnings)
	}
	n.translates("tcp", false)
}

// A pinned link of an interface that is gone is no obstacle, even if another has
// its number.
func TestStalePins(t *testing.T) {
	t.Parallel()
	opts := testOptions4(t)
	n := newNode(t, lab.Options{}, opts)
	n.stop()
	n.run("ip", "link", "add", "other", "type", "veth", "peer", "name", "end")
	n.do(func() error {
		l, err := n.Node.Link("other")
		if err != nil {
			return err
		}
		// As if the number had been eth0's once.
		for _, dir := range directions() {
			from, to := linkPin(testPinPath, n.Uplinks[0].Index, dir), linkPin(testPinPath, l.Index, dir)
			if err := os.Rename(from, to); err != nil {
				return err
			}
		}
		return nil
	})
	n.run("ip", "addr", "add", "192.0.2.20/24", "dev", "other")
	n.run("ip", "link", "set", "end", "up")
	n.run("ip", "link", "set", "other", "up")
	n.run("ip", "route", "add", "192.88.99.0/24", "via", "192.0.2.1")
	n.start(opts)
	if got := n.status().Interfaces; len(got) != 2 {
		t.Errorf("served: %+v", got)
	}
	n.translates("tcp", false)
}

// A link that has gone before the agent heard of it is no fault.
func TestLinkGoesUnnoticed(t *testing.T) {
	for attach, noTCX := range attachments() {
		t.Run(attach, func(t *testing.T) {
			t.Parallel()
			opts := testOptions4(t)
			opts.noTCX = noTCX
			n := newNode(t, lab.Options{SecondUplink: true}, opts)
			n.do(func() error {
				tracker, err := route.NewTracker(route.Options{})
				if err != nil {
					return err
				}
				defer tracker.Close()
				n.run("ip", "link", "del", "eth1")
				return n.d.Sync(t.Context(), n.policy, tracker.Snapshot())
			})
			if stats, err := n.d.Stats(); err != nil || stats.Repairs != 0 {
				t.Errorf("%d repairs, %v", stats.Repairs, err)
			}
			n.translates("tcp", false)
			n.sync()
			if got := n.status().Interfaces; len(got) != 1 {
				t.Errorf("served: %+v", got)
			}
			if pins := n.run("ls", testPinPath+"/"+linksDir); strings.Contains(pins, fmt.Sprintf("%d_", n.Uplinks[1].Index)) {
				t.Errorf("pins: %s", pins)
			}
		})
	}
}
