// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"

	"ip-masq-agent/internal/lab"
)

// burst is how many packets are under way before anybody looks. epoch is how
// many share ports: few, so that conversations meet.
const (
	burst      = 100
	epoch      = 2000
	shortRun   = 10_000
	longRun    = 100_000
	mostFaults = 10
)

// TestRandomPackets: both datapaths do the same with whatever comes, but for
// what docs/parity.md lists.
//
// The seeds are the same every time. RANDOM_SEED is for those who look for more:
// of 10^5 packets of one conversation after the other, a handful still meets a
// tuple that had another owner before, and is not told from a fault.
func TestRandomPackets(t *testing.T) {
	if text := os.Getenv("RANDOM_SEED"); text != "" {
		seed, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		comparePackets(t, seed, longRun)
		return
	}
	seeds := 1
	if os.Getenv("LONG_TESTS") != "" {
		seeds = longRun / shortRun
	}
	for seed := range seeds {
		t.Run(fmt.Sprintf("seed %d", 101+seed), func(t *testing.T) { comparePackets(t, uint64(101+seed), shortRun) })
	}
}

func comparePackets(t *testing.T, seed uint64, count int) {
	t.Helper()
	r := &comparison{T: t, twins: [2]*twin{newTwin(t, iptables), newTwin(t, ebpf)}, outcomes: make(map[string]int)}
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 0)), lab: r.twins[0].lab, openers: make(map[string]int)}
	for len(g.made) < count && r.faults < mostFaults {
		from := len(g.made)
		for range burst {
			g.next(r.twins)
		}
		r.play(g.made[from:])
	}
	r.report(len(g.made))
}

// comparison is of two labs.
type comparison struct {
	*testing.T
	twins          [2]*twin
	outcomes       map[string]int
	faults         int
	known, excused int
}

func (r *comparison) play(packets []*sent) {
	r.Helper()
	for _, w := range r.twins {
		w.play(packets)
		w.opinion = r.twins[0].opinion
		for _, s := range packets {
			w.account(s)
		}
	}
	for _, s := range packets {
		if s.known {
			r.known++
		}
		r.compare(s)
	}
}

func (r *comparison) compare(s *sent) {
	r.Helper()
	netfilter := r.twins[0]
	a, b := netfilter.outcome(s), r.twins[1].outcome(s)
	if a == b && !strings.Contains(a, "fault") {
		r.outcomes[string(s.kind)+" "+strings.SplitN(a, " ", 2)[0]]++
		return
	}
	if reason := r.listed(s, a, b); reason != "" {
		r.excused++
		r.outcomes[reason]++
		return
	}
	r.faults++
	r.Errorf("%s\n iptables: %s (invalid %t, new %t)\n     ebpf: %s", s, a, netfilter.invalid(s), netfilter.fresh(s), b)
}

// report shows what came of the packets. Most have to be of conversations that
// were there, and few may have an excuse, or the test has lost its sense.
func (r *comparison) report(count int) {
	r.Helper()
	r.Logf("outcomes: %v", r.outcomes)
	if r.known < count/2 || r.excused > count/20 {
		r.Errorf("of %d packets %d belong to a known conversation and %d are excused", count, r.known, r.excused)
	}
}

// listed names the deviation of docs/parity.md for which one packet may have
// two outcomes, and asks for the evidence. Everything else is a fault.
func (r *comparison) listed(s *sent, a, b string) string {
	if s.of.proto == "tcp" {
		return r.listedTCP(s, a, b)
	}
	switch {
	case s.kind == kindAnswer && s.from == sendOutside && s.order != nil && s.order[0] != 0 && b == gone:
		return "fragments that come before their first"
	case s.of.proto == "sctp" && s.kind == kindForward && s.from != sendOutside && b == gone:
		return "SCTP keeps its port"
	case s.meets && r.twins[0].fresh(s) && a == gone:
		return "without ports, one conversation between two addresses"
	case s.kind == kindAnswer && s.from == sendNode && r.twins[0].fresh(s) && a == gone && b == fmt.Sprintf("leaves from %s to %s", s.source, s.to):
		return "what is dropped has its conntrack entry"
	}
	return r.listedPort(s, a, b)
}

func (r *comparison) listedTCP(s *sent, a, b string) string {
	inIPTables := r.twins[0]
	ended := inIPTables.hasEnded(s) || r.twins[1].hasEnded(s)
	bareSYN := s.flags&(lab.SYN|lab.ACK|lab.RST|lab.FIN) == lab.SYN
	switch {
	case inIPTables.invalid(s) && (s.known && invalidOutcome(s, a) || b == asHeld):
		return "TCP is followed as far as timeouts need it"
	case inIPTables.fresh(s) && ended && s.from >= sendNode:
		return "a closed connection keeps its tuple"
	case (s.kind == kindError || s.kind == kindPodError) && s.of.ended: // INVALID, or about who has the tuple now
		return "a closed connection keeps its tuple"
	case s.kind == kindAnswer && s.from != sendOutside && bareSYN && strings.HasPrefix(a, fmt.Sprintf("leaves from %s to", s.source)):
		return "an outgoing SYN is never a reply"
	case s.kind == kindAnswer && s.from == sendOutside && s.of.ended && !inIPTables.fresh(s) && strings.HasPrefix(a, "pod ") && !strings.Contains(a, s.of.near.String()):
		return "a closed connection keeps its tuple" // which is another pod's there
	}
	return r.listedPort(s, a, b)
}

// listedPort: see docs/parity.md, "What comes in keeps its port".
func (r *comparison) listedPort(s *sent, a, b string) string {
	if s.kind == kindForward && s.from == sendOutside && s.of.spent && r.twins[0].fresh(s) && cameAsSent(s, b) && strings.Contains(a, s.source.Addr().String()) {
		return "what comes in keeps its port"
	}
	return ""
}

// invalidOutcome is what netfilter does with what it calls INVALID: the rule of
// --invalid drops it, and the node's own passes as it is.
func invalidOutcome(s *sent, outcome string) bool {
	return outcome == gone || s.from == sendNode &&
		(strings.HasPrefix(outcome, fmt.Sprintf("leaves from %s to", s.source.Addr())) || strings.HasPrefix(outcome, fmt.Sprintf("leaves from %s to", s.source)))
}

// cameAsSent reports whether a pod got the packet with the ports it was sent with.
func cameAsSent(s *sent, outcome string) bool {
	return strings.HasPrefix(outcome, "pod ") && strings.HasSuffix(outcome, fmt.Sprintf(" gets %s > %s", s.source, s.to))
}
