// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"testing"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/lab"
)

// The node's timeouts are read again at each sync.
func TestTimeoutsFollowTheSysctls(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{Conntrack: true}, testOptions4(t))
	for _, want := range []string{"77", "30"} {
		n.run("bash", "-c", "echo "+want+" > /proc/sys/net/netfilter/nf_conntrack_udp_timeout")
		n.sync()
		var got uint32
		if err := n.d.maps.Timeouts.Lookup(uint32(bpf.MasqFlowStateFLOW_UDP), &got); err != nil {
			t.Fatal(err)
		}
		if map[string]uint32{"77": 77, "30": 30}[want] != got {
			t.Errorf("timeout %d s, want %s", got, want)
		}
	}
}

// What netfilter does not track it does not translate. Here that makes no
// difference.
func TestNotrackDoesNotExempt(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{Conntrack: true}, testOptions4(t))
	n.run("nft", "add table ip untracked")
	n.run("nft", "add chain ip untracked pre { type filter hook prerouting priority raw; }")
	n.run("nft", "add rule ip untracked pre notrack")
	n.translates("udp", false)
	n.translates("tcp", false)
}
