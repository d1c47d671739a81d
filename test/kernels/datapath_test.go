// SPDX-License-Identifier: Apache-2.0

package kernels_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/lab"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
	"ip-masq-agent/loader"
)

const pinPath = "/sys/fs/bpf/ip-masq-agent"

// TestDatapath translates a flow of each kind without conntrack on the node.
// Where it is on, programs ask it, so there they go through their whole life.
func TestDatapath(t *testing.T) {
	t.Run("conntrack off", func(t *testing.T) {
		n := &node{Lab: lab.New(t, lab.Options{Pods: 1, RoutedPods: -1})}
		n.start(t)
		n.checkTranslations(t, n.openFlows(t))
		n.checkExempt(t)
		n.checkNoDrops(t)
		n.stop(t)
	})
	t.Run("conntrack on", func(t *testing.T) {
		testLife(t, &node{Lab: lab.New(t, lab.Options{Pods: 1, RoutedPods: -1, Conntrack: true})})
	})
}

func testLife(t *testing.T, n *node) {
	status := n.start(t)
	fact(t, "%s", strings.TrimPrefix(status.Backend.Reason, "--datapath=ebpf; "))
	showPrograms(t)
	n.checkPins(t)
	flows := n.openFlows(t)
	n.checkTranslations(t, flows)
	n.checkExempt(t)

	n.stop(t)
	continueFlows(t, flows, "without an agent")

	n.start(t)
	continueFlows(t, flows, "after a restart")
	n.openFlows(t)
	n.checkNoDrops(t)
	n.stop(t)

	n.cleanUp(t)
}

// node is a lab whose node runs the datapath.
type node struct {
	*lab.Lab
	datapath *loader.Datapath
}

func options(t *testing.T) loader.Options {
	return loader.Options{
		PinPath:      pinPath,
		IPv6:         true,
		RandomFully:  true,
		DropInvalid:  true,
		NATTableSize: 1024,
		Log:          slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
}

// start makes the datapath, or takes over the one that is there.
func (n *node) start(t *testing.T) api.DatapathStatus {
	t.Helper()
	err := n.Node.Do(func() (err error) {
		if n.datapath, err = loader.New(options(t)); err != nil {
			return err
		}
		return n.sync(t)
	})
	if err != nil {
		t.Fatalf("start: %s", explain(err))
	}
	status, err := n.datapath.Status()
	if err != nil {
		t.Fatal(err)
	}
	if len(status.Interfaces) != 1 || status.Interfaces[0].Name != n.Uplinks[0].Name {
		t.Fatalf("serves %+v, want %s alone", status.Interfaces, n.Uplinks[0].Name)
	}
	fact(t, "attached by %s", status.Interfaces[0].Attach)
	return status
}

// sync runs inside the node's namespace.
func (n *node) sync(t *testing.T) error {
	tracker, err := route.NewTracker(route.Options{Log: options(t).Log})
	if err != nil {
		return err
	}
	defer tracker.Close()
	policy := prefix.New(prefix.Lists{NonMasquerade: []netip.Prefix{
		netip.PrefixFrom(n.Inside.V4, 24).Masked(), netip.PrefixFrom(n.Inside.V6, 64).Masked(),
	}})
	return n.datapath.Sync(context.Background(), policy, tracker.Snapshot())
}

func (n *node) stop(t *testing.T) {
	t.Helper()
	if err := n.datapath.Close(); err != nil {
		t.Fatalf("stop: %v", err)
	}
}

// pins lists what is pinned: a pattern for each of the places.
func (n *node) pins(t *testing.T, patterns ...string) map[string][]string {
	t.Helper()
	found := make(map[string][]string)
	err := n.Node.Do(func() error {
		for _, p := range patterns {
			paths, err := filepath.Glob(filepath.Join(pinPath, p))
			if err != nil {
				return err
			}
			found[p] = paths
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func (n *node) checkPins(t *testing.T) {
	t.Helper()
	for pattern, paths := range n.pins(t, "nonmasq_v4", "nonmasq_v6", "v*/*") {
		if len(paths) == 0 {
			t.Errorf("nothing is pinned as %s/%s", pinPath, pattern)
		}
	}
}

// flow is an exchange that can go on.
type flow struct {
	name string
	ask  func() error
}

// openFlows opens one flow of each kind towards a masqueraded destination and
// checks that it comes from the node's address and is answered.
func (n *node) openFlows(t *testing.T) []flow {
	t.Helper()
	var flows []flow
	for _, is6 := range []bool{false, true} {
		remote, node := n.Remote.Addr(is6), n.Addresses.Node.Addr(is6)
		for _, network := range []string{"udp", "tcp"} {
			conn := n.dial(t, network, remote)
			if conn.Seen.Addr() != node {
				t.Errorf("%s to %s: comes from %s, want %s", network, remote, conn.Seen, node)
			}
			first := conn.Seen
			flows = append(flows, flow{fmt.Sprintf("%s to %s", network, remote), func() error {
				seen, err := conn.Ask()
				if err == nil && seen != first {
					err = fmt.Errorf("comes from %s, which was %s", seen, first)
				}
				return err
			}})
		}
		flows = append(flows, n.ping(t, remote))
	}
	return flows
}

func (n *node) dial(t *testing.T, network string, remote netip.Addr) *lab.Conn {
	t.Helper()
	server := n.Outside.Serve(t, network, netip.AddrPortFrom(remote, 0))
	conn, err := n.Pods[0].Dial(t.Context(), network, netip.AddrPort{}, server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func (n *node) ping(t *testing.T, remote netip.Addr) flow {
	t.Helper()
	ping, err := n.Pods[0].NewPing(netip.Addr{}, remote, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ping.Close() })
	if err := ping.Echo([]byte("first")); err != nil {
		t.Fatal(err)
	}
	return flow{fmt.Sprintf("ping to %s", remote), func() error { return ping.Echo([]byte("next")) }}
}

func continueFlows(t *testing.T, flows []flow, when string) {
	t.Helper()
	for _, f := range flows {
		if err := f.ask(); err != nil {
			t.Errorf("%s, %s: %v", when, f.name, err)
		}
	}
}

// checkTranslations checks that exactly the pod's flows are translated, each
// to the node's address: that of pings shows nowhere else.
func (n *node) checkTranslations(t *testing.T, flows []flow) {
	t.Helper()
	var translations []api.Translation
	err := n.datapath.EachTranslation(func(t api.Translation) { translations = append(translations, t) })
	if err != nil {
		t.Fatal(err)
	}
	if len(translations) != len(flows) {
		t.Errorf("%d flows are translated, want %d", len(translations), len(flows))
	}
	for _, tr := range translations {
		if !lab.IsPod(tr.Src) || tr.NATAddr != n.Addresses.Node.Addr(tr.Src.Is6()) {
			t.Errorf("translates %+v", tr)
		}
	}
}

// checkExempt checks that an exempt destination sees the pod's address.
func (n *node) checkExempt(t *testing.T) {
	t.Helper()
	for _, is6 := range []bool{false, true} {
		conn := n.dial(t, "udp", n.Inside.Addr(is6))
		if conn.Seen.Addr() != n.Pods[0].Addr(is6) {
			t.Errorf("%s sees %s, want the pod's address", n.Inside.Addr(is6), conn.Seen)
		}
	}
}

func (n *node) checkNoDrops(t *testing.T) {
	t.Helper()
	stats, err := n.datapath.Stats()
	if err != nil {
		t.Fatal(err)
	}
	for reason, drops := range stats.Drops {
		if drops != 0 {
			t.Errorf("%d packets dropped as %s", drops, reason)
		}
	}
}

// cleanUp removes the datapath and checks that neither pins nor translation
// are left.
func (n *node) cleanUp(t *testing.T) {
	t.Helper()
	if err := n.Node.Do(func() error { return loader.Cleanup(options(t)) }); err != nil {
		t.Fatalf("clean up: %v", err)
	}
	if left := n.pins(t, "", "*", "*/*"); len(left[""])+len(left["*"])+len(left["*/*"]) > 0 {
		t.Errorf("pins are left: %v", left)
	}
	for _, is6 := range []bool{false, true} {
		if conn := n.dial(t, "udp", n.Remote.Addr(is6)); conn.Seen.Addr() != n.Pods[0].Addr(is6) {
			t.Errorf("%s sees %s, want the pod's address", n.Remote.Addr(is6), conn.Seen)
		}
	}
}
