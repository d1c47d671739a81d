// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/lab"
)

// A kind of drop is a line a minute, however many there are, and a warning for
// ten.
func TestEventsAreRateLimited(t *testing.T) {
	var lines bytes.Buffer
	kicks := 0
	e := &events{log: slog.New(slog.NewTextHandler(&lines, nil)), full: func() { kicks++ }, last: make(map[bpf.MasqVerdict]drop)}
	begin := time.Now()
	drop := func(verdict bpf.MasqVerdict, after time.Duration) {
		event := bpf.MasqEvent{Proto: unix.IPPROTO_TCP, Dport: be16(443), Verdict: uint8(verdict), Daddr: addr6(netip.MustParseAddr("::ffff:8.8.8.8"))}
		e.take(event, begin.Add(after))
	}
	for second := range 150 {
		drop(bpf.MasqVerdictVERDICT_DROP_PORT_EXHAUSTED, time.Duration(second)*time.Second)
	}
	drop(bpf.MasqVerdictVERDICT_DROP_TABLE_FULL, time.Second)
	got := lines.String()
	if n := strings.Count(got, "reason=port_exhausted"); n != 3 || !strings.Contains(got, "events=60") {
		t.Errorf("%d lines in 150 s, want 3 that count the events between:\n%s", n, got)
	}
	if n := strings.Count(got, "reason=table_full"); n != 1 || kicks != 1 {
		t.Errorf("the other kind: %d lines, %d sweeps:\n%s", n, kicks, got)
	}
	for after, want := range map[time.Duration]int{150 * time.Second: 2, 11 * time.Minute: 1, 20 * time.Minute: 0} {
		if got := e.warnings(begin.Add(after)); len(got) != want {
			t.Errorf("after %v: %q, want %d warnings", after, got, want)
		}
	}
}

// Whoever reads of a drop reads where to, and what to do.
func TestEventsSayWhatToDo(t *testing.T) {
	for verdict, want := range map[bpf.MasqVerdict]string{
		bpf.MasqVerdictVERDICT_DROP_PORT_EXHAUSTED: "no source port is left for udp to [2001:db8::1]:53: make fewer connections to it, or more ports with --to-ports",
		bpf.MasqVerdictVERDICT_DROP_TABLE_FULL:     "the translation table is full, no room for udp to [2001:db8::1]:53: raise --nat-table-size",
		bpf.MasqVerdictVERDICT_DROP_NO_ADDRESS:     "interface lo has no usable address for packets to [2001:db8::1]:53: give it one",
		bpf.MasqVerdictVERDICT_DROP_UNSUPPORTED:    "a second pod sends protocol udp to 2001:db8::1, and answers could not be told apart: one pod at a time",
	} {
		event := bpf.MasqEvent{Proto: unix.IPPROTO_UDP, Dport: be16(53), Verdict: uint8(verdict), Ifindex: 1, Daddr: addr6(netip.MustParseAddr("2001:db8::1"))}
		if got := describe(event); !strings.HasPrefix(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// What runs out is told of with its destination, by the programs themselves.
func TestWhatRunsOutIsTold(t *testing.T) {
	for name, tt := range map[string]struct {
		adjust func(*Options)
		want   string
	}{
		"ports": {func(o *Options) { o.ToPorts = ranges(t, "40000-40001") }, "no source port is left for udp to "},
		"table": {func(o *Options) { o.NATTableSize = 2 }, "the translation table is full, no room for udp to "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			opts := testOptions4(t)
			tt.adjust(&opts)
			var lines lab.Log
			opts.Log = slog.New(slog.NewTextHandler(&lines, nil))
			n := newNode(t, lab.Options{}, opts)
			pod, server := n.Pods[0], netip.AddrPortFrom(n.Remote.V4, 53)
			n.await("a warning", func() bool {
				for port := range uint16(8) {
					if err := pod.Link.Send(lab.UDP(netip.AddrPortFrom(pod.V4, 50000+port), server, nil)); err != nil {
						t.Fatal(err)
					}
				}
				return strings.Contains(strings.Join(n.status().Warnings, "\n"), tt.want+server.String())
			})
			if got := lines.String(); strings.Count(got, "packets dropped") != 1 || !strings.Contains(got, tt.want) {
				t.Errorf("logged\n%s", got)
			}
		})
	}
}
