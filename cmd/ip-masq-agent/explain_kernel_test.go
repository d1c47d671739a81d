// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/lab"
)

// What explain says of random packets under random lists and routes is what leaves
// the node.
// The short form is the same every time.
func TestKernelExplainSaysWhatTheWireShows(t *testing.T) {
	rounds, seed := 3, uint64(1)
	if os.Getenv("LONG_TESTS") != "" {
		rounds, seed = 100, uint64(time.Now().UnixNano())
	}
	for _, datapath := range []string{agent.IPTables, agent.EBPF} {
		t.Run(datapath, func(t *testing.T) {
			t.Parallel()
			t.Logf("seed %d", seed)
			x := newExplainers(t, datapath, rand.New(rand.NewPCG(seed, 0)))
			for range rounds {
				x.round(60)
			}
			t.Logf("explained: %v", x.explained)
		})
	}
}

// explainers sends packets and compares.
type explainers struct {
	*node
	datapath  string
	random    *rand.Rand
	wires     map[string]*lab.Capture // by the interface of the node that leads there
	routes    [][]string              // added for this round, as arguments of ip
	sent      int
	explained map[string]int
}

// probe is one packet.
type probe struct {
	question api.Question
	token    []byte // its payload
	answer   api.Answer
}

func newExplainers(t *testing.T, datapath string, random *rand.Rand) *explainers {
	t.Helper()
	n := &node{
		Lab:    lab.New(t, lab.Options{Pods: 1, RoutedPods: 1, SecondUplink: true}),
		t:      t,
		config: filepath.Join(t.TempDir(), "ip-masq-agent"),
	}
	x := &explainers{node: n, datapath: datapath, random: random, explained: make(map[string]int)}
	x.wires = map[string]*lab.Capture{
		"eth0": lab.NewCapture(t, n.Wires[0]), "eth1": lab.NewCapture(t, n.Wires[1]),
		"cbr0": lab.NewCapture(t, n.Pods[0].Link), n.RoutedPods[0].Host.Name: lab.NewCapture(t, n.RoutedPods[0].Link),
	}
	return x
}

// round configures the node anew and sends packets through it.
func (x *explainers) round(packets int) {
	x.t.Helper()
	lists := x.randomLists()
	x.write(lists)
	x.randomRoutes()
	flags := x.flags("--datapath="+x.datapath, "--enable-ipv6")
	if got := lab.RunAgent(x.t, x.Node, append(flags, "--once", "--metrics-bind-address=0")...); got.Code != exitFine {
		x.t.Fatalf("%s\n%+v", lists, got)
	}
	var probes []probe
	for range packets {
		p := x.randomProbe()
		if x.ask(&p, flags) && x.send(p) {
			probes = append(probes, p)
		}
	}
	time.Sleep(100 * time.Millisecond) // for what should not be seen
	for _, p := range probes {
		if fault := x.await(p); fault != "" {
			x.t.Errorf("%s from %s to %s: %s\nexplain says %+v\nconfig:\n%s\nroutes: %q", p.question.Proto, p.question.Src, p.question.Dst, fault, p.answer, lists, x.routes)
		}
		x.explained[p.answer.Verdict]++
	}
}

func (x *explainers) randomLists() string {
	used := make(map[netip.Prefix]bool)
	list := func(most int) string {
		var texts []string
		for range x.random.IntN(most + 1) {
			a := x.anyDestination()
			p := netip.PrefixFrom(a, 1+x.random.IntN(a.BitLen())).Masked()
			if !used[p] {
				used[p] = true
				texts = append(texts, `"`+p.String()+`"`)
			}
		}
		return "[" + strings.Join(texts, ", ") + "]"
	}
	return fmt.Sprintf("nonMasqueradeCIDRs: %s\nmasqueradeCIDRs: %s\nmasqLinkLocal: %t", list(8), list(4), x.random.IntN(2) == 0)
}

// randomRoutes takes other routes than those of the last round: to destinations,
// through any gateway or none, and by the source.
func (x *explainers) randomRoutes() {
	x.t.Helper()
	for _, route := range x.routes {
		x.ip("del", route)
	}
	x.routes = nil
	used := make(map[netip.Prefix]bool)
	for range x.random.IntN(6) {
		a := x.anyDestination()
		p := netip.PrefixFrom(a, a.BitLen()-x.random.IntN(a.BitLen()-1)).Masked()
		// The kernel takes no gateway from a route that covers it.
		covers := slices.ContainsFunc(x.gateways(a.Is6()), func(g string) bool { return p.Contains(netip.MustParseAddr(g)) })
		if lab.IsPod(a) || a.IsMulticast() || a.IsLinkLocalUnicast() || used[p] || covers {
			continue
		}
		used[p] = true
		way := "via " + pick(x.random, x.gateways(a.Is6()))
		if x.random.IntN(8) == 0 {
			way = "" // and a type instead
		}
		route := []string{"route", pick(x.random, []string{"unreachable", "blackhole", "prohibit"}), p.String(), "metric", "7"}
		if way != "" {
			route = append([]string{"route", "unicast", p.String(), "metric", "7"}, strings.Fields(way)...)
		}
		x.routes = append(x.routes, route)
	}
	for _, is6 := range []bool{false, true} {
		if x.random.IntN(3) > 0 {
			continue
		}
		from := pick(x.random, []lab.Pair{x.Pods[0].Pair, x.RoutedPods[0].Pair, x.Secondary}).Addr(is6)
		x.routes = append(x.routes,
			[]string{"route", "unicast", pick(x.random, map[bool][]string{false: {"0.0.0.0/0", "8.0.0.0/7"}, true: {"::/0", "2000::/4"}}[is6]),
				"via", pick(x.random, x.gateways(is6)), "table", "100"},
			[]string{"rule", "from", from.String(), "lookup", "100"})
	}
	for _, route := range x.routes {
		x.ip("add", route)
	}
}

func (x *explainers) gateways(is6 bool) []string {
	if is6 {
		return []string{"2001:db8:113::1", "2001:db8:51::1", "2001:db8:2::1"}
	}
	return []string{"203.0.113.1", "198.51.100.1", "192.0.2.1"}
}

// ip adds or deletes a route or a rule.
func (x *explainers) ip(what string, route []string) {
	x.t.Helper()
	family := "-4"
	if strings.Contains(strings.Join(route, " "), ":") {
		family = "-6"
	}
	args := append([]string{family, route[0], what}, route[1:]...)
	if _, err := x.Node.Run(x.t.Context(), "ip", args...); err != nil {
		x.t.Fatal(err)
	}
}

func pick[T any](random *rand.Rand, list []T) T { return list[random.IntN(len(list))] }

// anyDestination is a host that a packet can be sent to without waiting for an
// answer about its link address that never comes.
func (x *explainers) anyDestination() netip.Addr {
	pairs := []lab.Pair{
		x.Remote, x.Remote2, x.ViaSubnet2, x.ViaUplink2, x.Inside, x.Inside2, x.Exception, x.LinkLocal, x.Addresses.Router, // beyond the uplinks
		x.RoutedPods[0].Pair, x.Pods[0].Pair,
		x.Addresses.Node, x.Secondary,
	}
	addresses := []netip.Addr{
		netip.MustParseAddr("203.0.113.255"), netip.MustParseAddr("192.0.2.255"), netip.MustParseAddr("255.255.255.255"),
		netip.MustParseAddr("224.0.0.251"), netip.MustParseAddr("239.1.2.3"),
		x.somewhere("11.0.0.0/8"), x.somewhere("172.16.0.0/12"), x.somewhere("100.64.0.0/10"),
		x.somewhere("2400::/12"), x.somewhere("fd12::/16"),
	}
	for _, p := range pairs {
		addresses = append(addresses, p.V4)
		if p.V6.IsValid() {
			addresses = append(addresses, p.V6)
		}
	}
	return pick(x.random, addresses)
}

func (x *explainers) somewhere(prefix string) netip.Addr {
	p := netip.MustParsePrefix(prefix)
	bytes := p.Addr().AsSlice()
	for bit := p.Bits(); bit < 8*len(bytes); bit++ {
		bytes[bit/8] |= byte(x.random.IntN(2)) << (7 - bit%8)
	}
	a, _ := netip.AddrFromSlice(bytes)
	return a
}

func (x *explainers) randomProbe() probe {
	x.sent++
	dst := x.anyDestination()
	src := pick(x.random, []lab.Pair{
		x.Pods[0].Pair, x.Pods[0].Pair, x.RoutedPods[0].Pair, x.Addresses.Node, x.Secondary, x.Subnet2, x.Uplink2, x.PodGate,
	}).Addr(dst.Is6())
	proto := "udp"
	if lab.IsPod(src) && src != x.PodGate.Addr(dst.Is6()) {
		proto = pick(x.random, []string{"tcp", "udp"})
	}
	return probe{
		question: api.Question{
			Src: src, Dst: dst, Proto: proto,
			Sport: uint16(10000 + x.sent), Dport: uint16(1 + x.random.IntN(1000)),
		},
		token: fmt.Appendf(nil, "packet %d;", x.sent),
	}
}

// ask runs the command. False: there is no route.
func (x *explainers) ask(p *probe, flags []string) bool {
	x.t.Helper()
	q := p.question
	args := append([]string{
		"explain", "-o", "json", "--src=" + q.Src.String(), "--dst=" + q.Dst.String(), "--proto=" + q.Proto,
		fmt.Sprintf("--sport=%d", q.Sport), fmt.Sprintf("--dport=%d", q.Dport),
	}, flags...)
	var out, said bytes.Buffer
	code := exitFine
	err := x.Node.Do(func() error {
		env := realEnvironment()
		env.ctx = x.t.Context()
		code = run(args, &out, &said, env)
		return nil
	})
	if err == nil && code == exitFine {
		err = json.Unmarshal(out.Bytes(), &p.answer)
	}
	if err != nil {
		x.t.Fatalf("%v: %v", args, err)
	}
	if code != exitFine && !strings.Contains(said.String(), "find the route") {
		x.t.Fatalf("%v: %s", args, said.String())
	}
	return code == exitFine
}

// send has the source send the packet. False: it would not.
func (x *explainers) send(p probe) bool {
	x.t.Helper()
	q := p.question
	from, to := netip.AddrPortFrom(q.Src, q.Sport), netip.AddrPortFrom(q.Dst, q.Dport)
	for _, pod := range []*lab.Pod{x.Pods[0], x.RoutedPods[0]} {
		if pod.Addr(q.Src.Is6()) != q.Src {
			continue
		}
		packet := lab.UDP(from, to, p.token)
		if q.Proto == "tcp" {
			packet = lab.TCP(from, to, lab.SYN, 1, 0, p.token)
		}
		if err := pod.Link.Send(packet); err != nil {
			x.t.Fatal(err)
		}
		return q.Dst != q.Src
	}
	conn, err := x.Node.ListenPacket(x.t.Context(), "udp", from)
	if err != nil {
		x.t.Fatal(err)
	}
	defer conn.Close()
	_, err = conn.WriteTo(p.token, net.UDPAddrFromAddrPort(to))
	return err == nil
}

// await gives a packet that is on its way the time that a busy machine takes.
func (x *explainers) await(p probe) string {
	x.t.Helper()
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if fault := x.compare(p); fault != notSeen || time.Now().After(deadline) {
			return fault
		}
	}
}

const notSeen = "it did not leave"

// compare says what is not as explained, if something is not.
func (x *explainers) compare(p probe) string {
	x.t.Helper()
	q, a := p.question, p.answer
	where, source := "", netip.Addr{}
	for name, wire := range x.wires {
		for _, packet := range wire.Select(func(packet *lab.Packet) bool {
			return !packet.Outgoing && packet.Dst == q.Dst && bytes.Equal(packet.Payload, p.token)
		}) {
			if where == "" || where != a.Interface { // what the router sends back passes by twice
				where, source = name, packet.Src
			}
		}
	}
	unseen := a.Verdict == "local" || strings.Contains(a.Reason, "the packet is dropped")
	switch {
	case unseen && where != "":
		return fmt.Sprintf("it left through %s as %s", where, source)
	case unseen:
		return ""
	case where == "" && lab.IsPod(q.Src) && !q.Src.Is6() && (q.Dst.IsMulticast() || q.Dst == netip.AddrFrom4([4]byte{255, 255, 255, 255})):
		return "" // the node passes none on
	case where == "":
		return notSeen
	case a.Interface != "" && where != a.Interface:
		return "it left through " + where
	case a.Verdict == "keep" && source != q.Src, a.SNATAddress.IsValid() && source != a.SNATAddress:
		return fmt.Sprintf("it left as %s", source)
	case a.Verdict == "masquerade" && lab.IsPod(source) && source != x.PodGate.Addr(q.Dst.Is6()):
		return fmt.Sprintf("it left as %s", source)
	}
	return ""
}
