// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"ip-masq-agent/internal/lab"
)

// elements counts those of a set as nft prints it in JSON.
func elements(t *testing.T, text string) int {
	t.Helper()
	var list struct {
		NFTables []struct {
			Set struct{ Elem []json.RawMessage }
		}
	}
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		t.Fatal(err)
	}
	count := 0
	for _, entry := range list.NFTables {
		count += len(entry.Set.Elem)
	}
	return count
}

// drainTimeouts has both datapaths forget soon what has ended.
func (n *node) drainTimeouts() {
	n.t.Helper()
	for name, seconds := range map[string]int{
		"tcp_timeout_time_wait": 1, "tcp_timeout_last_ack": 10, "tcp_timeout_close": 1, "tcp_timeout_fin_wait": 10,
		"tcp_timeout_close_wait": 10, "udp_timeout": 10, "udp_timeout_stream": 10, "icmp_timeout": 10,
	} {
		if err := n.Node.Sysctl("net/netfilter/nf_conntrack_"+name, strconv.Itoa(seconds)); err != nil {
			n.t.Fatal(err)
		}
	}
}

// switchTo ends an agent and starts one of the other datapath.
func (n *node) switchTo(a *lab.Agent, datapath string, more ...string) *lab.Agent {
	n.t.Helper()
	if a != nil {
		if err := a.Stop(); err != nil {
			n.t.Fatal(err)
		}
	}
	return lab.StartAgent(n.t, n.Node, n.flags(datapath, more...)...)
}

// Trap 59: connections that exchange something all the time, and others that come and go,
// notice nothing of a node that goes to ebpf and back: none is reset, none is seen
// from elsewhere, none shares an outside tuple, nothing leaks, with conntrack on
// for other reasons or not. What the datapath before has open it serves to the end.
func TestSwitch(t *testing.T) {
	for _, conntrack := range []bool{false, true} {
		t.Run(fmt.Sprintf("conntrack=%v", conntrack), func(t *testing.T) {
			if !long() { // then one is all that two cores can do
				t.Parallel()
			}
			n := newNode(t, lab.Options{Pods: 2, RoutedPods: -1, Conntrack: conntrack})
			switchThereAndBack(n, conntrack)
		})
	}
}

// switching is a node that changes its datapath under a crowd, under connections
// that come and go, and under others that say nothing meanwhile.
type switching struct {
	*node
	tracked         bool // conntrack is on for other reasons
	agent           *lab.Agent
	crowd           *crowd
	load            *load
	idle            []*lab.Conn
	tcp, udp, pings int // joining at once
}

func switchThereAndBack(n *node, tracked bool) {
	n.t.Helper()
	s := &switching{node: n, tracked: tracked, tcp: 100, udp: 10, pings: 2}
	pause := 100 * time.Millisecond
	if long() {
		s.tcp, s.udp, s.pings, pause = 1000, 50, 10, time.Second
	}
	n.drainTimeouts()
	n.write("nonMasqueradeCIDRs: [10.0.0.0/8]\nresyncInterval: 1s")
	s.to("iptables")
	n.forget()
	s.crowd = n.newCrowd(lab.Patience(pause))
	s.load = n.load(2)
	s.there()
	s.back()
}

// to switches. Ports are kept where they are free, so that there are clashes.
func (s *switching) to(datapath string) {
	s.t.Helper()
	s.agent = s.switchTo(s.agent, datapath, "--random-fully=false")
}

// there goes from iptables to ebpf.
func (s *switching) there() {
	s.t.Helper()
	s.join(0, 20000)
	s.nap()
	s.unharmed("iptables")
	s.to("ebpf")
	s.within(promptly, "no jump", func() bool { return !strings.Contains(s.rules(), "-A POSTROUTING") })
	s.unharmed("to ebpf")
	s.join(1, 20000) // ports that netfilter has given to others
	if drain := s.status().Drain; !drain.Active || drain.Entries < s.tcp {
		s.t.Errorf("to ebpf: drain %+v", drain)
	}
	s.leave(1) // what iptables had
	s.within(60*time.Second, "no chain", func() bool {
		return !strings.Contains(s.rules(), "IP-MASQ-AGENT") && !s.status().Drain.Active
	})
	s.unharmed("ebpf")
}

// back goes from ebpf to iptables.
func (s *switching) back() {
	s.t.Helper()
	if !s.tracked {
		s.untracked()
	}
	s.nap()
	s.join(0, 40000)
	s.to("iptables")
	s.unharmed("back to iptables")
	s.join(1, 40000) // ports that the programs have given to others
	s.unharmed("iptables again")
	if drain := s.status().Drain; !drain.Active || drain.Entries < 2*(s.tcp+s.udp) || s.metric(s.agent, "drain_active") != 1 {
		s.t.Errorf("to iptables: drain %+v", drain)
	}
	s.load.end()
	s.node.unharmed(s.load)
	s.leave(3) // what ebpf had, and what it had to move since
	s.within(60*time.Second, "no programs", func() bool { return !s.status().Drain.Active })
	if pins := s.run("bash", "-c", "ls "+pinPath+" 2>/dev/null || true"); pins != "" {
		s.t.Errorf("left: %s", pins)
	}
	s.join(0, 50000)
	s.unharmed("in the end")
	s.within(promptly, "the log", func() bool { return strings.Contains(s.agent.Logs(), "the other datapath has drained") })
}

func (s *switching) join(pod, sport int) {
	s.t.Helper()
	s.crowd.join(s.Pods[pod], "tcp", s.tcp, sport)
	s.crowd.join(s.Pods[pod], "udp", s.udp, sport)
	s.crowd.joinPings(s.Pods[pod], s.pings)
}

// leave ends those of the first joins, and the idle ones, which go on until then.
func (s *switching) leave(joins int) {
	s.t.Helper()
	s.crowd.leave(joins * (s.tcp + s.udp + s.pings))
	for _, c := range s.idle {
		s.goesOn(c)
		_ = c.Close()
	}
	s.idle = nil
}

// nap adds connections that say nothing until they leave.
func (s *switching) nap() {
	s.t.Helper()
	for _, network := range []string{"tcp", "tcp", "tcp", "udp"} {
		s.idle = append(s.idle, s.dial(network, s.serve(network, s.Remote3.V4)))
	}
}

func (s *switching) unharmed(when string) {
	s.t.Helper()
	s.crowd.exchanged()
	s.crowd.unharmed()
	s.noLeak()
	if s.t.Failed() {
		s.t.Fatal(when)
	}
}

// untracked waits until nothing keeps conntrack on.
func (n *node) untracked() {
	n.t.Helper()
	n.within(promptly, "conntrack off", func() bool {
		n.run("conntrack", "-F")
		n.translates("tcp", n.serve("tcp", n.Remote3.V4))
		return strings.TrimSpace(n.run("conntrack", "-C")) == "0"
	})
}

// rules are those of the nat table.
func (n *node) rules() string {
	n.t.Helper()
	return n.run("iptables-nft-save", "-t", "nat")
}
