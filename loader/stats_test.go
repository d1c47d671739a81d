// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/lab"
)

// Whoever asks does not scan the table, and still is told of flows at once.
func TestStatsFollowTheFlows(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{}, testOptions(t))
	n.await("the first sweep", func() bool {
		n.d.sweeper.mu.Lock()
		defer n.d.sweeper.mu.Unlock()
		return n.d.sweeper.last != nil
	})
	n.d.sweeper.stop() // the sweeps of this test are its own
	server := n.serve("udp", n.Remote.V4)
	for range 3 {
		n.dial("udp", server)
	}
	n.dial("udp", n.serve("udp", n.Remote.V6))
	stats, err := n.d.Stats()
	if err != nil || stats.NAT.V4 != (api.Table{Entries: 3, Capacity: 4096}) || stats.NAT.V6.Entries != 1 {
		t.Fatalf("%v, %+v", err, stats.NAT)
	}
	if len(stats.Busiest) != 0 {
		t.Errorf("busiest before a sweep saw them: %+v", stats.Busiest)
	}
	if _, err := n.d.sweeper.sweep(); err != nil {
		t.Fatal(err)
	}
	if stats, err = n.d.Stats(); err != nil || stats.NAT.V4.Entries != 3 || stats.LastSweep == 0 || len(stats.Busiest) != 2 {
		t.Fatalf("after a sweep: %v, %+v", err, stats)
	}
	got := stats.Busiest[0]
	ports := 65535 - 1023 - (32767 - 30000 + 1)
	want := api.BusyDestination{Proto: "udp", Address: n.Remote.V4, Port: server.Port(), NATAddr: n.Addresses.Node.V4, Flows: 3}
	pressure := got.Pressure
	if got.Pressure = 0; got != want || pressure < 3/65536. || pressure > 3/float64(ports-100) {
		t.Errorf("busiest %+v, %g; want %+v", got, pressure, want)
	}
	opened := slices.IndexFunc(stats.Packets, func(p api.PacketCount) bool {
		return p.Direction == "egress" && p.Family == "ipv4" && p.Verdict == "opened"
	})
	if opened < 0 || stats.Packets[opened].Packets != 3 || stats.Packets[opened].Bytes < 3*28 {
		t.Errorf("packets %+v", stats.Packets)
	}
}

func TestEveryDropHasAReason(t *testing.T) {
	spec, err := bpf.LoadMasq()
	if err != nil {
		t.Fatal(err)
	}
	names, err := verdictNames(spec.Types)
	if err != nil {
		t.Fatal(err)
	}
	var reasons []string
	for verdict := bpf.MasqVerdictVERDICT_DROP_FIRST; verdict < bpf.MasqVerdictVERDICT_COUNT; verdict++ {
		reason := dropReasons()[verdict]
		if names[verdict] != "drop_"+reason {
			t.Errorf("verdict %s is told as %s", names[verdict], reason)
		}
		reasons = append(reasons, reason)
	}
	if !slices.Equal(reasons, api.DropReasons()) {
		t.Errorf("reasons %q, want %q", reasons, api.DropReasons())
	}
}

func TestCrowdCounter(t *testing.T) {
	address := netip.MustParseAddr("198.51.100.1")
	busy := remote{address: [4]uint32{addr4(address)}, port: be16(443), proto: unix.IPPROTO_TCP}
	second := busy
	second.proto = unix.IPPROTO_UDP
	counter := make(crowdCounter)
	flows := 0
	for i := range 100 * crowdCounters {
		other := remote{address: [4]uint32{uint32(i)}, proto: unix.IPPROTO_TCP}
		for _, r := range []remote{other, busy, busy, second} {
			counter.add(r)
			flows++
		}
	}
	if len(counter) > crowdCounters {
		t.Errorf("%d counters", len(counter))
	}
	biggest := counter.biggest()
	if len(biggest) != crowdsTold || biggest[0].String() != "tcp 198.51.100.1:443" || biggest[1].String() != "udp 198.51.100.1:443" {
		t.Fatalf("got %v", biggest)
	}
	for i, want := range []int{200 * crowdCounters, 100 * crowdCounters} {
		if got := biggest[i].flows; got > want || got < want-flows/crowdCounters {
			t.Errorf("%v has %d flows, want %d or little less", biggest[i], got, want)
		}
	}
}

// What is going to fail is told before it does, with what to do.
func TestWarningsBeforeItHappens(t *testing.T) {
	t.Parallel()
	opts := testOptions(t)
	opts.NATTableSize = 5
	opts.ToPorts = ranges(t, "40000-40004")
	n := newNode(t, lab.Options{}, opts)
	server := n.serve("udp", n.Remote.V4)
	for range 4 {
		n.dial("udp", server)
	}
	if _, err := n.d.sweeper.sweep(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"eth0", "cbr0"} {
		n.run("ip", "-6", "addr", "flush", "dev", name)
	}
	n.sync()
	got := strings.Join(n.status().Warnings, "\n")
	for _, want := range []string{
		"the IPv4 table holds 4 of 5 translations: new ones are refused when it is full; raise --nat-table-size",
		"80% of the source ports of 203.0.113.10 towards udp " + server.String() + " are in use: make fewer connections to it, or more ports with --to-ports",
		"interface eth0 has no usable IPv6 address: what should be masqueraded there is dropped; give it one",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no warning %q in\n%s", want, got)
		}
	}
}

// A program of somebody else before ours is logged once, and once when it is gone.
func TestForeignProgramIsLoggedOnce(t *testing.T) {
	var lines bytes.Buffer
	d := &Datapath{log: slog.New(slog.NewTextHandler(&lines, nil)), ahead: []string{"eth0"}}
	for _, before := range [][]string{nil, {"eth0"}, {"eth0"}, {"eth1", "eth0"}} {
		d.logAhead(before)
	}
	if got := lines.String(); strings.Count(got, "\n") != 2 || !strings.Contains(got, "no longer so\" warning=eth1") {
		t.Errorf("logged\n%s", got)
	}
}
