// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

// testPaths are the routes of the explained node: eth0 is an uplink with
// addresses, eth1 one without, cni0 leads to pods.
func testPaths() map[netip.Addr]route.Path {
	gateway := netip.MustParseAddr("192.0.2.254")
	paths := map[netip.Addr]route.Path{
		netip.MustParseAddr("192.0.2.1"):       {Local: true, LinkIndex: 1, LinkName: "lo"},
		netip.MustParseAddr("192.0.2.255"):     {Broadcast: true, LinkIndex: 2, LinkName: "eth0", NextHop: netip.MustParseAddr("192.0.2.255")},
		netip.MustParseAddr("198.51.100.255"):  {Broadcast: true, Local: true, LinkIndex: 1, LinkName: "lo"},
		netip.MustParseAddr("255.255.255.255"): {Broadcast: true, LinkIndex: 2, LinkName: "eth0", NextHop: netip.MustParseAddr("255.255.255.255")},
	}
	for text, path := range map[string]route.Path{
		"8.8.8.8":         {LinkIndex: 2, LinkName: "eth0", NextHop: gateway},
		"8.8.4.4":         {LinkIndex: 3, LinkName: "eth1", NextHop: gateway},
		"10.0.0.1":        {LinkIndex: 2, LinkName: "eth0", NextHop: gateway},
		"10.100.10.1":     {LinkIndex: 2, LinkName: "eth0", NextHop: gateway},
		"10.244.0.5":      {LinkIndex: 9, LinkName: "cni0"},
		"100.64.0.5":      {LinkIndex: 9, LinkName: "cni0"},
		"169.254.169.254": {LinkIndex: 2, LinkName: "eth0"},
		"224.0.0.251":     {LinkIndex: 2, LinkName: "eth0"},
		"2001:db8:1::1":   {LinkIndex: 2, LinkName: "eth0"},
		"fd00::1":         {LinkIndex: 2, LinkName: "eth0"},
		"ff02::fb":        {LinkIndex: 2, LinkName: "eth0"},
	} {
		dst := netip.MustParseAddr(text)
		if !path.NextHop.IsValid() {
			path.NextHop = dst
		}
		paths[dst] = path
	}
	return paths
}

func testPolicy() *prefix.Policy {
	list := func(texts ...string) (prefixes []netip.Prefix) {
		for _, text := range texts {
			prefixes = append(prefixes, netip.MustParsePrefix(text))
		}
		return prefixes
	}
	return prefix.New(prefix.Lists{
		LinkLocal:     list("169.254.0.0/16", "fe80::/10"),
		NonMasquerade: list("10.0.0.0/8", "fd00::/8"),
		Masquerade:    list("10.100.10.0/24"),
	})
}

func TestExplain(t *testing.T) {
	const (
		longestKeep = " is in nonMasqueradeCIDRs and the longest prefix that matches"
		longestMasq = " is in masqueradeCIDRs and the longest prefix that matches"
	)
	flows := []api.Translation{{
		Family: 4, Proto: "tcp",
		Src: netip.MustParseAddr("10.244.0.9"), SPort: 4000, Dst: netip.MustParseAddr("10.0.0.1"), DPort: 443,
		NATAddr: netip.MustParseAddr("192.0.2.1"), NATPort: 50000,
	}, {
		Family: 4, Proto: "udp",
		Src: netip.MustParseAddr("10.244.0.9"), SPort: 4000, Dst: netip.MustParseAddr("8.8.8.8"), DPort: 53,
		NATAddr: netip.MustParseAddr("192.0.2.1"), NATPort: 40000,
	}, {
		Family: 4, Proto: "tcp",
		Src: netip.MustParseAddr("10.244.0.9"), SPort: 4000, Dst: netip.MustParseAddr("8.8.8.8"), DPort: 53,
		NATAddr: netip.MustParseAddr("192.0.2.99"), NATPort: 40000, // of eth2
	}, {
		Family: 6, Proto: "icmpv6",
		Src: netip.MustParseAddr("fd00::9"), SPort: 7, Dst: netip.MustParseAddr("2001:db8:1::1"),
		NATAddr: netip.MustParseAddr("2001:db8::1"), NATPort: 8,
	}, {
		Family: 6, Proto: "udp",
		Src: netip.MustParseAddr("fd00::9"), SPort: 7, Dst: netip.MustParseAddr("2001:db8:1::1"), DPort: 53,
		NATAddr: netip.MustParseAddr("2001:db8::dead"), NATPort: 9,
	}}
	for _, test := range []struct {
		name, datapath string
		question       api.Question
		src, dst       string
		want           api.Answer
	}{
		{name: "no prefix", dst: "8.8.8.8", want: api.Answer{
			Verdict: "masquerade", Reason: "nonMasqueradeCIDRs has no prefix for 8.8.8.8",
			SNATAddress: netip.MustParseAddr("192.0.2.1"), Interface: "eth0",
		}},
		{name: "IPv6", dst: "2001:db8:1::1", want: api.Answer{
			Verdict: "masquerade", Reason: "nonMasqueradeCIDRs has no prefix for 2001:db8:1::1",
			SNATAddress: netip.MustParseAddr("2001:db8::1"), Interface: "eth0",
		}},
		{name: "mapped address", dst: "::ffff:10.0.0.1", want: api.Answer{
			Verdict: "keep", Reason: "10.0.0.0/8" + longestKeep, CIDR: "10.0.0.0/8", Interface: "eth0",
		}},
		{name: "exempt", dst: "fd00::1", want: api.Answer{
			Verdict: "keep", Reason: "fd00::/8" + longestKeep, CIDR: "fd00::/8", Interface: "eth0",
		}},
		{name: "exception", dst: "10.100.10.1", want: api.Answer{
			Verdict: "masquerade", Reason: "10.100.10.0/24" + longestMasq, CIDR: "10.100.10.0/24",
			SNATAddress: netip.MustParseAddr("192.0.2.1"), Interface: "eth0",
		}},
		{name: "link-local", dst: "169.254.169.254", want: api.Answer{
			Verdict: "keep", Reason: "169.254.0.0/16 is link-local and keeps its source unless the config says otherwise",
			CIDR: "169.254.0.0/16", Interface: "eth0",
		}},
		{name: "local", dst: "192.0.2.1", want: api.Answer{
			Verdict: "local", Reason: "192.0.2.1 is an address of this node: the packet does not leave it", Interface: "lo",
		}},
		{name: "no address", dst: "8.8.4.4", want: api.Answer{
			Verdict: "masquerade", Interface: "eth1",
			Reason: "nonMasqueradeCIDRs has no prefix for 8.8.4.4; but eth1 has no usable address, so that the packet is dropped",
		}},
		{name: "towards pods, iptables", dst: "100.64.0.5", want: api.Answer{
			Verdict: "masquerade", Interface: "cni0",
			Reason: "nonMasqueradeCIDRs has no prefix for 100.64.0.5; the address is the one of cni0 that MASQUERADE picks",
		}},
		{name: "towards pods, ebpf", datapath: EBPF, dst: "100.64.0.5", want: api.Answer{
			Verdict: "keep", Interface: "cni0",
			Reason: "the route leads through cni0, which is not an uplink: only uplinks translate",
		}},
		{name: "multicast, iptables", dst: "224.0.0.251", want: api.Answer{
			Verdict: "masquerade", Reason: "nonMasqueradeCIDRs has no prefix for 224.0.0.251",
			SNATAddress: netip.MustParseAddr("192.0.2.1"), Interface: "eth0",
		}},
		{name: "multicast, ebpf", datapath: EBPF, dst: "224.0.0.251", want: api.Answer{
			Verdict: "keep", Reason: "multicast is never touched",
		}},
		{name: "broadcast, ebpf", datapath: EBPF, dst: "255.255.255.255", want: api.Answer{
			Verdict: "keep", Reason: "broadcast is never touched",
		}},
		{name: "IPv6 link-local, ebpf", datapath: EBPF, dst: "fe80::1", want: api.Answer{
			Verdict: "keep", Reason: "fe80::/10 is never touched",
		}},
		{name: "IPv6 link-local source, ebpf", datapath: EBPF, src: "fe80::9", dst: "2001:db8:1::1", want: api.Answer{
			Verdict: "keep", Reason: "fe80::/10 is never touched",
		}},
		{name: "IPv6 multicast, iptables", dst: "ff02::fb", want: api.Answer{
			Verdict: "masquerade", Interface: "eth0",
			Reason: "nonMasqueradeCIDRs has no prefix for ff02::fb; the address is the one of eth0 that MASQUERADE picks",
		}},
		{name: "subnet broadcast, ebpf", datapath: EBPF, dst: "192.0.2.255", want: api.Answer{
			Verdict: "keep", Reason: "broadcast is never touched", Interface: "eth0",
		}},
		{name: "subnet broadcast, own source, ebpf", datapath: EBPF, src: "192.0.2.1", dst: "192.0.2.255", want: api.Answer{
			Verdict: "keep", Reason: "the source already is the address that masquerading gives on eth0", Interface: "eth0",
		}},
		{name: "subnet broadcast, iptables", dst: "192.0.2.255", want: api.Answer{
			Verdict: "masquerade", Reason: "nonMasqueradeCIDRs has no prefix for 192.0.2.255",
			SNATAddress: netip.MustParseAddr("192.0.2.1"), Interface: "eth0",
		}},
		{name: "broadcast that is not passed on", dst: "198.51.100.255", want: api.Answer{
			Verdict: "local", Reason: "198.51.100.255 is a broadcast address, which the node does not pass on", Interface: "lo",
		}},
		{name: "DHCP, ebpf", datapath: EBPF, src: "192.0.2.1", dst: "10.100.10.1",
			question: api.Question{Proto: "udp", Sport: 68, Dport: 67}, want: api.Answer{
				Verdict: "keep", Reason: "the node's own DHCP client keeps its address and port",
			}},
		{name: "a pod's DHCP, ebpf", datapath: EBPF, src: "10.244.0.9", dst: "10.100.10.1",
			question: api.Question{Proto: "udp", Sport: 68, Dport: 67}, want: api.Answer{
				Verdict: "masquerade", Reason: "10.100.10.0/24" + longestMasq, CIDR: "10.100.10.0/24",
				SNATAddress: netip.MustParseAddr("192.0.2.1"), Interface: "eth0",
			}},
		{name: "no source yet, ebpf", datapath: EBPF, src: "0.0.0.0", dst: "8.8.8.8", want: api.Answer{
			Verdict: "keep", Reason: "a packet without a source address is never touched",
		}},
		{name: "own source, ebpf", datapath: EBPF, src: "192.0.2.1", dst: "8.8.8.8", want: api.Answer{
			Verdict: "keep", Reason: "the source already is the address that masquerading gives on eth0", Interface: "eth0",
		}},
		{name: "own source, iptables", src: "192.0.2.1", dst: "8.8.8.8", want: api.Answer{
			Verdict: "masquerade", Reason: "nonMasqueradeCIDRs has no prefix for 8.8.8.8",
			SNATAddress: netip.MustParseAddr("192.0.2.1"), Interface: "eth0",
		}},
		{name: "a live flow sticks", datapath: EBPF, src: "10.244.0.9", dst: "10.0.0.1",
			question: api.Question{Proto: "tcp", Sport: 4000, Dport: 443}, want: api.Answer{
				Verdict: "masquerade", Reason: "the flow is translated to 192.0.2.1:50000 since its first packet",
				SNATAddress: netip.MustParseAddr("192.0.2.1"), Interface: "eth0",
			}},
		{name: "a live ping sticks", datapath: EBPF, src: "fd00::9", dst: "2001:db8:1::1",
			question: api.Question{Proto: "icmp", Sport: 7}, want: api.Answer{
				Verdict: "masquerade", Reason: "the flow is translated to [2001:db8::1]:8 since its first packet",
				SNATAddress: netip.MustParseAddr("2001:db8::1"), Interface: "eth0",
			}},
		{name: "a live flow of a deprecated address", datapath: EBPF, src: "fd00::9", dst: "2001:db8:1::1",
			question: api.Question{Proto: "udp", Sport: 7, Dport: 53}, want: api.Answer{
				Verdict: "masquerade", Reason: "the flow is translated to [2001:db8::dead]:9 since its first packet",
				SNATAddress: netip.MustParseAddr("2001:db8::dead"), Interface: "eth0",
			}},
		{name: "a flow that leaves elsewhere now", datapath: EBPF, src: "10.244.0.9", dst: "8.8.8.8",
			question: api.Question{Proto: "tcp", Sport: 4000, Dport: 53}, want: api.Answer{
				Verdict: "masquerade", Reason: "nonMasqueradeCIDRs has no prefix for 8.8.8.8",
				SNATAddress: netip.MustParseAddr("192.0.2.1"), Interface: "eth0",
			}},
		{name: "own source that clashes", datapath: EBPF, src: "192.0.2.1", dst: "8.8.8.8",
			question: api.Question{Proto: "udp", Sport: 40000, Dport: 53}, want: api.Answer{
				Verdict: "masquerade", Reason: "a translated flow has this address and port towards 8.8.8.8: this one gets another port",
				SNATAddress: netip.MustParseAddr("192.0.2.1"), Interface: "eth0",
			}},
		{name: "own source that does not", datapath: EBPF, src: "192.0.2.1", dst: "8.8.8.8",
			question: api.Question{Proto: "udp", Sport: 40001, Dport: 53}, want: api.Answer{
				Verdict: "keep", Reason: "the source already is the address that masquerading gives on eth0", Interface: "eth0",
			}},
		{name: "another flow does not", datapath: EBPF, src: "10.244.0.9", dst: "10.0.0.1",
			question: api.Question{Proto: "tcp", Sport: 4001, Dport: 443}, want: api.Answer{
				Verdict: "keep", Reason: "10.0.0.0/8" + longestKeep, CIDR: "10.0.0.0/8", Interface: "eth0",
			}},
	} {
		t.Run(test.name, func(t *testing.T) {
			network := newFakeNetwork()
			network.paths = testPaths()
			question := test.question
			question.Dst = netip.MustParseAddr(test.dst)
			if test.src != "" {
				question.Src = netip.MustParseAddr(test.src)
			}
			got, err := Explain(question, Facts{
				Datapath: test.datapath, IPv6: true, Policy: testPolicy(), Network: network.Snapshot(), Path: network.Path,
				EachTranslation: func(visit func(api.Translation)) error {
					for _, flow := range flows {
						visit(flow)
					}
					return nil
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestExplainWithoutIPv6(t *testing.T) {
	got, err := Explain(api.Question{Dst: netip.MustParseAddr("2001:db8:1::1")}, Facts{Policy: testPolicy()})
	if err != nil || got.Verdict != verdictKeep {
		t.Errorf("got %+v, %v, want keep", got, err)
	}
}

func TestExplainOfARefusedUplink(t *testing.T) {
	for datapath, want := range map[string]string{EBPF: "eth0 is refused as an uplink: it smells", IPTables: "nonMasqueradeCIDRs has no prefix for 8.8.8.8"} {
		network := newFakeNetwork()
		network.paths = testPaths()
		got, err := Explain(api.Question{Dst: netip.MustParseAddr("8.8.8.8")}, Facts{
			Datapath: datapath, Policy: testPolicy(), Network: network.Snapshot(), Path: network.Path,
			Readable: func(route.Uplink) error { return errors.New("it smells") },
		})
		if err != nil || got.Reason != want || got.Interface != "eth0" {
			t.Errorf("%s: got %+v, %v, want %q", datapath, got, err, want)
		}
	}
}

func TestExplainRefuses(t *testing.T) {
	for name, question := range map[string]api.Question{
		"no destination": {},
		"mixed families": {Dst: netip.MustParseAddr("8.8.8.8"), Src: netip.MustParseAddr("fd00::1")},
		"no route":       {Dst: netip.MustParseAddr("203.0.113.1")},
	} {
		t.Run(name, func(t *testing.T) {
			network := newFakeNetwork()
			got, err := Explain(question, Facts{Policy: testPolicy(), Network: network.Snapshot(), Path: network.Path})
			if err == nil {
				t.Errorf("got %+v, want an error", got)
			}
		})
	}
}
