// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/lab"
)

func TestNATList(t *testing.T) {
	lab.RequireRoot(t)
	s := newStage(t)
	s.startAgent("--datapath=ebpf")
	golden(t, "nat.txt", s.run("nat", "list").stdout)

	got := s.run("nat", "list", "-o", "json", "--proto", "UDP", "--src", "10.0.0.0/24")
	wantShape(t, got.stdout, `[{"family":4,"proto":"","src":"","sport":0,"dst":"","dport":0,"nat_addr":"","nat_port":0,
"state":"","idle_seconds":0,"expires_seconds":0}]`)
	var flows []api.Translation
	if err := json.Unmarshal([]byte(got.stdout), &flows); err != nil || len(flows) != 1 || flows[0].Proto != "udp" {
		t.Errorf("got %v, %+v", err, got)
	}
	if got := s.run("nat", "list", "-o", "json", "--dst", "9.9.9.9"); strings.TrimSpace(got.stdout) != "[]" {
		t.Errorf("nothing found: got %+v, want an empty list", got)
	}
}

func TestNATListCounts(t *testing.T) {
	lab.RequireRoot(t)
	s := newStage(t)
	check := func(t *testing.T) {
		for args, want := range map[string]string{
			"--count-by=pod":                       "FLOWS  POD\n1      10.0.0.1\n1      10.0.0.2\n",
			"--count-by=destination":               "FLOWS  DESTINATION\n1      tcp 198.51.100.1:443\n1      udp 198.51.100.1:443\n",
			"--count-by=destination --proto=udp":   "FLOWS  DESTINATION\n1      udp 198.51.100.1:443\n",
			"--count-by=pod --dst=9.9.9.9 -o=json": "[]\n",
		} {
			if got := s.run(append([]string{"nat", "list"}, strings.Fields(args)...)...); got.code != exitFine || got.stdout != want {
				t.Errorf("%s: got %+v, want %s", args, got, want)
			}
		}
	}
	s.left = agent.EBPF
	t.Run("without agent", check)
	s.left = ""
	s.startAgent("--datapath=ebpf")
	t.Run("by the agent", check)
	for _, args := range []string{"--count-by=colour", "--count-by=pod --watch"} {
		if got := s.run(append([]string{"nat", "list"}, strings.Fields(args)...)...); got.code != exitUsage {
			t.Errorf("%s: got %+v", args, got)
		}
	}
}

// A full table is listed, and counted in a moment.
func TestNATListOfAFullTable(t *testing.T) {
	lab.RequireRoot(t)
	s := newStage(t)
	s.flows = make([]api.Translation, 262144)
	for i := range s.flows {
		flow := testFlows()[0]
		flow.Src = netip.AddrFrom4([4]byte{10, 244, byte(i >> 16), byte(i >> 8)})
		flow.SPort, flow.NATPort = uint16(i), uint16(i)
		s.flows[i] = flow
	}
	s.startAgent("--datapath=ebpf")
	lines := map[string]int{"--count-by=pod": 1025, "--count-by=destination": 2, "--src=10.244.3.255": 257}
	if os.Getenv("LONG_TESTS") != "" {
		lines[""], lines["-o=json"] = 262145, 262144
	}
	for args, want := range lines {
		begin := time.Now()
		got := s.run(append([]string{"nat", "list"}, strings.Fields(args)...)...)
		if n := strings.Count(got.stdout, "\n"); got.code != exitFine || n != want {
			t.Errorf("%s: %d lines, want %d; %s", args, n, want, got.stderr)
		}
		t.Logf("%q took %v", args, time.Since(begin).Round(time.Millisecond))
	}
}

func TestNATListOfIPTablesSaysWhereToLook(t *testing.T) {
	lab.RequireRoot(t)
	s := newStage(t)
	s.startAgent()
	got := s.run("nat", "list", "--dst", "9.9.9.9", "-o", "json")
	if strings.TrimSpace(got.stdout) != "[]" || !strings.Contains(got.stderr, "conntrack -L") {
		t.Errorf("got %+v", got)
	}
}

func TestNATListWithoutAgent(t *testing.T) {
	s := newStage(t)
	got := s.run("nat", "list", "-o", "json")
	if got.code != exitFine || strings.TrimSpace(got.stdout) != "[]" || !strings.Contains(got.stderr, "none left anything") {
		t.Errorf("nothing in the kernel: got %+v", got)
	}
	s.left = agent.EBPF
	golden(t, "nat.txt", s.run("nat", "list").stdout)
	got = s.run("nat", "list", "-o", "json", "--src", "10.0.0.2")
	var flows []api.Translation
	if err := json.Unmarshal([]byte(got.stdout), &flows); err != nil || len(flows) != 1 || flows[0].Proto != "udp" || got.stderr != "" {
		t.Errorf("got %v, %+v", err, got)
	}
	s.env.datapaths[agent.EBPF] = datapath{
		flows: func(*options, *slog.Logger, func(api.Translation)) error { return errors.New("no rights") },
	}
	if got := s.run("nat", "list"); got.code != exitFailure || !strings.Contains(got.stderr, "no rights") {
		t.Errorf("got %+v, want the error", got)
	}
}

func TestNATEvents(t *testing.T) {
	flows := testFlows()
	known := make(map[flowKey]api.Translation)
	closing, moved := flows[0], flows[1]
	closing.State = "closing"
	moved.NATPort++
	for i, step := range []struct {
		now  []api.Translation
		want []natEvent
	}{
		{flows, []natEvent{{"new", flows[0]}, {"new", flows[1]}}},
		{flows, nil},
		{[]api.Translation{closing, flows[1]}, []natEvent{{"state", closing}}},
		{[]api.Translation{flows[1]}, []natEvent{{"end", closing}}},
		{[]api.Translation{moved}, []natEvent{{"end", flows[1]}, {"new", moved}}},
		{[]api.Translation{flows[0], moved}, []natEvent{{"new", flows[0]}}},
		{nil, []natEvent{{"end", moved}, {"end", flows[0]}}},
	} {
		if diff := cmp.Diff(step.want, natEvents(known, step.now), cmp.Comparer(equalFlows)); diff != "" {
			t.Errorf("step %d (-want +got):\n%s", i, diff)
		}
	}
}

// Watching prints what is there, then what changes, until it is ended.
func TestNATListWatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		lister := &scriptedLister{flows: testFlows()[:1]}
		var out bytes.Buffer
		ended := make(chan error, 1)
		go func() { ended <- watchNAT(ctx, lister, agent.NATFilter{}, &out, "json") }()
		time.Sleep(5 * watchInterval / 2)
		lister.flows = nil
		time.Sleep(watchInterval)
		cancel()
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		var events []string
		for line := range strings.Lines(out.String()) {
			var event natEvent
			if err := json.Unmarshal([]byte(line), &event); err != nil {
				t.Fatal(err)
			}
			events = append(events, event.Event+" "+event.Src.String())
		}
		if got := strings.Join(events, ", "); got != "new 10.0.0.2, end 10.0.0.2" || lister.looks != 4 {
			t.Errorf("got %s in %d looks", got, lister.looks)
		}
	})
}

// scriptedLister lists what it is told to.
type scriptedLister struct {
	flows []api.Translation
	looks int
}

func (l *scriptedLister) NAT(_ context.Context, _ agent.NATFilter, visit func(api.Translation)) error {
	l.looks++
	for _, flow := range l.flows {
		visit(flow)
	}
	return nil
}

func (*scriptedLister) NATCounts(context.Context, agent.NATFilter, agent.CountBy) ([]api.FlowCount, error) {
	return nil, nil
}

func equalFlows(a, b api.Translation) bool { return a == b }

func TestEndpointOfAPing(t *testing.T) {
	ping := testFlows()[0]
	ping.Proto, ping.SPort, ping.DPort = "icmp", 7, 0
	if row := natRow(ping); row[1] != "10.0.0.2:7" || row[2] != "198.51.100.1" {
		t.Errorf("got %q, want the identifier as the source's port, and none at the other end", row)
	}
}
