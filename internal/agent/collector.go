// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"net/netip"

	"github.com/prometheus/client_golang/prometheus"

	"ip-masq-agent/internal/api"
)

// collector reads at scrape what the agent and its datapath know.
type collector struct {
	agent            *Agent
	collectionErrors prometheus.Counter
	descs            []*prometheus.Desc

	datapathInfo, configGood, configTime, lastSync *prometheus.Desc
	warnings, attached, usable                     *prometheus.Desc
	drainActive, drainEntries                      *prometheus.Desc
	drops, packets, bytes                          *prometheus.Desc
	entries, capacity, translations                *prometheus.Desc
	pressure, destinationPressure, attempts        *prometheus.Desc
	sweepDuration, swept, early, repairs           *prometheus.Desc
}

func newCollector(a *Agent) *collector {
	c := &collector{
		agent: a,
		collectionErrors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: metricPrefix + "collection_errors_total",
			Help: "Times that the datapath's counters could not be read; their metrics are absent then.",
		}),
	}
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		d := prometheus.NewDesc(metricPrefix+name, help, labels, nil)
		c.descs = append(c.descs, d)
		return d
	}
	c.datapathInfo = desc("datapath_info", "Always 1; the label says which datapath translates.", "datapath")
	c.configGood = desc("config_last_reload_successful", "1 if the config file as it is now is in force, 0 if it was refused.")
	c.configTime = desc("config_last_reload_success_timestamp_seconds", "When the config in force was taken; 0 as long as no good one was seen.")
	c.lastSync = desc("last_sync_success_timestamp_seconds", "End of the last successful sync; 0 before the first.")
	c.warnings = desc("warnings", "Warnings that the command status shows now.")
	c.attached = desc("interface_attached", "1 if the eBPF programs run on the uplink, 0 if not.", "interface")
	c.usable = desc("interface_has_address", "1 if the uplink has an address to masquerade with, 0 if not.", "interface", "family")
	c.drainActive = desc("drain_active", "1 while the datapath of before still serves flows after a switch.")
	c.drainEntries = desc("drain_entries", "Flows that the datapath of before still serves after a switch, as of the last sync.")
	c.drops = desc("datapath_drops_total", "Packets that the datapath dropped rather than let them leave untranslated, by reason.", "reason")
	c.packets = desc("datapath_packets_total", "Packets on the uplinks by what the eBPF programs did with them; verdicts that no packet met are absent.", "direction", "family", "verdict")
	c.bytes = desc("datapath_bytes_total", "The bytes of these packets.", "direction", "family", "verdict")
	c.entries = desc("nat_entries", "Translations in the eBPF datapath's table.", "family")
	c.capacity = desc("nat_capacity", "Translations that fit into the eBPF datapath's table.", "family")
	c.translations = desc("translations_total", "Flows that got a translation.", "family")
	c.repairs = desc("repairs_total", "Times that changes made by others were mended.")
	c.pressure = desc("nat_port_pressure_ratio", "Share of the source ports in use towards the busiest destination, from 0 to 1.")
	c.destinationPressure = desc("nat_destination_port_pressure_ratio",
		"Share of the source ports in use towards the five busiest destinations, from 0 to 1; destinations below 0.05 are absent.", "proto", "destination", "source")
	c.attempts = desc("nat_allocation_attempts", "Ports that were tried for a new translation; +Inf counts those that got none.")
	c.sweepDuration = desc("nat_last_sweep_duration_seconds", "Time that the last sweep of the eBPF datapath's table took.")
	c.swept = desc("nat_swept_total", "Translations that were taken out of the eBPF datapath's table, past their time or to make room.")
	c.early = desc("nat_early_ended_total", "Translations without a real connection that ended before their time, because the table was nearly full.")
	return c
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range c.descs {
		ch <- d
	}
	c.collectionErrors.Describe(ch)
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	r := report{ch}
	now := c.agent.settings.view()
	r.gauge(c.datapathInfo, 1, c.agent.options.Datapath.Name())
	r.gauge(c.configGood, oneIf(now.fault == nil && !now.loaded.IsZero()))
	r.gauge(c.configTime, unixSeconds(now.loaded))
	r.gauge(c.lastSync, unixSeconds(c.agent.outcome().lastGood))
	c.read("status", func() error { return c.collectStatus(r) })
	c.read("counters", func() error { return c.collectStats(r) })
	c.collectionErrors.Collect(ch)
}

// read counts where something cannot be read.
func (c *collector) read(what string, collect func() error) {
	if err := collect(); err != nil {
		c.collectionErrors.Inc()
		c.agent.options.Log.Debug("metrics not read", "what", what, "error", err)
	}
}

// report is where metrics go.
type report struct{ ch chan<- prometheus.Metric }

func (r report) gauge(d *prometheus.Desc, value float64, labels ...string) {
	r.ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
}

func (r report) counter(d *prometheus.Desc, value uint64, labels ...string) {
	r.ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(value), labels...)
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func (c *collector) collectStatus(r report) error {
	status, err := c.agent.Status()
	if err != nil {
		return err
	}
	r.gauge(c.warnings, float64(len(status.Warnings)))
	r.gauge(c.drainActive, oneIf(status.Drain.Active))
	r.gauge(c.drainEntries, float64(status.Drain.Entries))
	for _, i := range status.Interfaces {
		if status.Datapath == EBPF { // netfilter is everywhere
			r.gauge(c.attached, oneIf(i.Attach != ""), i.Name)
		}
		r.gauge(c.usable, oneIf(i.SNATv4.IsValid()), i.Name, "ipv4")
		if c.agent.options.Config.EnableIPv6 {
			r.gauge(c.usable, oneIf(i.SNATv6.IsValid()), i.Name, "ipv6")
		}
	}
	return nil
}

func (c *collector) collectStats(r report) error {
	stats, err := c.agent.options.Datapath.Stats()
	if err != nil {
		return err
	}
	for _, reason := range api.DropReasons() {
		r.counter(c.drops, stats.Drops[reason], reason)
	}
	for _, p := range stats.Packets {
		r.counter(c.packets, p.Packets, p.Direction, p.Family, p.Verdict)
		r.counter(c.bytes, p.Bytes, p.Direction, p.Family, p.Verdict)
	}
	c.collectFamily(r, "ipv4", stats.NAT.V4, stats.TranslationsV4)
	c.collectFamily(r, "ipv6", stats.NAT.V6, stats.TranslationsV6)
	c.collectPressure(r, stats.Busiest)
	r.counter(c.repairs, stats.Repairs)
	r.counter(c.swept, stats.Swept)
	r.counter(c.early, stats.Early)
	r.gauge(c.sweepDuration, stats.LastSweep.Seconds())
	r.ch <- attemptHistogram(c.attempts, stats.Attempts)
	return nil
}

func (c *collector) collectFamily(r report, family string, table api.Table, translations uint64) {
	r.gauge(c.entries, float64(table.Entries), family)
	r.gauge(c.capacity, float64(table.Capacity), family)
	r.counter(c.translations, translations, family)
}

// tellingPressure is what a destination must have to get a series of its own:
// Prometheus keeps each for long, so that they must be few in the long run, too.
const tellingPressure = 0.05

func (c *collector) collectPressure(r report, busiest []api.BusyDestination) {
	most := 0.0
	for _, b := range busiest {
		most = max(most, b.Pressure)
		if b.Pressure < tellingPressure {
			continue
		}
		destination := netip.AddrPortFrom(b.Address, b.Port).String()
		if b.Port == 0 {
			destination = b.Address.String()
		}
		r.gauge(c.destinationPressure, b.Pressure, b.Proto, destination, b.NATAddr.String())
	}
	r.gauge(c.pressure, most)
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
