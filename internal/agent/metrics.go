// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"ip-masq-agent/internal/api"
)

// prefix of the names of all metrics but those of the Go runtime and the process.
const metricPrefix = "ip_masq_agent_"

// metrics are counted by the loop, or read where they are kept whenever they
// are asked for: then they are true at that moment.
type metrics struct {
	registry     *prometheus.Registry
	syncErrors   prometheus.Counter
	syncDuration prometheus.Histogram
}

func newMetrics(a *Agent) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		syncErrors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: metricPrefix + "sync_errors_total",
			Help: "Syncs that failed. The kernel's old state stays in force then.",
		}),
		syncDuration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    metricPrefix + "sync_duration_seconds",
			Help:    "Time that syncs took.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30},
		}),
	}
	build := a.options.Build
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: metricPrefix + "build_info",
		Help: "Always 1; the labels say which build runs.",
		ConstLabels: prometheus.Labels{
			"version": build.Version, "revision": build.Revision, "goversion": build.GoVersion,
		},
	})
	info.Set(1)
	m.registry.MustRegister(info, m.syncErrors, m.syncDuration,
		newCollector(a),
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// collector reads at scrape what the agent and its datapath know.
type collector struct {
	agent            *Agent
	collectionErrors prometheus.Counter

	datapathInfo, configGood, configTime, lastSync *prometheus.Desc
	drops, entries, capacity, translations         *prometheus.Desc
	repairs, portPressure, sweepDuration, attempts *prometheus.Desc
}

func newCollector(a *Agent) *collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(metricPrefix+name, help, labels, nil)
	}
	return &collector{
		agent: a,
		collectionErrors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: metricPrefix + "collection_errors_total",
			Help: "Times that the datapath's counters could not be read; their metrics are absent then.",
		}),
		datapathInfo:  desc("datapath_info", "Always 1; the label says which datapath translates.", "datapath"),
		configGood:    desc("config_last_reload_successful", "1 if the config file as it is now is in force, 0 if it was refused."),
		configTime:    desc("config_last_reload_success_timestamp_seconds", "When the config in force was taken; 0 as long as no good one was seen."),
		lastSync:      desc("last_sync_success_timestamp_seconds", "End of the last successful sync; 0 before the first."),
		drops:         desc("datapath_drops_total", "Packets that the datapath dropped rather than let them leave untranslated, by reason.", "reason"),
		entries:       desc("nat_entries", "Translations in the eBPF datapath's table.", "family"),
		capacity:      desc("nat_capacity", "Translations that fit into the eBPF datapath's table.", "family"),
		translations:  desc("translations_total", "Flows that got a translation.", "family"),
		repairs:       desc("repairs_total", "Times that changes made by others were mended."),
		portPressure:  desc("nat_port_pressure_ratio", "Share of the source ports in use towards the busiest destination, from 0 to 1."),
		attempts:      desc("nat_allocation_attempts", "Ports that were tried for a new translation; +Inf counts those that got none."),
		sweepDuration: desc("nat_last_sweep_duration_seconds", "Time that the last sweep of the eBPF datapath's table took."),
	}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		c.datapathInfo, c.configGood, c.configTime, c.lastSync, c.drops, c.entries,
		c.capacity, c.translations, c.repairs, c.portPressure, c.sweepDuration, c.attempts,
	} {
		ch <- d
	}
	c.collectionErrors.Describe(ch)
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	now := c.agent.settings.view()
	good := 0.0
	if now.fault == nil && !now.loaded.IsZero() {
		good = 1
	}
	gauge(c.datapathInfo, 1, c.agent.options.Datapath.Name())
	gauge(c.configGood, good)
	gauge(c.configTime, unixSeconds(now.loaded))
	gauge(c.lastSync, unixSeconds(c.agent.outcome().lastGood))
	stats, err := c.agent.options.Datapath.Stats()
	if err != nil {
		c.collectionErrors.Inc()
		c.agent.options.Log.Debug("datapath counters not read", "error", err)
	} else {
		c.collectDatapath(ch, stats)
	}
	c.collectionErrors.Collect(ch)
}

func (c *collector) collectDatapath(ch chan<- prometheus.Metric, stats api.Stats) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, value, labels...)
	}
	const gauge, counter = prometheus.GaugeValue, prometheus.CounterValue
	for _, reason := range api.DropReasons() {
		send(c.drops, counter, float64(stats.Drops[reason]), reason)
	}
	for _, family := range []struct {
		name         string
		table        api.Table
		translations uint64
	}{
		{"ipv4", stats.NAT.V4, stats.TranslationsV4},
		{"ipv6", stats.NAT.V6, stats.TranslationsV6},
	} {
		send(c.entries, gauge, float64(family.table.Entries), family.name)
		send(c.capacity, gauge, float64(family.table.Capacity), family.name)
		send(c.translations, counter, float64(family.translations), family.name)
	}
	send(c.repairs, counter, float64(stats.Repairs))
	send(c.portPressure, gauge, stats.PortPressure)
	send(c.sweepDuration, gauge, stats.LastSweep.Seconds())
	ch <- attemptHistogram(c.attempts, stats.Attempts)
}

// attemptBuckets are the upper bounds of the histogram of attempts.
func attemptBuckets() []float64 { return []float64{1, 2, 4, 8, 16, 32, 64, 128} }

// attemptHistogram sums up what Stats counts one by one.
func attemptHistogram(d *prometheus.Desc, attempts []uint64) prometheus.Metric {
	buckets := make(map[float64]uint64)
	for _, bound := range attemptBuckets() {
		buckets[bound] = 0
	}
	var count, sum uint64
	for i, n := range attempts {
		tried := uint64(i + 1)
		count += n
		sum += n * tried
		for bound := range buckets {
			if float64(tried) <= bound && i < len(attempts)-1 {
				buckets[bound] += n
			}
		}
	}
	return prometheus.MustNewConstHistogram(d, count, float64(sum), buckets)
}

// unixSeconds is t as metrics have it, 0 for the zero time.
func unixSeconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}
