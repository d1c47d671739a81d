// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"ip-masq-agent/bpf"
	"ip-masq-agent/test/bench/report"
)

var (
	full  = flag.Bool("full", false, "measure everything for a quarter of an hour, instead of only checking that it works")
	quick = flag.Bool("quick", false, "the same in a minute or two: the numbers are worth nothing")
	times = flag.Int("rounds", 7, "rounds of -full")
	docs  = flag.String("docs", "", "`directory` whose performance.md and img get the report; none: nobody does")
)

// scale is how much is measured.
type scale struct {
	rounds    int
	slice     time.Duration // of a contender's packets in each round
	packets   uint64        // at most in a slice
	profiled  uint64        // packets of a way through the programs, in each round
	tcp       time.Duration // of a contender's connections in each round
	idle      time.Duration // at least, that agents are watched
	bare      []string      // who is measured without offloads
	sizes     []int         // of the list of exempt ranges; TCP gets the last
	flowSizes []int         // of tables
}

// scaleOf the flags. Without any everything is there and nothing takes long.
func scaleOf() scale {
	everyone := []string{report.Plain, report.Legacy, report.NFT, report.Set, report.Upstream, report.Iptables, report.EBPF}
	sizes, flowSizes := []int{4, 100, 10_000, report.CIDRs}, []int{262_144, 1_000_000}
	switch {
	case *full:
		return scale{*times, time.Second / 10, 100_000, profiledPackets, time.Second / 3, 3 * time.Minute, everyone, sizes, flowSizes}
	case *quick:
		return scale{2, time.Second / 50, 20_000, 20_000, time.Second / 20, time.Minute, everyone, sizes, flowSizes}
	}
	return scale{1, time.Second / 100, 2048, 2048, time.Second / 100, time.Second, []string{report.EBPF}, []int{report.CIDRs}, []int{4096}}
}

// bench is one run of everything.
type bench struct {
	scale

	g       *generator
	results report.Results

	contenders []*contender // a contender of ours for each size, netfilter's for all
	unaided    []*contender // without offloads
	limited    []*contender // to few ports
	profiled   *contender
	idlers     map[string]*idler
	servers    map[*contender]server
}

// TestBench measures all figures of all contenders, interleaved, and writes the
// report.
func TestBench(t *testing.T) {
	begin := time.Now()
	b := newBench(t, scaleOf())
	fmt.Fprintf(os.Stderr, "%d nodes stand after %v\n", len(b.contenders)+len(b.unaided)+len(b.limited)+len(b.idlers)+1, time.Since(begin).Round(time.Second))
	for round := range b.rounds {
		for _, size := range b.sizes {
			b.packetRound(t, round, size)
		}
		b.tcpRound(t, round)
		b.failureRound(t)
		fmt.Fprintf(os.Stderr, "round %d of %d ended after %v\n", round+1, b.rounds, time.Since(begin).Round(time.Second))
	}
	b.profileRounds(t)
	b.measureAgents(t)
	b.checkAll(t)
	b.write(t, time.Since(begin))
}

func newBench(t *testing.T, s scale) *bench {
	t.Helper()
	b := &bench{scale: s, g: newGenerator(t), results: report.Results{}, servers: make(map[*contender]server)}
	b.idlers = map[string]*idler{report.EBPF: newIdler(t, "ebpf"), report.Iptables: newIdler(t, "iptables")}
	b.profiled = newProfiled(t, b.g)
	for _, name := range []string{report.Legacy, report.NFT, report.Set, report.Upstream, report.Iptables} {
		b.contenders = append(b.contenders, newContender(t, b.g, name, options{size: report.CIDRs, conntrack: true}))
	}
	for _, conntrack := range []bool{false, true} {
		b.contenders = append(b.contenders, newContender(t, b.g, report.Plain, options{size: report.CIDRs, conntrack: conntrack}))
		for _, size := range s.sizes {
			b.contenders = append(b.contenders, newContender(t, b.g, report.EBPF, options{size: size, conntrack: conntrack}))
		}
		b.contenders = append(b.contenders, newContender(t, b.g, report.FastPath, options{size: report.CIDRs, conntrack: conntrack}))
	}
	for _, name := range []string{report.EBPF, report.Iptables} {
		b.limited = append(b.limited, newContender(t, b.g, name, options{size: report.CIDRs, conntrack: name == report.Iptables, flags: []string{portsFlag}}))
	}
	for _, c := range b.contenders {
		if c.size == report.CIDRs {
			b.servers[c] = c.serve(t)
		}
		if c.size == report.CIDRs && slices.Contains(s.bare, c.name) {
			b.unaided = append(b.unaided, newContender(t, b.g, c.name, options{size: report.CIDRs, conntrack: c.conntrack, noOffloads: true}))
		}
	}
	for _, c := range b.unaided {
		b.servers[c] = c.serve(t)
	}
	return b
}

// turn has another contender begin in each round.
func turn(contenders []*contender, round int) []*contender {
	n := round % len(contenders)
	return append(contenders[n:len(contenders):len(contenders)], contenders[:n]...)
}

// packetRound has each contender do a slice of each workload with a list of
// some size.
func (b *bench) packetRound(t *testing.T, round, size int) {
	t.Helper()
	var ready []*contender
	for _, c := range b.contenders {
		switch {
		case c.ebpf() && c.size != size:
			continue // one that has seen no other list is in its place
		case !c.ebpf():
			b.reload(t, c, size)
		}
		ready = append(ready, c)
	}
	b.reload(t, b.limited[0], size)
	for _, w := range workloads() {
		for _, c := range turn(ready, round) {
			burst, err := c.run(b.g, w, b.packets, b.slice)
			if err != nil {
				t.Fatal(err)
			}
			b.results.Add(c.key(w.figure, size), burst.rate())
		}
	}
}

// reload gives a contender a list of some size, and measures how long it takes
// to replace it by another.
func (b *bench) reload(t *testing.T, c *contender, size int) {
	t.Helper()
	for range 2 {
		took, err := c.exempt(size)
		if err != nil {
			t.Fatal(err)
		}
		if c.size == size && c.name != report.Plain {
			b.results.Add(c.key(report.Reload, size), float64(took)/float64(time.Millisecond))
		}
		c.size = size
	}
}

func (b *bench) tcpRound(t *testing.T, round int) {
	t.Helper()
	measure := func(contenders []*contender, figures ...report.Figure) {
		for _, f := range figures {
			for _, c := range turn(contenders, round) {
				to, ok := b.servers[c]
				if !ok {
					continue
				}
				value, err := c.tcp(f, to, b.tcp)
				if err != nil {
					t.Fatal(err)
				}
				b.results.Add(c.key(f, report.CIDRs), value)
			}
		}
	}
	measure(b.contenders, report.Throughput, report.Latency, report.Connections)
	measure(b.unaided, report.Unaided)
}

func (b *bench) failureRound(t *testing.T) {
	t.Helper()
	for _, load := range []int{75, 90, 100} {
		for _, c := range b.limited {
			failed, err := c.failures(b.g, load)
			if err != nil {
				t.Fatal(err)
			}
			b.results.Add(c.key(report.Failures, load), failed)
		}
	}
}

// profileRounds come last: measuring runs slows them down.
func (b *bench) profileRounds(t *testing.T) {
	t.Helper()
	measureRuns(t)
	for range b.rounds {
		for _, w := range b.profiled.ways() {
			spent, _ := b.profiled.profile(t, b.g, w, b.scale.profiled)
			b.results.Add(report.Key{Figure: report.Run, Subject: w.name}, float64(spent.mean()))
		}
		if err := b.profiled.forget(); err != nil {
			t.Fatal(err)
		}
	}
}

// measureAgents measures what does not depend on packets.
func (b *bench) measureAgents(t *testing.T) {
	t.Helper()
	for family, names := range map[string][]string{
		"IPv4": {bpf.MasqMapFlowsV4, bpf.MasqMapReverseV4},
		"IPv6": {bpf.MasqMapFlowsV6, bpf.MasqMapReverseV6},
	} {
		bytes, err := flowBytes(uint32(b.flowSizes[0]), names...)
		if err != nil {
			t.Fatal(err)
		}
		b.results.Add(report.Key{Figure: report.FlowBytes, Subject: family}, bytes)
	}
	var sizes []string
	for _, size := range append(b.sizes, b.flowSizes...) {
		sizes = append(sizes, strconv.Itoa(size))
	}
	if err := goBenchmarks(t.Context(), b.results, strings.Join(sizes, "|"), b.rounds); err != nil {
		t.Fatal(err)
	}
	for _, i := range b.idlers {
		time.Sleep(b.idle - time.Since(i.begin))
	}
	if err := addIdlers(b.results, b.idlers); err != nil {
		t.Fatal(err)
	}
}

// write puts the report where it is asked for, or somewhere for a moment.
func (b *bench) write(t *testing.T, took time.Duration) {
	t.Helper()
	directory, document := *docs, ""
	if directory == "" {
		directory = t.TempDir()
		document = report.Empty()
	} else {
		text, err := os.ReadFile(filepath.Join(directory, "performance.md"))
		if err != nil {
			t.Fatal(err)
		}
		document = string(text)
	}
	images := filepath.Join(directory, "img")
	if err := os.MkdirAll(images, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := b.results.Plot(images); err != nil {
		t.Fatal(err)
	}
	written, err := report.Replace(document, b.results.Markdown(b.circumstances(took), "img"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(directory, "performance.md"), []byte(written), 0o644); err != nil {
		t.Fatal(err)
	}
}

func (b *bench) circumstances(took time.Duration) report.Circumstances {
	about := report.Circumstances{
		Kernel: kernel(), CPU: processor(), Version: "an unknown commit", Command: "make bench",
		Rounds: b.rounds, Took: took.Round(time.Second).String(), Quick: !*full,
	}
	if *quick {
		about.Command = "make bench-quick"
	}
	if commit, err := exec.Command("git", "rev-parse", "--short", "HEAD").Output(); err == nil {
		about.Version = strings.TrimSpace(string(commit))
	}
	return about
}
