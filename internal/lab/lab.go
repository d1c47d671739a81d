// SPDX-License-Identifier: Apache-2.0

// Package lab builds small networks out of namespaces for tests, benchmarks
// and demonstrations: pods on a node, a router, hosts outside. It sends and
// captures packets anywhere in them and runs the agent on the node.
//
//	pod0, pod1 … eth0 ── cbr0 ┐
//	                          node  eth0 ── node0  router  out0 ── eth0  outside
//	routed0 … eth0 ─── veth ──┘     eth1 ── node1
//
// A lab needs root. Labs do not see each other, any number runs side by side,
// and nothing of them outlives the process.
package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"testing"
)

// Options say what a lab has. The zero value is two pods of each kind and one
// uplink, offloads on, no conntrack.
type Options struct {
	// Pods is the number of pods behind a bridge, as the bridge plugin makes
	// them. 0: two; negative: none.
	Pods int

	// RoutedPods is the number of pods on a veth of their own with a host
	// route, a 169.254.1.1 gateway and proxy ARP. 0: two; negative: none.
	RoutedPods int

	// Conntrack has the node track connections even where nothing translates.
	// Without it nothing in the lab itself registers conntrack on the node.
	Conntrack bool

	// NoOffloads turns checksum and segmentation offloads off on every link:
	// packets then have whole checksums and fit the MTU.
	NoOffloads bool

	// SecondUplink adds eth1 to the node and the route to ViaUplink2 through it.
	SecondUplink bool

	// Shape is the kind of device that the second uplink is. It has the
	// addresses in place of eth1, on which it stands.
	Shape Shape

	// PodMTU is the MTU of the pods' links, UplinkMTU that of the node's
	// uplinks, OutsideMTU that between router and outside. 0: 1500.
	PodMTU, UplinkMTU, OutsideMTU int
}

// Lab is one network. Its pods are the bridged ones first.
type Lab struct {
	Addresses

	Node, Router, Outside *Namespace
	Pods, RoutedPods      []*Pod

	// Uplinks are the node's ends of its uplinks, Wires the router's ends of
	// the same: what is seen there is what leaves the node.
	Uplinks, Wires []*Link

	// End is eth0 of outside.
	End *Link

	options    Options
	namespaces []*Namespace
	cables     []*os.File
}

// Pod is a namespace with one address in each family.
type Pod struct {
	*Namespace
	Pair

	Link *Link // eth0 in the pod
	Host *Link // the node's end
}

// Link is one interface in a lab.
type Link struct {
	NS    *Namespace
	Name  string
	Index int
	MAC   [6]byte
	Next  [6]byte // where the link's namespace sends what it routes through the link

	offloads bool
}

// New makes a lab that lives until the test ends. It fails the test where it
// cannot.
func New(tb testing.TB, options Options) *Lab {
	tb.Helper()
	RequireRoot(tb)
	l := &Lab{Addresses: addresses(), options: options}
	tb.Cleanup(func() {
		if err := l.close(); err != nil {
			tb.Errorf("close lab: %v", err)
		}
	})
	if err := l.build(); err != nil {
		tb.Fatalf("build lab: %v", err)
	}
	return l
}

// RequireRoot skips the test for users other than root; in CI it fails it.
func RequireRoot(tb testing.TB) {
	tb.Helper()
	switch {
	case os.Geteuid() == 0:
	case os.Getenv("CI") == "true":
		tb.Fatal("needs root")
	default:
		tb.Skip("needs root")
	}
}

func (l *Lab) build() error {
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"namespaces", l.makeNamespaces},
		{"uplinks", l.makeUplinks},
		{"outside", l.makeOutside},
		{"bridged pods", l.makeBridgedPods},
		{"routed pods", l.makeRoutedPods},
		{"conntrack", l.makeConntrack},
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return nil
}

func (l *Lab) makeNamespaces() error {
	for _, n := range []struct {
		name string
		to   **Namespace
	}{{"node", &l.Node}, {"router", &l.Router}, {"outside", &l.Outside}} {
		ns, err := l.addNamespace(n.name)
		if err != nil {
			return err
		}
		*n.to = ns
	}
	for _, ns := range []*Namespace{l.Node, l.Router} {
		if err := ns.sysctls(
			"net/ipv4/ip_forward", "1",
			"net/ipv6/conf/all/forwarding", "1",
		); err != nil {
			return err
		}
	}
	return nil
}

// addNamespace makes a namespace in which tests are not held up: addresses
// work at once, ICMP errors are not rationed, anyone may ping.
func (l *Lab) addNamespace(name string) (*Namespace, error) {
	ns, err := newNamespace(name, name == "node")
	if err != nil {
		return nil, err
	}
	l.namespaces = append(l.namespaces, ns)
	// Before 6.13 this one is the machine's, not the namespace's.
	if err := ns.Sysctl("net/ipv4/icmp_msgs_per_sec", "1000000"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return ns, err
	}
	return ns, ns.sysctls(
		"net/ipv6/conf/all/disable_ipv6", "0",
		"net/ipv6/conf/default/disable_ipv6", "0",
		"net/ipv6/conf/all/accept_dad", "0",
		"net/ipv6/conf/default/accept_dad", "0",
		"net/ipv4/conf/all/rp_filter", "0",
		"net/ipv4/conf/default/rp_filter", "0",
		"net/ipv4/icmp_ratelimit", "0",
		"net/ipv6/icmp/ratelimit", "0",
		"net/ipv4/ping_group_range", "0 2147483647",
	)
}

func (l *Lab) close() error {
	var errs []error
	for _, file := range l.cables {
		errs = append(errs, file.Close())
	}
	for _, ns := range l.namespaces {
		errs = append(errs, ns.close())
	}
	return errors.Join(errs...)
}
