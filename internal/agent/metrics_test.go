// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"errors"
	"flag"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"ip-masq-agent/internal/api"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// exposition is what /metrics shows of our own metrics.
func exposition(t *testing.T, g prometheus.Gatherer) string {
	t.Helper()
	page := httptest.NewRecorder()
	promhttp.HandlerFor(g, promhttp.HandlerOpts{}).ServeHTTP(page, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if page.Code != http.StatusOK {
		t.Fatalf("got %d: %s", page.Code, page.Body)
	}
	var ours strings.Builder
	for line := range strings.Lines(page.Body.String()) {
		if strings.Contains(line, metricPrefix) {
			ours.WriteString(line)
		}
	}
	return ours.String()
}

func golden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", file, diff)
	}
}

func TestMetricsArePresentFromTheStart(t *testing.T) {
	golden(t, "testdata/metrics_start.txt", exposition(t, newBench(t).Metrics()))
}

func TestMetricsSayWhatIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(o *Options) { o.Config.EnableIPv6 = true })
		b.datapath.name = EBPF
		b.datapath.status = api.DatapathStatus{
			Interfaces: []api.Interface{{Name: "eth0", Attach: "tcx", SNATv4: netip.MustParseAddr("192.0.2.1")}, {Name: "eth1"}},
			Drain:      api.Drain{Active: true, Entries: 14},
			Warnings:   []string{"eth1 is odd", "eth0 has no usable IPv6 address"},
		}
		b.datapath.stats = api.Stats{
			Drops:          map[string]uint64{"port_exhausted": 1, "table_full": 2, "fragment": 3, "invalid": 4, "unsupported": 5, "no_address": 6},
			NAT:            api.NAT{V4: api.Table{Entries: 7, Capacity: 8}, V6: api.Table{Entries: 9, Capacity: 10}},
			TranslationsV4: 11, TranslationsV6: 12,
			Packets: []api.PacketCount{
				{Direction: "egress", Family: "ipv4", Verdict: "translated", Packets: 21, Bytes: 2100},
				{Direction: "ingress", Family: "ipv6", Verdict: "no_flow", Packets: 22, Bytes: 2200},
			},
			Busiest: []api.BusyDestination{
				{Proto: "tcp", Address: netip.MustParseAddr("198.51.100.1"), Port: 443, NATAddr: netip.MustParseAddr("192.0.2.1"), Flows: 30000, Pressure: .5},
				{Proto: "icmpv6", Address: netip.MustParseAddr("2001:db8::53"), NATAddr: netip.MustParseAddr("2001:db8::1"), Flows: 6554, Pressure: .1},
				{Proto: "udp", Address: netip.MustParseAddr("198.51.100.2"), Port: 53, NATAddr: netip.MustParseAddr("192.0.2.1"), Flows: 1, Pressure: .01},
			},
			Repairs:   13,
			Attempts:  []uint64{7, 0, 2, 1},
			LastSweep: 1500 * time.Millisecond,
			Swept:     15,
			Early:     16,
		}
		b.start()
		time.Sleep(30 * time.Second) // between two resyncs
		b.rewrite(`nonMasqueradeCIDRs: [x]`)
		golden(t, "testdata/metrics_busy.txt", exposition(t, b.Metrics()))
	})
}

func TestMetricsPassTheLinter(t *testing.T) {
	problems, err := testutil.GatherAndLint(newBench(t).Metrics())
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range problems {
		t.Errorf("%s: %s", problem.Metric, problem.Text)
	}
}

func TestMetricsPassPromtool(t *testing.T) {
	for _, file := range []string{"testdata/metrics_start.txt", "testdata/metrics_busy.txt"} {
		page, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		check := exec.CommandContext(t.Context(), "promtool", "check", "metrics")
		check.Stdin = bytes.NewReader(page)
		if said, err := check.CombinedOutput(); err != nil || len(said) > 0 {
			t.Errorf("%s: %v: %s", file, err, said)
		}
	}
}

func TestUnreadableCountersAreCountedAndNotInvented(t *testing.T) {
	b := newBench(t)
	b.datapath.statsErr = errors.New("map gone")
	page := exposition(t, b.Metrics())
	if !strings.Contains(page, metricPrefix+"collection_errors_total 1\n") {
		t.Errorf("the failure is not counted:\n%s", page)
	}
	if strings.Contains(page, metricPrefix+"nat_entries") {
		t.Errorf("shows entries that it cannot know:\n%s", page)
	}
}
