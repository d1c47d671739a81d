// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
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

// unixSeconds is t as metrics have it, 0 for the zero time.
func unixSeconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}
