// SPDX-License-Identifier: Apache-2.0

package report

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// sample has what the report needs, with ebpf half as fast as plain routing.
func sample() Results {
	r := Results{}
	for i, name := range []string{Plain, NFT, Set, EBPF} {
		for _, at := range []int{4, CIDRs} {
			for _, f := range []Figure{Established, Exempt, Own, NewFlows} {
				for _, round := range []float64{1, 2, 4} {
					r.Add(Key{f, name, name == NFT || name == Set, at}, round*1000/float64(i+1))
				}
			}
		}
		for _, f := range []Figure{Throughput, Unaided, Latency, Connections} {
			r.Add(Key{f, name, name == NFT || name == Set, CIDRs}, 10/float64(i+1))
		}
	}
	r.Add(Key{Run, "a way", false, 0}, 123)
	r.Add(Key{Failures, EBPF, false, 90}, 0)
	r.Add(Key{Failures, EBPF, false, 100}, 1.5)
	r.Add(Key{SweepCPU, "live flows", false, 1_000_000}, 1)
	r.Add(Key{SweepCPU, "flows past their time", false, 1_000_000}, 2)
	return r
}

func TestTargetsAreJudged(t *testing.T) {
	text := sample().Markdown(Circumstances{Kernel: "Linux", Quick: true}, "img")
	for _, want := range []string{
		"> **A quick run",
		"| established flows, ebpf against plain routing, no conntrack | ≥ 0.92 | 0.25 | **missed** |",
		"| established flows, ebpf against plain routing, conntrack on | ≥ 0.92 | – | not measured |",
		"| established flows, ebpf without conntrack against the best of netfilter | ≥ 1.4 | 0.5 | **missed** |",
		"at 90 % of the ports, ebpf | ≤ 0 % | 0 % | met |",
		"| the same at 100 % | ≤ 1 % | 1.5 % | **missed** |",
		"| sweep of 1000000 entries | ≤ 1.5 s of CPU | 2 s of CPU | **missed** |",
		"| ours, ebpf, no conntrack | 500 (375–750) | 0.25 | 500 (375–750) | 0.25 | 500 (375–750) | 0.25 |",
		// 1e9 ns over 2000 and 500 packets.
		"| established flows, no conntrack | 500000 | 2000000 | 1500000 | – | ≤ 43478 |",
		"| a way | 123 (123–123) |",
		"![New flows](img/flows.svg)",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func TestRatioIsOfTheSameRound(t *testing.T) {
	a, b := Key{Figure: Established, Subject: EBPF}, Key{Figure: Established, Subject: Plain}
	r := Results{a: {1, 20, 300}, b: {2, 10, 600}}
	if ratio, ok := r.Ratio(a, b); !ok || ratio != 0.5 {
		t.Errorf("ratio %v, %v, want 0.5", ratio, ok)
	}
	if _, ok := r.Ratio(a, Key{Figure: Exempt}); ok {
		t.Error("a ratio to what was not measured")
	}
}

func TestReplaceLeavesWhatIsWritten(t *testing.T) {
	document := "# Title\n" + begin + "old\n" + end + "Steps\n"
	for range 2 { // the second time as well
		var err error
		if document, err = Replace(document, "new"); err != nil {
			t.Fatal(err)
		}
	}
	if want := "# Title\n" + begin + "\nnew\n" + end + "Steps\n"; strings.ReplaceAll(document, "\n\n", "\n") != strings.ReplaceAll(want, "\n\n", "\n") {
		t.Errorf("got %q, want %q", document, want)
	}
	for _, document := range []string{"", begin, end, end + begin} {
		if _, err := Replace(document, "new"); err == nil {
			t.Errorf("no error for %q", document)
		}
	}
}

func TestNumbers(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 0.0363: "0.0363", 0.571: "0.571", 1.5: "1.5", 20.14: "20.1", 712: "712", 123456: "123456", 0.00001: "0"} {
		if got := number(v); got != want {
			t.Errorf("number(%v) = %q, want %q", v, got, want)
		}
	}
}

func TestPlots(t *testing.T) {
	directory := t.TempDir()
	if err := sample().Plot(directory); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"packets", "flows", "tcp", "runs"} {
		text, err := os.ReadFile(filepath.Join(directory, name+".svg"))
		if err != nil || !strings.Contains(string(text), "<svg") {
			t.Errorf("%s: %v, %.40s", name, err, text)
		}
	}
}
