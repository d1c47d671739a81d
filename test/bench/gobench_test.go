// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"ip-masq-agent/test/bench/report"
)

// goBenchmarks runs benchmarks of the agent's packages, whose names end with a
// size, some times over and adds what they say.
func goBenchmarks(ctx context.Context, results report.Results, sizes string, times int) error {
	cmd := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", "^Benchmark(Sync|Sweep|Ask)$/^(nft|ebpf|empty|live|ended|orphans|metrics|status|list)$/^("+sizes+")$/^(idle|IPv4)$",
		"-benchmem", "-benchtime", "1x", "-count", strconv.Itoa(times), "./loader", "./iptables")
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	said, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("run benchmarks: %w: %s", err, said)
	}
	return addBenchmarks(results, string(said))
}

func addBenchmarks(results report.Results, said string) error {
	for line := range strings.Lines(said) {
		fields := strings.Fields(line)
		if len(fields) < 4 || !strings.HasPrefix(fields[0], "Benchmark") {
			continue
		}
		parts := strings.Split(fields[0], "/")
		if len(parts) != 4 {
			return fmt.Errorf("unknown benchmark %s", fields[0])
		}
		size, err := strconv.Atoi(parts[2])
		if err != nil {
			return fmt.Errorf("benchmark %s: %w", fields[0], err)
		}
		for i := 2; i+1 < len(fields); i += 2 {
			value, err := strconv.ParseFloat(fields[i], 64)
			if err != nil {
				return fmt.Errorf("benchmark %s: %w", fields[0], err)
			}
			addBenchmark(results, parts[1], size, value, fields[i+1])
		}
	}
	return nil
}

// addBenchmark adds one value of one benchmark, if it is of interest.
func addBenchmark(results report.Results, kind string, size int, value float64, unit string) {
	switch {
	case unit == "cpu-s":
		results.Add(report.Key{Figure: report.SweepCPU, Subject: sweepSubject(kind), At: size}, value)
	case unit == "call-ms":
		results.Add(report.Key{Figure: report.SweepStretch, Subject: sweepSubject(kind), At: size}, value)
	case unit == "ns/op" && askSubject(kind) != "":
		results.Add(report.Key{Figure: report.Ask, Subject: askSubject(kind), At: size}, value/1e6)
	case kind != "nft" && kind != "ebpf":
	case unit == "ns/op":
		results.Add(reconcileKey(report.Reconcile, kind, size), value/1e6)
	case unit == "B/op":
		results.Add(reconcileKey(report.Allocations, kind, size), value/1024)
	}
}

// sweepSubject is what a table holds.
func sweepSubject(kind string) string {
	return map[string]string{
		"empty": "an empty table", "live": "live flows", "ended": "flows past their time",
		"orphans": "live flows, once a minute",
	}[kind]
}

// askSubject is what is asked.
func askSubject(kind string) string {
	return map[string]string{"metrics": "metrics", "status": "status", "list": "nat list"}[kind]
}

func reconcileKey(f report.Figure, kind string, size int) report.Key {
	if kind == "ebpf" {
		return report.Key{Figure: f, Subject: report.EBPF, At: size}
	}
	return report.Key{Figure: f, Subject: report.Iptables, Conntrack: true, At: size}
}
