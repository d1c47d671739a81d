// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"slices"
	"testing"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/lab"
	"ip-masq-agent/internal/portrange"
)

func ranges(t *testing.T, text string) []portrange.Range {
	t.Helper()
	r, err := portrange.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestPortPool(t *testing.T) {
	const low, privileged, high = bpf.MasqPortClassIdPORT_CLASS_LOW, bpf.MasqPortClassIdPORT_CLASS_PRIVILEGED, bpf.MasqPortClassIdPORT_CLASS_HIGH
	for _, tt := range []struct {
		name                      string
		toPorts, nodes, reserved  string
		kept                      string // ports that a flow may keep
		low, privileged, highPool string // ports of the classes
	}{
		{"all", "", "", "", "1-65535", "1-511", "600-1023", "1024-65535"},
		{"node ports", "", "30000-32767", "", "1-29999,32768-65535", "1-511", "600-1023", "1024-29999,32768-65535"},
		{"reserved ports", "", "", "443,700,50000", "1-442,444-699,701-49999,50001-65535", "1-442,444-511", "600-699,701-1023", "1024-49999,50001-65535"},
		{"both, and a class that is empty", "", "1-511", "2000-65535", "512-1999", "", "600-1023", "1024-1999"},
		{"to-ports are for all", "40000-40010", "", "", "40000-40010", "40000-40010", "40000-40010", "40000-40010"},
		{"to-ports cover node ports", "32000-33000", "30000-32767", "", "32000-33000", "32000-33000", "32000-33000", "32000-33000"},
		{"to-ports without reserved ports", "1-3,65530-65535", "", "2,65535", "1,3,65530-65534", "1,3,65530-65534", "1,3,65530-65534", "1,3,65530-65534"},
		{"nothing is left", "80", "", "80", "", "", "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			pool := newPortPool(ranges(t, tt.toPorts), ranges(t, tt.nodes), ranges(t, tt.reserved))
			for class, want := range map[bpf.MasqPortClassId]string{low: tt.low, privileged: tt.privileged, high: tt.highPool} {
				c := pool.Classes[class]
				if got := pool.Ports[c.First : c.First+c.Count]; !slices.Equal(got, portsOf(t, want)) {
					t.Errorf("class %d has %d ports, want %s", class, len(got), want)
				}
			}
			var kept []uint16
			for port := range 1 << 16 {
				if pool.Allowed[port>>6]>>(port&63)&1 != 0 {
					kept = append(kept, uint16(port))
				}
			}
			if !slices.Equal(kept, portsOf(t, tt.kept)) {
				t.Errorf("%d ports may be kept, want %s", len(kept), tt.kept)
			}
		})
	}
}

func portsOf(t *testing.T, text string) (ports []uint16) {
	t.Helper()
	for _, r := range ranges(t, text) {
		for port := int(r.First); port <= int(r.Last); port++ {
			ports = append(ports, uint16(port))
		}
	}
	return ports
}

func TestReservedPorts(t *testing.T) {
	for text, want := range map[string]string{
		"": "", "0": "", "0-1023": "1-1023", "0,5": "5", "1-3,7": "1-3,7",
	} {
		got, err := parseReserved(text)
		if err != nil || !slices.Equal(got, ranges(t, want)) {
			t.Errorf("%q: got %v, %v, want %s", text, got, err, want)
		}
	}
}

// Every state that a flow can have lives for some time.
func TestEveryStateHasATimeout(t *testing.T) {
	have := make(map[bpf.MasqFlowState]bool)
	for _, s := range timeoutSysctls() {
		if s.fallback == 0 || have[s.state] {
			t.Errorf("%s: %d seconds for state %d", s.name, s.fallback, s.state)
		}
		have[s.state] = true
	}
	for state := bpf.MasqFlowStateFLOW_NONE + 1; state < bpf.MasqFlowStateFLOW_STATE_COUNT; state++ {
		if !have[state] {
			t.Errorf("state %d has none", state)
		}
	}
}

// Timeouts and ports are the node's, as they are at each Sync.
func TestSettingsFollowSysctls(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{Pods: -1, RoutedPods: -1, Conntrack: true}, testOptions4(t))
	check := func(state bpf.MasqFlowState, want uint32, low uint32) {
		t.Helper()
		var seconds uint32
		if err := n.d.maps.Timeouts.Lookup(uint32(state), &seconds); err != nil || seconds != want {
			t.Errorf("timeout of state %d is %d s, want %d; %v", state, seconds, want, err)
		}
		pool := new(bpf.MasqPortPool)
		if err := n.d.maps.PortPool.Lookup(uint32(0), pool); err != nil || pool.Classes[bpf.MasqPortClassIdPORT_CLASS_LOW].Count != low {
			t.Errorf("%d low ports, want %d; %v", pool.Classes[bpf.MasqPortClassIdPORT_CLASS_LOW].Count, low, err)
		}
	}
	check(bpf.MasqFlowStateFLOW_UDP, 30, 511)
	check(bpf.MasqFlowStateFLOW_TCP_ESTABLISHED, 432000, 511)
	for name, value := range map[string]string{
		"net/netfilter/nf_conntrack_udp_timeout":             "17",
		"net/netfilter/nf_conntrack_tcp_timeout_established": "86400",
		"net/ipv4/ip_local_reserved_ports":                   "0-11",
	} {
		if err := n.Node.Sysctl(name, value); err != nil {
			t.Fatal(err)
		}
	}
	check(bpf.MasqFlowStateFLOW_UDP, 30, 511)
	n.sync()
	check(bpf.MasqFlowStateFLOW_UDP, 17, 500)
	check(bpf.MasqFlowStateFLOW_TCP_ESTABLISHED, 86400, 500)
}
