// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"ip-masq-agent/internal/lab"
)

// While the lists change to and fro under a flood of new flows, a destination
// that is exempt in both stays exempt, and one that is in neither stays
// masqueraded.
func TestReloadUnderNewFlows(t *testing.T) {
	const changes = 20
	for name, lists := range map[string][2]string{
		"halves": {
			"10.96.0.0/11]",
			"10.96.0.0/12, 10.112.0.0/12]",
		},
		"nested": {
			"10.0.0.0/8]\nmasqueradeCIDRs: [10.99.0.0/16]",
			"10.96.0.0/11, 10.0.0.0/9]\nmasqueradeCIDRs: [10.99.0.0/24]",
		},
	} {
		for datapath, said := range map[string]string{"iptables": "iptables rules written", "ebpf": "CIDRs changed"} {
			t.Run(datapath+", "+name, func(t *testing.T) {
				t.Parallel()
				n := newNode(t, lab.Options{})
				masqueraded := n.Exception.V4
				if name == "halves" {
					masqueraded = n.Inside2.V4
				}
				filled := func(i int) string { return filler(i%2) + lists[i%2] }
				n.write(filled(0))
				a := lab.StartAgent(t, n.Node, n.flags(datapath)...)
				n.watch(n.Inside.V4, masqueraded)
				end := n.flood(n.Inside.V4, masqueraded)
				for i := range changes {
					n.write(filled(i + 1))
					n.within(promptly, "the changed list in force", func() bool {
						return strings.Count(a.Logs(), said) > i+1
					})
				}
				sent := end()
				exempt, others := n.counts("to_exempt"), n.counts("to_masqueraded")
				t.Logf("%d new flows during %d changes, %d and %d arrived", 2*sent, changes, exempt, others)
				if exempt < 1000 || others < 1000 {
					t.Error("too few arrived to say anything")
				}
				if n.counts("translated") > 0 || n.counts("leaked") > 0 {
					t.Errorf("%d of %d to an exempt address translated, %d of %d others not", n.counts("translated"), sent, n.counts("leaked"), sent)
				}
			})
		}
	}
}

// filler begins one of two lists with a hundred prefixes that the other has not:
// a change takes its time.
func filler(list int) string {
	var b strings.Builder
	fmt.Fprint(&b, "cidrLimit: 200\nnonMasqueradeCIDRs: [")
	for i := range 100 {
		fmt.Fprintf(&b, "172.%d.%d.0/24, ", 16+list, i)
	}
	return b.String()
}

// watch counts on the router what goes to the two destinations, and how much of
// it has the wrong source.
func (n *node) watch(exempt, masqueraded netip.Addr) {
	n.t.Helper()
	if err := n.Router.NFT(fmt.Sprintf(`table ip flood {
		counter to_exempt {}
		counter to_masqueraded {}
		counter translated {}
		counter leaked {}
		chain seen {
			type filter hook prerouting priority raw
			iifname "node0" ip daddr %[1]s counter name to_exempt
			iifname "node0" ip daddr %[2]s counter name to_masqueraded
			iifname "node0" ip daddr %[1]s ip saddr != 10.244.0.0/16 counter name translated
			iifname "node0" ip daddr %[2]s ip saddr 10.244.0.0/16 counter name leaked
			iifname "node0" ip daddr { %[1]s, %[2]s } drop
		}
	}`, exempt, masqueraded)); err != nil {
		n.t.Fatal(err)
	}
}

// counts reads one of watch's counters.
func (n *node) counts(name string) (packets int) {
	n.t.Helper()
	text, err := n.Router.Run(n.t.Context(), "nft", "list", "counter", "ip", "flood", name)
	if err != nil {
		n.t.Fatal(err)
	}
	_, after, _ := strings.Cut(text, "packets ")
	if _, err := fmt.Sscan(after, &packets); err != nil {
		n.t.Fatalf("%v in %s", err, text)
	}
	return packets
}

// flood sends datagrams to the destinations, from a new port each, until the
// function that it gives is called, which tells how many each got.
func (n *node) flood(destinations ...netip.Addr) (end func() int) {
	n.t.Helper()
	sender, err := n.Pods[0].Link.NewSender()
	if err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(n.t.Context())
	var done sync.WaitGroup
	sent := 0
	done.Go(func() {
		for ; ctx.Err() == nil; sent++ {
			for _, to := range destinations {
				from := netip.AddrPortFrom(n.Pods[0].V4, uint16(1024+sent%60000))
				if err := sender.Send(lab.UDP(from, netip.AddrPortFrom(to, uint16(9+sent/60000)), nil)); err != nil {
					n.t.Errorf("send: %v", err)
					return
				}
			}
			if sent%16 == 0 {
				time.Sleep(20 * time.Microsecond) // leave the processors to the agent, too
			}
		}
	})
	return func() int {
		cancel()
		done.Wait()
		_ = sender.Close()
		return sent
	}
}

// Ten thousand CIDRs are replaced by ten thousand others within the time that
// the agent allows itself, on a busy machine ten times as much.
func TestReloadOfManyCIDRs(t *testing.T) {
	const count, limit = 10000, time.Second
	n := newNode(t, lab.Options{})
	lists := func(second int) string {
		var b strings.Builder
		fmt.Fprintf(&b, "cidrLimit: %d\nnonMasqueradeCIDRs:\n", count)
		for i := range count {
			fmt.Fprintf(&b, "- 10.%d.%d.0/24\n", second+i/256, i%256)
		}
		return b.String()
	}
	n.write(lists(0))
	a := lab.StartAgent(t, n.Node, n.flags("ebpf")...)
	conn := n.dial("tcp", n.serve("tcp", n.Remote.V4))
	before := n.metric(a, "sync_duration_seconds_sum")
	n.write(lists(64))
	n.within(10*time.Second, "the other CIDRs in force", func() bool {
		return strings.Contains(a.Logs(), fmt.Sprintf("added=%d removed=%d", count, count)) && n.metric(a, "sync_duration_seconds_count") >= 2
	})
	took := time.Duration((n.metric(a, "sync_duration_seconds_sum") - before) * float64(time.Second))
	t.Logf("%d CIDRs replaced in %v", count, took)
	if took > limit {
		t.Errorf("took %v, want %v at most", took, limit)
	}
	n.goesOn(conn)
	n.translates("udp", n.serve("udp", n.Remote.V4))
}
