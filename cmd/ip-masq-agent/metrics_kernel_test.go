// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/lab"
)

// What Prometheus scrapes is well-formed, and each series one that the golden
// files and so the alerts know.
func TestKernelMetrics(t *testing.T) {
	golden, err := os.ReadFile("../../internal/agent/testdata/metrics_busy.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, datapath := range []string{agent.IPTables, agent.EBPF} {
		t.Run(datapath, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			a := lab.StartAgent(t, n.Node, n.flags("--enable-ipv6", "--datapath="+datapath)...)
			const pings = 3
			for range pings {
				if _, err := n.Pods[0].Run(t.Context(), "ping", "-c1", "-W2", n.Remote.V4.String()); err != nil {
					t.Fatal(err)
				}
			}
			_, page, err := a.Get("/metrics")
			if err != nil {
				t.Fatal(err)
			}
			check := exec.CommandContext(t.Context(), "promtool", "check", "metrics")
			check.Stdin = strings.NewReader(page)
			if said, err := check.CombinedOutput(); err != nil || len(said) > 0 {
				t.Errorf("promtool: %v: %s", err, said)
			}
			series := regexp.MustCompile(`(?m)^ip_masq_agent_\w+`).FindAllString(page, -1)
			for _, name := range series {
				if !strings.Contains(string(golden), "\n"+name) && !strings.HasPrefix(string(golden), name) {
					t.Errorf("%s is not in the golden file", name)
				}
			}
			// The node's own IGMP reports may be among those that iptables counts.
			counted := regexp.MustCompile(`(?m)^ip_masq_agent_translations_total\{family="ipv4"\} (\d+)$`).FindStringSubmatch(page)
			if counted == nil {
				t.Fatal("translations are not counted")
			}
			if got, err := strconv.Atoi(counted[1]); err != nil || got < pings {
				t.Errorf("%s translations after %d pings", counted[1], pings)
			}
		})
	}
}

// An agent to which nothing happens syncs, and says nothing.
func TestKernelIdleIsSilent(t *testing.T) {
	for _, datapath := range []string{agent.IPTables, agent.EBPF} {
		t.Run(datapath, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.write("nonMasqueradeCIDRs: [10.0.0.0/8, 'fd00::/8']\nresyncInterval: 1s")
			a := lab.StartAgent(t, n.Node, n.flags("--enable-ipv6", "--datapath="+datapath)...)
			syncs := func() int {
				_, page, err := a.Get("/metrics")
				match := regexp.MustCompile(`(?m)^ip_masq_agent_sync_duration_seconds_count (\d+)$`).FindStringSubmatch(page)
				if err != nil || match == nil {
					return 0
				}
				count, _ := strconv.Atoi(match[1])
				return count
			}
			// What the agent itself did at its start may come back as news once.
			n.within(10*time.Second, "two syncs", func() bool { return syncs() >= 2 })
			before, begin := a.Logs(), syncs()
			n.within(20*time.Second, "three more", func() bool { return syncs() >= begin+3 })
			if after := a.Logs(); after != before {
				t.Errorf("it said\n%s", after[len(before):])
			}
		})
	}
}
