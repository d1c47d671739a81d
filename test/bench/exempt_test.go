// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"ip-masq-agent/test/bench/report"
)

const (
	// Twice what the slowest contender needs on a slow machine for the longest
	// list.
	exemptTimeout = 30 * time.Second
	exemptPoll    = 20 * time.Millisecond
)

func firstExempt() netip.Addr { return netip.MustParseAddr("10.0.0.0") }

// exemptRanges are one that packets go to and, by turns, others that none goes
// to.
func exemptRanges(size, turn int) []netip.Prefix {
	ranges := []netip.Prefix{netip.PrefixFrom(firstExempt(), 22)} // all remotes are in it
	for n := range size - 1 {
		n += (1 + turn%2) << 14
		ranges = append(ranges, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(n >> 8), byte(n), 0}), 24))
	}
	return ranges
}

// exempt has other ranges exempt from now on, and says how long that took.
func (c *contender) exempt(size int) (time.Duration, error) {
	c.turn++
	ranges := exemptRanges(size, c.turn)
	switch c.name {
	case report.Plain:
		return 0, nil
	case report.Legacy:
		return c.pipe(restoreNAT(bareRules(ranges)), "iptables-legacy-restore", "-w", "5")
	case report.NFT:
		return c.pipe(restoreNAT(bareRules(ranges)), "iptables-nft-restore", "-w", "5")
	case report.Set:
		return c.pipe(setScript(ranges), "nft", "-f", "-")
	case report.Upstream:
		if c.turn > 1 {
			return c.pipe(restoreNAT(classicRules(ranges)), "iptables-nft-restore", "-w", "5", "--noflush")
		}
		return c.pipe(restoreNAT(classicJump+classicRules(ranges)), "iptables-nft-restore", "-w", "5", "--noflush")
	}
	return c.reload(ranges)
}

func (c *contender) pipe(script, program string, args ...string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(context.Background(), exemptTimeout)
	defer cancel()
	cmd := c.Node.Command(ctx, program, args...)
	cmd.Stdin = strings.NewReader(script)
	begin := time.Now()
	_, err := cmd.CombinedOutput()
	return time.Since(begin), err
}

// restoreNAT is what the restore programs read.
func restoreNAT(rules string) string { return "*nat\n" + rules + "COMMIT\n" }

// bareRules are what one writes by hand.
func bareRules(ranges []netip.Prefix) string {
	var s strings.Builder
	for _, r := range ranges {
		fmt.Fprintf(&s, "-A POSTROUTING -d %s -j RETURN\n", r)
	}
	s.WriteString("-A POSTROUTING -j MASQUERADE --random-fully\n")
	return s.String()
}

// classicJump is what the classic agent writes if it is not there.
const classicJump = `:IP-MASQ-AGENT - [0:0]
-A POSTROUTING -m comment --comment "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ-AGENT chain" -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT
`

// classicRules are what it writes every minute.
func classicRules(ranges []netip.Prefix) string {
	const keep, masquerade = "local traffic is not subject to MASQUERADE", "outbound traffic is subject to MASQUERADE (must be last in chain)"
	var s strings.Builder
	s.WriteString(":IP-MASQ-AGENT - [0:0]\n")
	for _, r := range append([]netip.Prefix{netip.MustParsePrefix("169.254.0.0/16")}, ranges...) {
		fmt.Fprintf(&s, "-A IP-MASQ-AGENT -m comment --comment \"ip-masq-agent: %s\" -d %s -j RETURN\n", keep, r)
	}
	fmt.Fprintf(&s, "-A IP-MASQ-AGENT -m comment --comment \"ip-masq-agent: %s\" -j MASQUERADE --random-fully\n", masquerade)
	return s.String()
}

// setScript is the best that netfilter can do: one lookup, as ours.
func setScript(ranges []netip.Prefix) string {
	elements := make([]string, len(ranges))
	for i, r := range ranges {
		elements[i] = r.String()
	}
	return "table ip bench\ndelete table ip bench\n" + fmt.Sprintf(`table ip bench {
		set exempt { type ipv4_addr; flags interval; elements = { %s } }
		chain postrouting {
			type nat hook postrouting priority srcnat
			fib daddr type local return
			ip daddr @exempt return
			masquerade fully-random
		}
	}
	`, strings.Join(elements, ", "))
}

// writeConfig changes the agent's config in one step.
func (c *contender) writeConfig(ranges []netip.Prefix) error {
	text, err := json.Marshal(map[string]any{
		"nonMasqueradeCIDRs": ranges, "cidrLimit": len(ranges), "resyncInterval": longTime,
	})
	if err != nil {
		return err
	}
	beside := c.config + ".new"
	return errors.Join(os.WriteFile(beside, text, 0o600), os.Rename(beside, c.config))
}

// reload has the agent read other ranges, and waits until it is done. The time
// is what its syncs took.
func (c *contender) reload(ranges []netip.Prefix) (time.Duration, error) {
	before, err := c.metrics()
	if err != nil {
		return 0, err
	}
	logged := len(c.agent.Logs())
	if err := c.writeConfig(ranges); err != nil {
		return 0, err
	}
	const count, sum = "ip_masq_agent_sync_duration_seconds_count", "ip_masq_agent_sync_duration_seconds_sum"
	for deadline := time.Now().Add(exemptTimeout); time.Now().Before(deadline); time.Sleep(exemptPoll) {
		if !logsChange(c.agent.Logs()[logged:]) {
			continue // asking for metrics would take time from the sync
		}
		now, err := c.metrics()
		if err != nil {
			return 0, err
		}
		if now[count] > before[count] {
			return time.Duration((now[sum] - before[sum]) * float64(time.Second)), nil
		}
	}
	return 0, fmt.Errorf("%s: %d ranges are not in force after %v", c, len(ranges), exemptTimeout)
}

// logsChange looks for the line that both datapaths log of a change.
func logsChange(log string) bool {
	return strings.Contains(log, "CIDRs changed") || strings.Contains(log, "iptables rules written")
}

// metrics are those of the agent that have no labels.
func (c *contender) metrics() (map[string]float64, error) {
	code, body, err := c.agent.Get("/metrics")
	if err != nil || code != 200 {
		return nil, fmt.Errorf("get metrics: HTTP %d, %w", code, err)
	}
	values := make(map[string]float64)
	for line := range bytes.Lines([]byte(body)) {
		name, text, ok := strings.Cut(strings.TrimSpace(string(line)), " ")
		if value, err := strconv.ParseFloat(text, 64); ok && err == nil {
			values[name] = value
		}
	}
	return values, nil
}
