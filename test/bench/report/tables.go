// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// row writes a line of a table.
func row(s *strings.Builder, cells ...string) {
	fmt.Fprintf(s, "| %s |\n", strings.Join(cells, " | "))
}

// head writes the first two lines of one: the first column is text, the others
// are numbers.
func head(s *strings.Builder, cells ...string) {
	row(s, cells...)
	fmt.Fprintf(s, "|---|%s\n", strings.Repeat("---:|", len(cells)-1))
}

// number has three digits that count, or all before the point.
func number(v float64) string {
	if v == 0 {
		return "0"
	}
	digits := 2 - int(math.Floor(math.Log10(math.Abs(v))))
	text := strconv.FormatFloat(v, 'f', min(max(digits, 0), 4), 64)
	if strings.Contains(text, ".") {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	return text
}

// value is a median with its quartiles.
func (r Results) value(k Key) string {
	values := r[k]
	if len(values) == 0 {
		return "–"
	}
	return fmt.Sprintf("%s (%s–%s)", number(Quantile(values, 0.5)), number(Quantile(values, 0.25)), number(Quantile(values, 0.75)))
}

func (r Results) ratio(a, b Key) string {
	ratio, ok := r.Ratio(a, b)
	if !ok {
		return "–"
	}
	return fmt.Sprintf("%.2f", ratio)
}

func (r Results) writeTargets(s *strings.Builder) {
	row(s, "target", "wanted", "measured", "")
	fmt.Fprint(s, "|---|---:|---:|---|\n")
	for _, t := range targets() {
		value, ok := t.measure(r)
		switch {
		case !ok:
			row(s, t.what, t.want(), "–", "not measured")
		case t.met(value):
			row(s, t.what, t.want(), number(value)+t.unit, "met")
		default:
			row(s, t.what, t.want(), number(value)+t.unit, "**missed**")
		}
	}
}

// The ways of packets through the egress program that the packet figures take.
const (
	RunEstablished = "masq_egress, of an old flow"
	RunExempt      = "masq_egress, to an exempt range"
	RunOwn         = "masq_egress, of the node itself"
)

// writeBudget explains the ratios to plain routing: what a packet costs more,
// how much of it is the program, and how much it may be.
func (r Results) writeBudget(s *strings.Builder) {
	fmt.Fprintf(s, "What a packet takes of a processor, in ns, at %d CIDRs: with plain routing, with ebpf, and the difference. Beside it a run of the program alone (measured without conntrack), and the "+
		"difference at which the target above would be met. The figures contain what it takes to make a packet, carry it over two links and count it.\n\n", CIDRs)
	head(s, "", "plain routing", "ebpf", "difference", "run of the program", "target")
	for _, f := range []struct {
		figure Figure
		run    string
		bound  float64
	}{{Established, RunEstablished, establishedBound}, {Exempt, RunExempt, exemptBound}, {Own, RunOwn, exemptBound}} {
		for _, conntrack := range []bool{false, true} {
			plain, ok := r.Median(Key{f.figure, Plain, conntrack, CIDRs})
			ebpf, alsoOK := r.Median(Key{f.figure, EBPF, conntrack, CIDRs})
			if !ok || !alsoOK {
				continue
			}
			plain, ebpf = 1e9/plain, 1e9/ebpf
			what, _, _ := strings.Cut(string(f.figure), ",")
			row(s, what+", "+with(conntrack), number(plain), number(ebpf), number(ebpf-plain),
				r.value(Key{Run, f.run, false, 0}), "≤ "+number(plain/f.bound-plain))
		}
	}
}

func (r Results) writePackets(s *strings.Builder) {
	fmt.Fprintf(s, "UDP packets of 46 bytes through the node, per second of one processor, at %d CIDRs, and the ratio to plain routing on the same node.\n\n", CIDRs)
	figures := []Figure{Established, Exempt, Own}
	head(s, "", "established", "ratio", "exempt", "ratio", "the node's own", "ratio")
	for _, c := range r.columns() {
		cells := []string{c.String()}
		for _, f := range figures {
			k := c.key(f, CIDRs)
			cells = append(cells, r.value(k), r.ratio(k, c.limit().key(f, CIDRs)))
		}
		row(s, cells...)
	}
	fmt.Fprint(s, "\nRatios to plain routing at other numbers of CIDRs (established, exempt, the node's own):\n\n")
	sizes := r.at(Established)
	head(s, append([]string{""}, texts(sizes)...)...)
	for _, c := range r.columns() {
		cells := []string{c.String()}
		for _, size := range sizes {
			var ratios []string
			for _, f := range figures {
				ratios = append(ratios, r.ratio(c.key(f, size), c.limit().key(f, size)))
			}
			cells = append(cells, strings.Join(ratios, " · "))
		}
		row(s, cells...)
	}
}

func texts(numbers []int) []string {
	texts := make([]string, 0, len(numbers))
	for _, n := range numbers {
		texts = append(texts, strconv.Itoa(n))
	}
	return texts
}

func (r Results) writeFlows(s *strings.Builder) {
	fmt.Fprint(s, "First packets of UDP flows to 1024 remotes, per second of one processor, by the number of CIDRs.\n\n")
	sizes := r.at(NewFlows)
	head(s, append([]string{""}, texts(sizes)...)...)
	for _, c := range r.columns() {
		cells := []string{c.String()}
		for _, size := range sizes {
			cells = append(cells, r.value(c.key(NewFlows, size)))
		}
		row(s, cells...)
	}
}

func (r Results) writeTCP(s *strings.Builder) {
	fmt.Fprintf(s, "From a pod to a host outside, at %d CIDRs, with real sockets at both ends, which share the machine's processors with the node. "+
		"Not by processor time, so another process shows.\n\n", CIDRs)
	figures := []Figure{Throughput, Unaided, Latency, Connections}
	head(s, "", "Gbit/s", "ratio", "without offloads", "ratio", "request and response, µs", "ratio", "connections/s", "ratio")
	for _, c := range r.columns() {
		cells := []string{c.String()}
		for _, f := range figures {
			k := c.key(f, CIDRs)
			cells = append(cells, r.value(k), r.ratio(k, c.limit().key(f, CIDRs)))
		}
		row(s, cells...)
	}
}

func (r Results) writeRuns(s *strings.Builder) {
	fmt.Fprint(s, "Time of one run of a program on the uplink by what the packet is, by the kernel's own statistics, whose cost is in it.\n\n")
	head(s, "packet", "ns")
	for _, way := range r.subjects(Run) {
		row(s, way, r.value(Key{Run, way, false, 0}))
	}
}

func (r Results) writeFailures(s *strings.Builder) {
	fmt.Fprint(s, "Flows towards one remote that got no port, by the share of 32768 ports that they would need, with random ports.\n\n")
	loads := r.at(Failures)
	cells := []string{""}
	for _, load := range loads {
		cells = append(cells, fmt.Sprintf("%d %%", load))
	}
	head(s, cells...)
	for _, c := range []column{{Iptables, true}, {EBPF, false}} {
		cells := []string{c.name}
		for _, load := range loads {
			cells = append(cells, r.value(c.key(Failures, load))+" %")
		}
		row(s, cells...)
	}
}

func (r Results) writeLists(s *strings.Builder) {
	fmt.Fprint(s, "Time in ms to replace the list of exempt CIDRs by another, by their number. Of agents that is their own time, of the others that of the command.\n\n")
	sizes := r.at(Reload)
	head(s, append([]string{""}, texts(sizes)...)...)
	for _, c := range r.columns() {
		if len(sizes) == 0 || len(r[c.key(Reload, sizes[0])]) == 0 {
			continue
		}
		cells := []string{c.String()}
		for _, size := range sizes {
			cells = append(cells, r.value(c.key(Reload, size)))
		}
		row(s, cells...)
	}
}

func (r Results) writeAgent(s *strings.Builder) {
	head(s, "figure", "of", "at", "measured")
	for _, f := range []Figure{Resident, Idle, Reconcile, Allocations, SweepCPU, SweepStretch, Ask, FlowBytes} {
		for _, subject := range r.subjects(f) {
			for _, at := range r.at(f) {
				k := Key{f, subject, subject == Iptables, at}
				if len(r[k]) == 0 {
					continue
				}
				where := ""
				if at != 0 {
					where = strconv.Itoa(at)
				}
				row(s, string(f), subject, where, r.value(k))
			}
		}
	}
}
