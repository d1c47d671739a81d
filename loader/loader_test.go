// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/lab"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

const testPinPath = "/sys/fs/bpf/ip-masq-agent"

// testWriter passes log lines to the test.
type testWriter struct{ tb testing.TB }

func (w testWriter) Write(line []byte) (int, error) {
	w.tb.Helper()
	w.tb.Logf("%s", line)
	return len(line), nil
}

func testOptions(tb testing.TB) Options {
	return Options{
		PinPath: testPinPath, IPv6: true, RandomFully: true, DropInvalid: true, NATTableSize: 4096,
		Log: slog.New(slog.NewTextHandler(testWriter{tb}, nil)),
	}
}

// testOptions4 are for tests to which IPv6 makes no difference: what is checked
// in half the time by the kernel.
func testOptions4(tb testing.TB) Options {
	opts := testOptions(tb)
	opts.IPv6 = false
	return opts
}

// attachments are both ways to attach programs. Kernels with TCX are made to do
// without.
func attachments() map[string]bool { return map[string]bool{"tcx": false, "tc": true} }

// testPolicy keeps what is named, and masquerades what is named with a "!".
func testPolicy(named ...string) *prefix.Policy {
	lists := prefix.Lists{LinkLocal: []netip.Prefix{netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("fe80::/10")}}
	for _, text := range named {
		if exception, ok := strings.CutPrefix(text, "!"); ok {
			lists.Masquerade = append(lists.Masquerade, netip.MustParsePrefix(exception))
			continue
		}
		lists.NonMasquerade = append(lists.NonMasquerade, netip.MustParsePrefix(text))
	}
	return prefix.New(lists)
}

// node is a lab with the datapath on its node.
type node struct {
	*lab.Lab
	t      *testing.T
	d      *Datapath
	policy *prefix.Policy

	interfaces []string // as --interfaces has them
}

// newNode makes a node with one pod and the datapath.
func newNode(t *testing.T, options lab.Options, opts Options) *node {
	t.Helper()
	if options.Pods == 0 && options.RoutedPods == 0 {
		options.Pods, options.RoutedPods = 1, -1
	}
	n := &node{Lab: lab.New(t, options), t: t, policy: testPolicy("10.0.0.0/8", "fd00::/8")}
	t.Cleanup(n.stop)
	n.start(opts)
	return n
}

// start makes a datapath and has it sync, as an agent does that starts.
func (n *node) start(opts Options) {
	n.t.Helper()
	n.do(func() (err error) {
		n.d, err = New(opts)
		return err
	})
	n.sync()
}

// stop ends what would end with the agent's process.
func (n *node) stop() {
	n.t.Helper()
	if n.d == nil {
		return
	}
	if err := n.d.Close(); err != nil {
		n.t.Error(err)
	}
	n.d = nil
}

// sync runs one Sync with what the node's network is now.
func (n *node) sync() {
	n.t.Helper()
	n.do(func() error {
		tracker, err := route.NewTracker(route.Options{Interfaces: n.interfaces, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			return err
		}
		defer tracker.Close()
		return n.d.Sync(context.Background(), n.policy, tracker.Snapshot())
	})
}

// do runs f on the node.
func (n *node) do(f func() error) {
	n.t.Helper()
	if err := n.Node.Do(f); err != nil {
		n.t.Fatal(err)
	}
}

// run runs a command on the node and gives what it says.
func (n *node) run(name string, args ...string) string {
	n.t.Helper()
	out, err := n.Node.Run(n.t.Context(), name, args...)
	if err != nil {
		n.t.Fatal(err)
	}
	return out
}

// await waits for something that takes a moment.
func (n *node) await(what string, is func() bool) {
	n.t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			n.t.Fatalf("%s does not come", what)
		}
	}
}

// serve serves at an outside address, and gives it with its port.
func (n *node) serve(network string, at netip.Addr) netip.AddrPort {
	n.t.Helper()
	return n.Outside.Serve(n.t, network, netip.AddrPortFrom(at, 0))
}

// dial opens a connection from the first pod.
func (n *node) dial(network string, to netip.AddrPort) *lab.Conn {
	n.t.Helper()
	conn, err := n.Pods[0].Dial(n.t.Context(), network, netip.AddrPort{}, to)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// goesOn checks that a connection lives, with the address that it began with.
func (n *node) goesOn(c *lab.Conn) {
	n.t.Helper()
	if seen, err := c.Ask(); err != nil || seen != c.Seen {
		n.t.Errorf("connection to %s: seen from %s, before from %s; %v", c.Remote, seen, c.Seen, err)
	}
}

func (n *node) translations() []api.Translation {
	n.t.Helper()
	var list []api.Translation
	if err := n.d.EachTranslation(func(t api.Translation) { list = append(list, t) }); err != nil {
		n.t.Fatal(err)
	}
	return list
}

func (n *node) status() api.DatapathStatus {
	n.t.Helper()
	var status api.DatapathStatus
	n.do(func() (err error) {
		status, err = n.d.Status()
		return err
	})
	return status
}

// natAddresses are the addresses that live flows are translated to.
func (n *node) natAddresses() map[netip.Addr]bool {
	n.t.Helper()
	found := make(map[netip.Addr]bool)
	for _, t := range n.translations() {
		found[t.NATAddr] = true
	}
	return found
}

func TestTranslates(t *testing.T) {
	for attach, noTCX := range attachments() {
		for _, conntrack := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, conntrack %t", attach, conntrack), func(t *testing.T) {
				t.Parallel()
				opts := testOptions(t)
				opts.noTCX = noTCX
				n := newNode(t, lab.Options{Conntrack: conntrack}, opts)
				for _, is6 := range []bool{false, true} {
					for _, network := range []string{"tcp", "udp"} {
						n.translates(network, is6)
						n.keeps(network, is6)
					}
				}
				want := []api.Interface{{Name: "eth0", Attach: attach, SNATv4: n.Addresses.Node.V4, SNATv6: n.Addresses.Node.V6}}
				status := n.status()
				if !slices.Equal(status.Interfaces, want) || len(status.Warnings) > 0 {
					t.Errorf("status %+v, want %+v", status, want)
				}
				stats, err := n.d.Stats()
				if err != nil || stats.TranslationsV4 != 2 || stats.TranslationsV6 != 2 || stats.NAT.V4.Entries != 2 || stats.NAT.V6.Entries != 2 {
					t.Errorf("stats %+v, %v", stats, err)
				}
				for reason, drops := range stats.Drops {
					if drops != 0 {
						t.Errorf("%d packets dropped: %s", drops, reason)
					}
				}
			})
		}
	}
}

// translates checks that a pod's connection to the outside has the node's
// address there, and what is told of it.
func (n *node) translates(network string, is6 bool) {
	n.t.Helper()
	conn := n.dial(network, n.serve(network, n.Remote.Addr(is6)))
	if conn.Seen.Addr() != n.Addresses.Node.Addr(is6) {
		n.t.Errorf("%s to %s: seen from %s", network, conn.Remote, conn.Seen)
	}
	n.goesOn(conn)
	local := netip.MustParseAddrPort(conn.LocalAddr().String())
	if !slices.ContainsFunc(n.translations(), func(t api.Translation) bool {
		return t.Proto == network && t.State != "" && t.ExpiresSeconds > 0 && t.Family == familyNumber(is6) &&
			netip.AddrPortFrom(t.Src, t.SPort) == local && netip.AddrPortFrom(t.Dst, t.DPort) == conn.Remote &&
			netip.AddrPortFrom(t.NATAddr, t.NATPort) == conn.Seen
	}) {
		n.t.Errorf("%s from %s as %s to %s is not in %+v", network, local, conn.Seen, conn.Remote, n.translations())
	}
}

func familyNumber(is6 bool) int {
	if is6 {
		return 6
	}
	return 4
}

// keeps checks that a pod's connection within the cluster has the pod's address.
func (n *node) keeps(network string, is6 bool) {
	n.t.Helper()
	conn := n.dial(network, n.serve(network, n.Inside.Addr(is6)))
	if conn.Seen.String() != conn.LocalAddr().String() {
		n.t.Errorf("%s from %s to %s: seen from %s", network, conn.LocalAddr(), conn.Remote, conn.Seen)
	}
}

func TestIPv6Off(t *testing.T) {
	n := newNode(t, lab.Options{}, testOptions4(t))
	n.translates("tcp", false)
	conn := n.dial("tcp", n.serve("tcp", n.Remote.V6))
	if conn.Seen.String() != conn.LocalAddr().String() {
		t.Errorf("from %s: seen from %s", conn.LocalAddr(), conn.Seen)
	}
	if v6 := n.status().NAT.V6; v6 != (api.Table{}) {
		t.Errorf("IPv6 table %+v", v6)
	}
}

func TestPlanTouchesNothing(t *testing.T) {
	n := &node{Lab: lab.New(t, lab.Options{Pods: -1, RoutedPods: -1}), t: t}
	n.do(func() error {
		_, err := Plan(testOptions(t), testPolicy("10.0.0.0/8"), &route.Snapshot{})
		return err
	})
	if got := n.pins(); got != "" {
		t.Errorf("it made %s", got)
	}
}

// pins lists what is pinned, without the maps of the layout.
func (n *node) pins() string {
	n.t.Helper()
	var names []string
	n.do(func() error {
		for _, pattern := range []string{"", "/*", "/" + linksDir + "/*"} {
			found, err := filepath.Glob(testPinPath + pattern)
			if err != nil {
				return err
			}
			names = append(names, found...)
		}
		return nil
	})
	slices.Sort(names)
	return strings.Join(names, "\n")
}
