// SPDX-License-Identifier: Apache-2.0

package main

import (
	"regexp"
	"strconv"
	"testing"
	"time"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/lab"
)

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
