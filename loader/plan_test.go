// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/portrange"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

func rule(p, address string) route.AddressRule {
	return route.AddressRule{Prefix: netip.MustParsePrefix(p), Address: netip.MustParseAddr(address)}
}

func TestPlan(t *testing.T) {
	policy := prefix.New(prefix.Lists{
		LinkLocal:     []netip.Prefix{netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("fe80::/10")},
		NonMasquerade: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")},
		Masquerade:    []netip.Prefix{netip.MustParsePrefix("10.99.0.0/16")},
	})
	network := &route.Snapshot{Uplinks: []route.Uplink{
		{
			Index: 2, Name: "eth0", Up: true,
			V4: []route.AddressRule{rule("198.51.100.0/24", "198.51.100.10"), rule("0.0.0.0/0", "203.0.113.10")},
			V6: []route.AddressRule{rule("::/0", "2001:db8::10")},
		},
		{Index: 3, Name: "eth1", Up: true},
		{Index: 4, Name: "ppp0"},
		{Index: 5, Name: "ib0", Type: unix.ARPHRD_INFINIBAND, HeaderLen: route.UnknownHeader, Up: true},
	}}
	for _, tt := range []struct {
		name     string
		opts     Options
		network  *route.Snapshot
		reserved []portrange.Range
		want     string
	}{
		{"all", Options{
			IPv6: true, RandomFully: true, DropInvalid: true, NATTableSize: 262144,
			NodePorts: []portrange.Range{{First: 30000, Last: 32767}},
		}, network, []portrange.Range{{First: 8080, Last: 8080}}, `
cidr 10.99.0.0/16 masquerade
cidr 169.254.0.0/16 keep
cidr 10.0.0.0/8 keep
cidr fe80::/10 keep
cidr fd00::/8 keep
cidr other masquerade
uplink eth0 next-hop 198.51.100.0/24 source 198.51.100.10
uplink eth0 next-hop 0.0.0.0/0 source 203.0.113.10
uplink eth0 destination ::/0 source 2001:db8::10
uplink eth1 ipv4 drop
uplink eth1 ipv6 drop
uplink ppp0 down
uplink ib0 link-type 32 refused
ports 1-8079,8081-29999,32768-65535 random
table 262144 flows
invalid drop
`},
		{"IPv6 off", Options{
			NATTableSize: 10, ToPorts: []portrange.Range{{First: 30000, Last: 30001}},
			NodePorts: []portrange.Range{{First: 30000, Last: 32767}},
		}, &route.Snapshot{}, nil, `
cidr 10.99.0.0/16 masquerade
cidr 169.254.0.0/16 keep
cidr 10.0.0.0/8 keep
cidr other masquerade
uplink none
ports 30000-30001 kept
table 10 flows
invalid pass
`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := plan(tt.opts, policy, tt.network, tt.reserved)
			if diff := cmp.Diff(strings.TrimPrefix(tt.want, "\n"), got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
