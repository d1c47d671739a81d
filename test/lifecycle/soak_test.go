// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"ip-masq-agent/internal/lab"
)

// soakTime is how long the soak lasts: a few seconds, or what SOAK says, as
// "10m".
func soakTime(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("SOAK")
	if text == "" {
		return 6 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// Connections come and go as fast as the machine gives while everything happens
// at once and again that may happen to a node. Afterwards none of them was
// harmed, nothing has leaked, and nothing has grown.
// The long form has a second node, with the fast path.
func TestSoak(t *testing.T) {
	nodes := map[string][]string{"stack": nil}
	if os.Getenv("SOAK") != "" {
		nodes["fast path"] = []string{"--fast-path"}
	}
	for name, flags := range nodes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			soakNode(t, flags)
		})
	}
}

// soakNode has flags in the ebpf datapath.
func soakNode(t *testing.T, flags []string) {
	t.Helper()
	s := &soak{node: newNode(t, lab.Options{}), more: flags}
	s.hurry()
	s.start("ebpf")
	s.forget()
	s.hold("tcp")
	s.hold("udp")
	load := s.load(4)
	begin, lasts := time.Now(), soakTime(t)
	s.rounds(begin.Add(lasts*2/3), s.disturb)
	s.sizes = nil
	s.rounds(begin.Add(lasts), func() {})
	s.notGrown()
	load.end()
	s.unharmed(load)
	if lost := load.lost.Load(); lost*1000 > load.opened.Load() {
		t.Errorf("%d exchanges got no answer", lost)
	}
	s.wholePairs()
	if fast := s.status().FastPath; fast.Enabled != (flags != nil) || flags != nil && fast.Packets == 0 {
		t.Errorf("fast path %+v", fast)
	}
	t.Logf("%d connections, %d exchanges without an answer, %d rounds", load.opened.Load(), load.lost.Load(), s.round)
}

type soak struct {
	*node
	agent *lab.Agent
	more  []string // flags of the ebpf datapath
	round int
	sizes []size // at the end of rounds
}

// size is what an agent has taken.
type size struct{ resident, descriptors int }

func (s *soak) start(datapath string) {
	s.t.Helper()
	flags := s.flags(datapath, "--invalid=drop")
	if datapath == "ebpf" {
		flags = append(flags, s.more...)
	}
	s.agent = lab.StartAgent(s.t, s.Node, flags...)
}

// hold opens a connection that exchanges something all the time, until the end
// of the test.
func (s *soak) hold(network string) {
	s.t.Helper()
	conn := s.dial(network, s.serve(network, s.Remote.V4))
	var done sync.WaitGroup
	ctx, cancel := context.WithCancel(s.t.Context())
	s.t.Cleanup(func() {
		cancel()
		done.Wait()
	})
	done.Go(func() {
		for ctx.Err() == nil {
			if seen, err := conn.Ask(); err != nil || seen != conn.Seen {
				s.t.Errorf("the %s connection that is open all the time: seen from %s, before from %s; %v", network, seen, conn.Seen, err)
				return
			}
			time.Sleep(100 * time.Millisecond)
		}
	})
}

// hurry has the node forget flows soon, and the pod use ports again at once:
// neither is to be what limits the load.
func (s *soak) hurry() {
	s.t.Helper()
	for name, seconds := range map[string]string{"tcp_timeout_time_wait": "3", "udp_timeout": "5", "tcp_be_liberal": "1"} {
		if err := s.Node.Sysctl("net/netfilter/nf_conntrack_"+name, seconds); err != nil {
			s.t.Fatal(err)
		}
	}
	for name, value := range map[string]string{"ip_local_port_range": "1024 65535", "tcp_tw_reuse": "1"} {
		if err := s.Pods[0].Sysctl("net/ipv4/"+name, value); err != nil {
			s.t.Fatal(err)
		}
	}
}

// rounds has everything happen until end, twice at least, and then more.
func (s *soak) rounds(end time.Time, then func()) {
	s.t.Helper()
	for first := s.round; s.round < first+2 || time.Now().Before(end); s.round++ {
		s.reload()
		s.addresses()
		s.pods()
		s.measure()
		then()
		if leaks := s.leaks(); leaks > 0 {
			s.t.Fatalf("round %d: %d packets have left with a pod's address", s.round, leaks)
		}
	}
}

// reload changes the config, to a bad one for a while.
func (s *soak) reload() {
	s.t.Helper()
	lists := []string{"[10.0.0.0/8]", "[10.0.0.0/9, 10.128.0.0/9]", "[10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16]"}
	s.write("nonMasqueradeCIDRs: nonsense")
	s.within(promptly, "the bad config seen", func() bool { return strings.Contains(s.agent.Logs(), "config refused") })
	s.write("nonMasqueradeCIDRs: " + lists[s.round%len(lists)])
	s.within(promptly, "the config in force", func() bool { return s.metric(s.agent, "config_last_reload_successful") == 1 })
}

// addresses has one come and go, and another link with one.
func (s *soak) addresses() {
	s.t.Helper()
	s.ip("addr add 203.0.113.88/24 dev eth0", "tuntap add other mode tun", "link set other up", "addr add 192.0.2.88/24 dev other",
		"route add 192.88.99.0/24 via 192.0.2.1")
	s.within(promptly, "another uplink", func() bool { return len(s.status().Interfaces) == 2 })
	s.ip("addr del 203.0.113.88/24 dev eth0", "link del other")
	s.within(promptly, "one uplink", func() bool { return len(s.status().Interfaces) == 1 })
}

// pods has some come and go.
func (s *soak) pods() {
	s.t.Helper()
	var script strings.Builder
	for p := range 20 {
		fmt.Fprintf(&script, "link add pod-%d group 7 type veth peer name eth-%d\nlink set pod-%d up\nlink set eth-%d up\n", p, p, p, p)
	}
	s.batch(script.String() + "link del group 7\n")
}

// disturb kills the agent and starts another, one of the other datapath in every
// second round.
func (s *soak) disturb() {
	s.t.Helper()
	if s.round%2 == 1 {
		s.kill("iptables")
		s.within(promptly, "the programs closed", func() bool { return s.status().Drain.Active })
	}
	s.kill("ebpf")
	s.within(promptly, "no jump", func() bool { return !strings.Contains(s.rules(), "-A POSTROUTING") })
}

func (s *soak) kill(next string) {
	s.t.Helper()
	s.agent.Kill()
	s.start(next)
}

// measure notes how large the agent is.
func (s *soak) measure() {
	s.t.Helper()
	if code, _, err := s.agent.Get("/healthz"); err != nil || code != http.StatusOK {
		s.t.Errorf("not healthy: HTTP %d, %v", code, err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.agent.PID()))
	if err != nil {
		s.t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(status), "VmRSS:")
	resident, err := strconv.Atoi(strings.Fields(after)[0])
	if err != nil {
		s.t.Fatal(err)
	}
	open, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", s.agent.PID()))
	if err != nil {
		s.t.Fatal(err)
	}
	s.sizes = append(s.sizes, size{resident: resident, descriptors: len(open)})
}

// notGrown compares what the agent took at first with what it takes now.
func (s *soak) notGrown() {
	s.t.Helper()
	const spare = 8 << 10 // kB that the garbage collector may hold
	first, last := s.sizes[0], s.sizes[len(s.sizes)-1]
	s.t.Logf("resident %d kB, then %d kB; descriptors %d, then %d", first.resident, last.resident, first.descriptors, last.descriptors)
	if last.resident > first.resident+spare {
		s.t.Errorf("the agent has grown from %d to %d kB", first.resident, last.resident)
	}
	if last.descriptors > first.descriptors+1 { // the last scrape's connection
		s.t.Errorf("the agent has %d descriptors, it had %d", last.descriptors, first.descriptors)
	}
}
