// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/lab"
)

const (
	pinPath = "/sys/fs/bpf/ip-masq-agent"

	// promptly is the second within which the agent reacts, and more for a
	// machine that does other things too.
	promptly = 5 * time.Second
)

// long tells whether the tests are to take their time.
func long() bool { return os.Getenv("LONG_TESTS") != "" }

// node is a lab with a config for the agent on its node, and a count of what
// leaves with a pod's address.
type node struct {
	*lab.Lab
	t      *testing.T
	config string
}

func newNode(t *testing.T, options lab.Options) *node {
	t.Helper()
	if options.Pods == 0 && options.RoutedPods == 0 {
		options.Pods, options.RoutedPods = 1, -1
	}
	n := &node{Lab: lab.New(t, options), t: t, config: filepath.Join(t.TempDir(), "config")}
	n.write("nonMasqueradeCIDRs: [10.0.0.0/8]")
	n.forget()
	return n
}

// write changes the config.
func (n *node) write(config string) {
	n.t.Helper()
	next := n.config + ".next"
	if err := os.WriteFile(next, []byte(config+"\n"), 0o600); err != nil {
		n.t.Fatal(err)
	}
	if err := os.Rename(next, n.config); err != nil {
		n.t.Fatal(err)
	}
}

// flags are those of an agent on the node.
func (n *node) flags(datapath string, more ...string) []string {
	return append([]string{"--datapath=" + datapath, "--config=" + n.config}, more...)
}

// once has an agent come, sync, and go.
func (n *node) once(datapath string, more ...string) {
	n.t.Helper()
	n.agent(n.flags(datapath, append(more, "--once", "--metrics-bind-address=0")...)...)
}

// agent runs a command of the agent that must succeed.
func (n *node) agent(args ...string) string {
	n.t.Helper()
	out := lab.RunAgent(n.t, n.Node, args...)
	if out.Code != 0 {
		n.t.Fatalf("%s: %+v", strings.Join(args, " "), out)
	}
	return out.Stdout
}

func (n *node) cleanup() {
	n.t.Helper()
	n.agent("cleanup")
}

func (n *node) status() (status api.Status) {
	n.t.Helper()
	if err := json.Unmarshal([]byte(n.agent("status", "-o", "json")), &status); err != nil {
		n.t.Fatal(err)
	}
	return status
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

// ip runs ip(8) on the node with each line.
func (n *node) ip(lines ...string) {
	n.t.Helper()
	for _, line := range lines {
		n.run("ip", strings.Fields(line)...)
	}
}

// within waits for something that should come soon.
func (n *node) within(limit time.Duration, what string, is func() bool) {
	n.t.Helper()
	for end := time.Now().Add(lab.Patience(limit)); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			n.t.Fatalf("not within %v: %s", lab.Patience(limit), what)
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

// translates checks that a new connection gets an address of the node.
func (n *node) translates(network string, to netip.AddrPort) {
	n.t.Helper()
	conn := n.dial(network, to)
	defer conn.Close()
	if lab.IsPod(conn.Seen.Addr()) {
		n.t.Errorf("%s connection to %s: seen from %s", network, to, conn.Seen)
	}
}

// goesOn checks that a connection lives, with the address that it began with.
func (n *node) goesOn(c *lab.Conn) {
	n.t.Helper()
	if seen, err := c.Ask(); err != nil || seen != c.Seen {
		n.t.Errorf("connection to %s: seen from %s, before from %s; %v", c.Remote, seen, c.Seen, err)
	}
}

// forget counts leaks from 0 on.
func (n *node) forget() {
	n.t.Helper()
	if err := n.Router.NFT(`table inet leaks
		delete table inet leaks
		table inet leaks {
			chain seen {
				type filter hook prerouting priority raw
				iifname "node*" ip saddr 10.244.0.0/16 ip daddr != 10.0.0.0/8 counter
				iifname "node*" ip6 saddr fd00:10:244::/48 ip6 daddr != { fd00::/8, fe80::/10, ff00::/8 } counter
			}
		}`); err != nil {
		n.t.Fatal(err)
	}
}

// leaks counts the packets that left the node since forget with a pod's
// address, towards what nothing exempts.
func (n *node) leaks() int {
	n.t.Helper()
	text, err := n.Router.Run(n.t.Context(), "nft", "list", "table", "inet", "leaks")
	if err != nil {
		n.t.Fatal(err)
	}
	leaks := 0
	words := strings.Fields(text)
	for i, word := range words {
		if word == "packets" {
			count, err := strconv.Atoi(words[i+1])
			if err != nil {
				n.t.Fatalf("%v in %s", err, text)
			}
			leaks += count
		}
	}
	return leaks
}

// noLeak fails the test if something has leaked since forget.
func (n *node) noLeak() {
	n.t.Helper()
	if leaks := n.leaks(); leaks > 0 {
		n.t.Errorf("%d packets left with a pod's address", leaks)
	}
}

// pins lists what is pinned, with the directories.
func (n *node) pins() []string {
	n.t.Helper()
	return strings.Fields(n.run("find", pinPath, "-printf", "%P\n"))
}

// metric reads one series from the agent's metrics, with its labels as they are
// printed there.
func (n *node) metric(a *lab.Agent, series string) float64 {
	n.t.Helper()
	_, page, err := a.Get("/metrics")
	if err != nil {
		n.t.Fatal(err)
	}
	for line := range strings.Lines(page) {
		if text, ok := strings.CutPrefix(line, "ip_masq_agent_"+series+" "); ok {
			value, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
			if err != nil {
				n.t.Fatal(err)
			}
			return value
		}
	}
	n.t.Fatalf("no metric %s", series)
	return 0
}

// footprint is all on a node that an agent could leave: rules, filters,
// programs, pins, mounts.
func (n *node) footprint() string {
	n.t.Helper()
	volatile := regexp.MustCompile(`(?m)^#.*|\[\d+:\d+\]`) // times and counters
	var b strings.Builder
	for _, command := range []string{
		"nft -s list ruleset", "iptables-legacy-save", "ip6tables-legacy-save", "cat /proc/net/ip_tables_names",
		"tc qdisc show", "tc filter show dev eth0 ingress", "tc filter show dev eth0 egress", "bpftool net",
		"find /sys/fs/bpf /run", "findmnt --list --types=bpf",
	} {
		words := strings.Fields(command)
		out, err := n.Node.Run(n.t.Context(), words[0], words[1:]...)
		out = volatile.ReplaceAllString(out, "")
		lines := strings.Split(strings.TrimSpace(out), "\n")
		if words[0] == "find" {
			slices.Sort(lines)
		}
		fmt.Fprintf(&b, "# %s\n%s\n", command, strings.Join(lines, "\n"))
		if err != nil {
			fmt.Fprintf(&b, "%v\n", err)
		}
	}
	return b.String()
}
