// SPDX-License-Identifier: Apache-2.0

package loader

import (
	gomaps "maps"
	"slices"
	"strconv"
	"testing"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/lab"
)

// The node's timeouts are read again at each sync.
func TestTimeoutsFollowTheSysctls(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{Conntrack: true}, testOptions4(t))
	states := map[string]bpf.MasqFlowState{
		"tcp_timeout_syn_sent": bpf.MasqFlowStateFLOW_TCP_SYN_SENT, "tcp_timeout_syn_recv": bpf.MasqFlowStateFLOW_TCP_SYN_RECV,
		"tcp_timeout_established": bpf.MasqFlowStateFLOW_TCP_ESTABLISHED, "tcp_timeout_fin_wait": bpf.MasqFlowStateFLOW_TCP_FIN_WAIT,
		"tcp_timeout_close_wait": bpf.MasqFlowStateFLOW_TCP_CLOSE_WAIT, "tcp_timeout_last_ack": bpf.MasqFlowStateFLOW_TCP_LAST_ACK,
		"tcp_timeout_time_wait": bpf.MasqFlowStateFLOW_TCP_TIME_WAIT, "tcp_timeout_close": bpf.MasqFlowStateFLOW_TCP_CLOSE,
		"tcp_timeout_unacknowledged": bpf.MasqFlowStateFLOW_TCP_UNACKNOWLEDGED, "generic_timeout": bpf.MasqFlowStateFLOW_GENERIC,
		"udp_timeout": bpf.MasqFlowStateFLOW_UDP, "udp_timeout_stream": bpf.MasqFlowStateFLOW_UDP_STREAM,
		"icmp_timeout": bpf.MasqFlowStateFLOW_ICMP, "icmpv6_timeout": bpf.MasqFlowStateFLOW_ICMPV6,
		"sctp_timeout_established": bpf.MasqFlowStateFLOW_SCTP,
	}
	if len(states) != len(timeoutSysctls()) {
		t.Errorf("%d sysctls are known here, and %d in the agent", len(states), len(timeoutSysctls()))
	}
	for _, first := range []int{1000, 2000} {
		names, want := slices.Sorted(gomaps.Keys(states)), uint32(first)
		for i, name := range names {
			if err := n.Node.Sysctl("net/netfilter/nf_conntrack_"+name, strconv.Itoa(first+i)); err != nil {
				t.Fatal(err)
			}
		}
		n.sync()
		for _, name := range names {
			var got uint32
			if err := n.d.maps.Timeouts.Lookup(uint32(states[name]), &got); err != nil || got != want {
				t.Errorf("%s: %d s, want %d; %v", name, got, want, err)
			}
			want++
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
