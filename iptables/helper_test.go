// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/lab"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

const testChain = "IP-MASQ-AGENT"

// node is a network namespace with a /run and so an xtables lock of its own.
type node struct {
	tb  testing.TB
	lab *lab.Lab
	ns  *lab.Namespace
	log *bytes.Buffer
}

func newNode(tb testing.TB) *node {
	tb.Helper()
	return nodeOf(tb, lab.New(tb, lab.Options{Pods: -1, RoutedPods: -1}))
}

func nodeOf(tb testing.TB, l *lab.Lab) *node {
	return &node{tb: tb, lab: l, ns: l.Node, log: new(bytes.Buffer)}
}

// run runs a program in the namespace and gives its output; it must succeed.
func (n *node) run(name string, args ...string) string {
	n.tb.Helper()
	out, err := n.ns.Run(n.tb.Context(), name, args...)
	if err != nil {
		n.tb.Fatal(err)
	}
	return out
}

// restore feeds text to a restore program.
func (n *node) restore(m mode, f family, text string) {
	n.tb.Helper()
	n.do(func() error {
		_, err := n.tool(m, f).run(n.tb.Context(), text, n.tool(m, f).program("-restore"), "--noflush")
		return err
	})
}

func (n *node) tool(m mode, f family) tool {
	return newTool(m, f)
}

// do runs f inside the namespace.
func (n *node) do(f func() error) {
	n.tb.Helper()
	if err := n.ns.Do(f); err != nil {
		n.tb.Fatal(err)
	}
}

// prefer has the backend found in use.
func (n *node) prefer(m mode) {
	n.tb.Helper()
	n.run("iptables-"+string(m), "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
}

func (n *node) options() Options {
	return Options{
		Chain: testChain, IPv6: true, RandomFully: true,
		Log: slog.New(slog.NewTextHandler(n.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
}

func (n *node) datapath(options Options) *Datapath {
	n.tb.Helper()
	var d *Datapath
	n.do(func() (err error) {
		d, err = New(options)
		return err
	})
	n.tb.Cleanup(func() {
		if err := d.Close(); err != nil {
			n.tb.Error(err)
		}
	})
	return d
}

// sync syncs and must succeed.
func (n *node) sync(d *Datapath, policy *prefix.Policy) {
	n.tb.Helper()
	if err := n.trySync(d, policy); err != nil {
		n.tb.Fatal(err)
	}
}

func (n *node) trySync(d *Datapath, policy *prefix.Policy) error {
	return n.ns.Do(func() error { return d.Sync(n.tb.Context(), policy, uplinks("eth0")) })
}

// send sends one datagram to a destination that is masqueraded.
func (n *node) send(f family) {
	n.tb.Helper()
	to := netip.AddrPortFrom(n.lab.Remote.Addr(f == ipv6), 9)
	n.do(func() error {
		conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.Write([]byte("x"))
		return err
	})
}

// stats must succeed.
func (n *node) stats(d *Datapath) (stats api.Stats) {
	n.tb.Helper()
	n.do(func() (err error) {
		stats, err = d.Stats()
		return err
	})
	return stats
}

func (n *node) cleanup(options Options) {
	n.tb.Helper()
	n.do(func() error { return Cleanup(context.WithoutCancel(n.tb.Context()), options) })
}

// save is a table without comments and counters.
func (n *node) save(m mode, f family, table string) string {
	n.tb.Helper()
	return withoutCounters(n.run(n.tool(m, f).program("-save"), "-t", table))
}

func withoutCounters(text string) string {
	text = regexp.MustCompile(`(?m)^#.*\n`).ReplaceAllString(text, "")
	return regexp.MustCompile(`(?m) \[\d+:\d+\]$`).ReplaceAllString(text, "")
}

func uplinks(names ...string) *route.Snapshot {
	s := new(route.Snapshot)
	for i, name := range names {
		s.Uplinks = append(s.Uplinks, route.Uplink{
			Index: i + 1, Name: name, Up: true,
			V4: []route.AddressRule{
				{Prefix: netip.MustParsePrefix("192.0.2.0/24"), Address: netip.MustParseAddr("192.0.2.9")},
				{Prefix: netip.MustParsePrefix("0.0.0.0/0"), Address: netip.MustParseAddr("192.0.2.1")},
			},
		})
	}
	return s
}

func prefixes(texts ...string) []netip.Prefix {
	var all []netip.Prefix
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}

func linkLocal() []netip.Prefix { return prefixes("169.254.0.0/16", "fe80::/10") }

func defaultPolicy() *prefix.Policy {
	return prefix.New(prefix.Lists{
		LinkLocal: linkLocal(), NonMasquerade: prefixes("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
	})
}

// fakeProgram puts a shell script before the program of that name in PATH. The
// script finds the real one in $REAL.
func fakeProgram(tb testing.TB, name, script string) {
	tb.Helper()
	dir := tb.TempDir()
	text := "#!/bin/sh\nREAL=/usr/sbin/" + name + "\n" + script + "\n"
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
		tb.Fatal(err)
	}
	tb.(*testing.T).Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

// eachMode runs a test on both backends.
func eachMode(t *testing.T, test func(t *testing.T, n *node, m mode)) {
	for _, m := range []mode{nft, legacy} {
		t.Run(string(m), func(t *testing.T) {
			n := newNode(t)
			n.prefer(m)
			test(t, n, m)
		})
	}
}

// countLines counts the lines that contain text.
func countLines(all, text string) int {
	count := 0
	for line := range strings.Lines(all) {
		if strings.Contains(line, text) {
			count++
		}
	}
	return count
}

// ownPart drops the built-in chains, which not every test's table shows alike.
func ownPart(save string) string {
	var own strings.Builder
	for line := range strings.Lines(save) {
		if strings.Contains(line, "IP-MASQ") {
			own.WriteString(line)
		}
	}
	return own.String()
}
