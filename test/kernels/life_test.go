// SPDX-License-Identifier: Apache-2.0

package kernels_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"ip-masq-agent/internal/lab"
	"ip-masq-agent/loader"
)

// TestLifeCycle has flows live through what may happen to their agent: the end,
// another size of the table, pins and programs that somebody takes away.
func TestLifeCycle(t *testing.T) {
	n := &node{Lab: lab.New(t, lab.Options{Pods: 1, RoutedPods: -1})}
	opts := options(t)
	opts.IPv6 = false
	n.startWith(t, opts)
	flows := []flow{n.goingOn(t, "udp"), n.goingOn(t, "tcp")}
	n.stop(t)

	opts.NATTableSize *= 2
	n.startWith(t, opts)
	continueFlows(t, flows, "with a larger table")
	status, err := n.datapath.Status()
	if err != nil || status.NAT.V4.Capacity != opts.NATTableSize {
		t.Fatalf("capacity %d, want %d; %v", status.NAT.V4.Capacity, opts.NATTableSize, err)
	}

	n.damage(t, status.Interfaces[0].Attach)
	if err := n.Node.Do(func() error { return n.sync(t) }); err != nil {
		t.Fatal(err)
	}
	continueFlows(t, append(flows, n.goingOn(t, "tcp")), "after the damage")
	stats, err := n.datapath.Stats()
	if err != nil || stats.Repairs == 0 {
		t.Errorf("%d repairs, %v", stats.Repairs, err)
	}
	n.checkNoDrops(t)
	n.stop(t)
	n.cleanUp(t)
}

func (n *node) startWith(t *testing.T, opts loader.Options) {
	t.Helper()
	if err := n.Node.Do(func() (err error) {
		if n.datapath, err = loader.New(opts); err != nil {
			return err
		}
		return n.sync(t)
	}); err != nil {
		t.Fatalf("start: %s", explain(err))
	}
}

// goingOn opens a flow that has to keep the address that it begins with.
func (n *node) goingOn(t *testing.T, network string) flow {
	t.Helper()
	conn := n.dial(t, network, n.Remote.V4)
	first := conn.Seen
	if first.Addr() != n.Addresses.Node.V4 {
		t.Errorf("%s: comes from %s, want %s", network, first, n.Addresses.Node.V4)
	}
	return flow{network, func() error {
		seen, err := conn.Ask()
		if err == nil && seen != first {
			err = errors.New("comes from " + seen.String() + ", which was " + first.String())
		}
		return err
	}}
}

// damage removes pins, empties the list, and takes filters away, of which the
// kernel has to tell. TCX programs go when their links do.
func (n *node) damage(t *testing.T, attach string) {
	t.Helper()
	if err := n.Node.Do(func() error {
		return errors.Join(os.RemoveAll(filepath.Join(pinPath, "links")), os.Remove(filepath.Join(pinPath, "nonmasq_v4")))
	}); err != nil {
		t.Fatal(err)
	}
	if attach != "tc" {
		return
	}
	qdisc := &netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: n.Uplinks[0].Index, Parent: netlink.HANDLE_CLSACT, Handle: netlink.MakeHandle(0xffff, 0)},
		QdiscType:  "clsact",
	}
	if err := n.Node.Netlink().QdiscDel(qdisc); err != nil {
		t.Fatal(err)
	}
	select {
	case <-n.datapath.Changed():
	case <-time.After(30 * time.Second):
		t.Error("nobody tells that the filters are gone")
	}
}
