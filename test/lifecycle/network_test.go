// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"ip-masq-agent/internal/lab"
)

// seenFrom is the address with which a new flow of a pod arrives; zero: there is
// no answer.
func (n *node) seenFrom(server netip.AddrPort) netip.Addr {
	n.t.Helper()
	conn, err := n.Pods[0].DialContext(n.t.Context(), "udp", netip.AddrPort{}, server.String())
	if err != nil {
		n.t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
		n.t.Fatal(err)
	}
	answer := make([]byte, 100)
	if _, err := conn.Write(nil); err != nil {
		return netip.Addr{}
	}
	length, err := conn.Read(answer)
	if err != nil {
		return netip.Addr{}
	}
	seen, err := netip.ParseAddrPort(strings.TrimSpace(string(answer[:length])))
	if err != nil {
		n.t.Fatal(err)
	}
	return seen.Addr()
}

// What happens to addresses and links under load: new flows have what is there,
// those of an address that has gone end, and nothing ever leaves with a pod's.
func TestNetworkChangesUnderLoad(t *testing.T) {
	other := netip.MustParseAddr("203.0.113.77")
	routes := []string{"route replace default via 203.0.113.1", "route replace 45.45.45.45/32 via 198.51.100.1"}
	for datapath := range map[string]bool{"iptables": true, "ebpf": true} {
		t.Run(datapath, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, lab.Options{})
			a := lab.StartAgent(t, n.Node, n.flags(datapath, "--invalid=drop")...)
			n.settled(datapath)
			server := n.serve("udp", n.Remote.V4)
			n.watch(n.Inside.V4, n.Remote3.V4)
			end := n.flood(n.Inside.V4, n.Remote3.V4)
			for _, step := range []struct {
				name string
				do   []string
				want netip.Addr
			}{
				{"the address is replaced", append([]string{"addr flush dev eth0 to 203.0.113.0/24", "addr add 203.0.113.77/24 dev eth0"}, routes...), other},
				{"it is replaced once more", append([]string{"addr add 203.0.113.10/24 dev eth0", "addr del 203.0.113.77/24 dev eth0", "addr replace 203.0.113.10/24 dev eth0"}, routes...), n.Addresses.Node.V4},
				{"the link goes down and up", append([]string{"link set eth0 down", "link set eth0 up"}, routes...), n.Addresses.Node.V4},
				{"the link is renamed", append([]string{"link set eth0 down", "link set eth0 name wan0", "link set wan0 up"}, routes...), n.Addresses.Node.V4},
				{"an address comes and goes", []string{"addr add 203.0.113.88/24 dev wan0", "addr del 203.0.113.88/24 dev wan0"}, n.Addresses.Node.V4},
			} {
				n.ip(step.do...)
				n.within(promptly, step.name+": new flows from "+step.want.String(), func() bool { return n.seenFrom(server) == step.want })
			}
			sent := end()
			if leaked, translated := n.counts("leaked"), n.counts("translated"); leaked > 0 || translated > 0 {
				t.Errorf("of %d packets %d left with a pod's address, %d to an exempt destination were translated", sent, leaked, translated)
			}
			if datapath == "ebpf" {
				n.within(promptly, "the flows of an address that is gone end", func() bool {
					return !strings.Contains(n.agent("nat", "list"), other.String()+":")
				})
				n.wholePairs()
			}
			n.within(promptly, "wan0 in status", func() bool {
				got := n.status().Interfaces
				return len(got) == 1 && got[0].Name == "wan0"
			})
			if restarts := strings.Count(a.Logs(), "ip-masq-agent starts"); restarts != 1 || n.metric(a, "sync_errors_total") > 0 {
				t.Errorf("%d starts, %v errors", restarts, n.metric(a, "sync_errors_total"))
			}
			t.Logf("%d new flows, %d of them arrived", sent, n.counts("to_masqueraded"))
		})
	}
}

// settled waits until the datapath is alone.
func (n *node) settled(datapath string) {
	n.t.Helper()
	n.within(promptly, datapath, func() bool { return n.status().Datapath == datapath })
}

// An agent that could not follow, so that the kernel dropped events, looks at
// everything when it is back.
func TestLostEvents(t *testing.T) {
	const events = 20000 // more than its socket holds
	t.Parallel()
	n := newNode(t, lab.Options{})
	a := lab.StartAgent(t, n.Node, n.flags("ebpf", "--v=4")...)
	server := n.serve("udp", n.Remote.V4)
	if err := a.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var batch strings.Builder
	for range events / 2 {
		batch.WriteString("addr add 192.88.99.1/32 dev lo\naddr del 192.88.99.1/32 dev lo\n")
	}
	batch.WriteString("addr flush dev eth0 to 203.0.113.0/24\naddr add 203.0.113.77/24 dev eth0\nroute replace default via 203.0.113.1\n")
	n.batch(batch.String())
	if err := a.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	n.within(promptly, "new flows with the new address", func() bool {
		return n.seenFrom(server) == netip.MustParseAddr("203.0.113.77")
	})
	if !strings.Contains(a.Logs(), "network events lost") {
		t.Error("no event was lost, so this tests nothing")
	}
}

// batch runs ip -batch on the node.
func (n *node) batch(script string) {
	n.t.Helper()
	cmd := n.Node.Command(n.t.Context(), "ip", "-batch", "-")
	cmd.Stdin = strings.NewReader(script)
	if out, err := cmd.CombinedOutput(); err != nil {
		n.t.Fatalf("%v: %s", err, out)
	}
}

// Pods that come and go cost the agent next to nothing.
func TestPodsComeAndGo(t *testing.T) {
	const pods, perBatch = 300, 25
	for datapath := range map[string]bool{"iptables": true, "ebpf": true} {
		t.Run(datapath, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, lab.Options{})
			a := lab.StartAgent(t, n.Node, n.flags(datapath)...)
			n.settled(datapath)
			syncs := n.metric(a, "sync_duration_seconds_count")
			before, begin := n.cpu(a), time.Now()
			tick := time.NewTicker(perBatch * 10 * time.Millisecond) // 100 pods a second
			defer tick.Stop()
			for i := 0; i < pods; i += perBatch {
				var script strings.Builder
				for p := i; p < i+perBatch; p++ {
					fmt.Fprintf(&script, "link add pod-%d group 7 type veth peer name eth-%d\nlink set pod-%d up\nlink set eth-%d up\nroute add 10.245.%d.%d/32 dev pod-%d\n",
						p, p, p, p, p/256, p%256, p)
				}
				n.batch(script.String() + "link del group 7\n")
				<-tick.C
			}
			used, took := n.cpu(a)-before, time.Since(begin)
			t.Logf("%d pods in %v: %v of CPU, %.1f %%", pods, took, used, 100*used.Seconds()/took.Seconds())
			if used > took/5 {
				t.Errorf("the agent used %v of CPU in %v", used, took)
			}
			if more := n.metric(a, "sync_duration_seconds_count") - syncs; more > 0 {
				t.Errorf("%v syncs because of pods", more)
			}
		})
	}
}

// cpu is the time that a process has computed so far: the 14th and 15th field of
// /proc/PID/stat (proc(5)), in hundredths of a second.
func (n *node) cpu(a *lab.Agent) time.Duration {
	n.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", a.PID()))
	if err != nil {
		n.t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), ") ") // the name may have spaces
	fields := strings.Fields(after)
	ticks := 0
	for _, field := range fields[11:13] {
		count, err := strconv.Atoi(field)
		if err != nil {
			n.t.Fatal(err)
		}
		ticks += count
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}
