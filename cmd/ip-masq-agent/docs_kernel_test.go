// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"ip-masq-agent/internal/lab"
)

// The commands in these pages are run one after another, as a reader would, and
// their output is what the pages show. With -update the pages get the output.
//
//   - A block ```console is a session of root on a node. "command &" starts the
//     agent and shows what it logs until it is ready, "kill %1" ends it.
//   - <!-- test: udp ADDRESS --> between blocks has pods talk until the end of
//     the page, by what its first word says: udp, tcp or ping.
func TestKernelDocs(t *testing.T) {
	for page, options := range map[string]lab.Options{
		"operations.md": {Pods: 2, RoutedPods: -1, Conntrack: true},
		"bpftool.md":    {Pods: 1, RoutedPods: -1},
	} {
		t.Run(page, func(t *testing.T) {
			t.Parallel()
			s := newSession(t, options)
			text := s.followPage(filepath.Join("../../docs", page))
			if page != "bpftool.md" {
				return
			}
			for pin := range strings.FieldsSeq(s.do("cd " + defaultPinPath + "; ls -d *_v4 *_v6 netns v1/*")) {
				if !strings.Contains(text, "`"+pin+"`") {
					t.Errorf("says nothing of %s", pin)
				}
			}
		})
	}
}

// session is a reader's shell on a node.
type session struct {
	*lab.Lab
	t     *testing.T
	agent *lab.Agent
}

func newSession(t *testing.T, options lab.Options) *session {
	t.Helper()
	s := &session{Lab: lab.New(t, options), t: t}
	s.do("mkdir -p /run/bin /run/etc && ln -s " + lab.AgentBinary(t) + " /run/bin/ip-masq-agent && " +
		"cp -a /etc/. /run/etc && mkdir -p /run/etc/config && mount --bind /run/etc /etc")
	return s
}

// do runs a command line and gives all that it says.
func (s *session) do(line string) string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 30*time.Second)
	defer cancel()
	shell := s.Node.Command(ctx, "bash", "-c", line)
	shell.Env = append(os.Environ(), "PATH=/run/bin:"+os.Getenv("PATH")+":/usr/sbin:/sbin")
	out, err := shell.CombinedOutput()
	if err != nil && len(out) == 0 {
		s.t.Errorf("%s: %v", line, err)
	}
	return string(out)
}

// followPage does what a page says, and gives its text.
func (s *session) followPage(file string) string {
	s.t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		s.t.Fatal(err)
	}
	lines := strings.Split(string(text), "\n")
	var now []string
	commands := 0
	for i := 0; i < len(lines); i++ {
		now = append(now, lines[i])
		if directive, found := strings.CutPrefix(lines[i], "<!-- test: "); found {
			s.send(strings.Fields(strings.TrimSuffix(directive, " -->")))
		}
		if !strings.HasPrefix(lines[i], "```") {
			continue
		}
		end := i + 1 + slices.Index(lines[i+1:], "```")
		if lines[i] != "```console" {
			s.t.Errorf("%s:%d: a block that is not run", file, i+1)
		}
		block := parseSession(lines[i+1 : end])
		commands += len(block)
		now = append(append(now, s.follow(block)...), lines[end])
		i = end
	}
	if commands == 0 {
		s.t.Errorf("%s has no commands", file)
	}
	if *update {
		if err := os.WriteFile(file, []byte(strings.Join(now, "\n")), 0o600); err != nil {
			s.t.Fatal(err)
		}
	}
	return string(text)
}

// step is a command and the output that the page shows.
type step struct {
	lines  []string // of the command, with prompts
	output []string
}

func (s step) command() string {
	var line []string
	for _, l := range s.lines {
		line = append(line, l[2:])
	}
	return strings.Join(line, "\n")
}

func parseSession(lines []string) (steps []step) {
	for _, line := range lines {
		switch {
		case strings.HasPrefix(line, "# "):
			steps = append(steps, step{lines: []string{line}})
		case strings.HasPrefix(line, "> ") && len(steps) > 0:
			last := &steps[len(steps)-1]
			last.lines = append(last.lines, line)
		case len(steps) > 0:
			last := &steps[len(steps)-1]
			last.output = append(last.output, line)
		}
	}
	return steps
}

// follow runs a block and gives its lines as they should be.
func (s *session) follow(steps []step) (now []string) {
	s.t.Helper()
	for _, step := range steps {
		want := strings.Join(step.output, "\n")
		got := s.until(step.command(), want)
		if same(got, want) {
			got = want // what may differ stays as it is
		} else if !*update {
			s.t.Errorf("# %s\nshows\n%s\nthe page has\n%s", step.command(), got, want)
		}
		now = append(now, step.lines...)
		if got != "" {
			now = append(now, strings.Split(got, "\n")...)
		}
	}
	return now
}

// until runs a command, again for a while if its output is not yet the wanted
// one: the agent acts at once, but not before the next command.
func (s *session) until(command, want string) string {
	s.t.Helper()
	patience := 5 * time.Second
	if *update {
		patience = time.Second // nobody knows what is wanted
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		got := strings.TrimRight(s.once(command), "\n")
		reads := !strings.Contains(command, "&") && !strings.Contains(command, "%") && !strings.Contains(command, ">")
		if same(got, want) || !reads || time.Now().After(deadline) {
			return got
		}
	}
}

func (s *session) once(command string) string {
	s.t.Helper()
	switch line, background := strings.CutSuffix(command, " &"); {
	case background:
		args, quiet := strings.CutSuffix(line, " 2>/dev/null")
		s.agent = lab.StartAgent(s.t, s.Node, strings.Fields(args)[1:]...)
		if quiet {
			return ""
		}
		return s.agent.Logs()
	case command == "kill %1":
		if err := s.agent.Stop(); err != nil {
			s.t.Error(err)
		}
		return ""
	}
	return s.do(command)
}

// send has the pods talk until the end of the page.
func (s *session) send(words []string) {
	s.t.Helper()
	if words[0] == "ping" {
		ping := s.Pods[0].Command(s.t.Context(), "ping", "-qi", "0.2", words[1])
		if err := ping.Start(); err != nil {
			s.t.Fatal(err)
		}
		s.t.Cleanup(func() {
			_ = ping.Process.Kill()
			_ = ping.Wait() // it was killed
		})
		return
	}
	to := netip.MustParseAddrPort(words[1])
	s.Outside.Serve(s.t, words[0], to)
	for _, pod := range s.Pods {
		conn, err := pod.Dial(s.t.Context(), words[0], netip.AddrPort{}, to)
		if err != nil {
			s.t.Fatal(err)
		}
		s.t.Cleanup(func() { _ = conn.Close() })
	}
}

// differing is what differs from run to run and from node to node.
var differing = []struct{ pattern, name string }{
	{`time=\S+`, "time=T"},
	{`(Version +|version=|"version":")[^\s"]+`, "${1}V"},
	{`ip-masq-agent \S+ \(commit .*\)`, "ip-masq-agent V"},
	{`kernel=\S+`, "kernel=K"},
	{`features="[^"]*"`, "features=F"},
	{`direct packet access: \w+, conntrack state of packets: \w+, conntrack lookup: \w+`, "F"},
	{`\b(connections|high|sport|dport|id|use)=\d+`, "$1=N"},
	{`(?m)^icmp +1 \d+ `, "icmp 1 N "},
	{`, id \d+, seq \d+`, ", id N, seq N"},
	{`"(sport|nat_port|idle_seconds|expires_seconds)":\d+`, `"$1":N`},
	{`"(sport|dport|port|nat_port|created|last_seen|seen|other_seen|count|ifindex|val)": \d+`, `"$1": N`},
	{`"mac": \[[\d,]+`, `"mac": [M`},
	{`(?m)^\d+: `, "ID: "},
	{`memlock \d+B`, "memlock N"},
	{`prog \d+`, "prog N"},
	{`\b\d+_(egress|ingress)`, "${N}_$1"},
	{`"last_sync":"[^"]*"`, `"last_sync":"T"`},
	{`\[\d+:\d+\]`, "[N:N]"},
	{`((?:203\.0\.113\.10|10\.244\.\d+\.\d+)):\d+`, "$1:PORT"},
	{`\b\d+(\.\d+)?(ms|µs|s)\b`, "T"},
	{`(?m)^(ip_masq_agent_\S*_(?:seconds|info|bucket|sum)\S*) .*$`, "$1 N"},
	{` +`, " "},
}

// same compares what does not differ. Lines of a log come in any order.
func same(a, b string) bool {
	return normal(a) == normal(b)
}

func normal(text string) string {
	for _, d := range differing {
		text = regexp.MustCompile(d.pattern).ReplaceAllString(text, d.name)
	}
	lines := strings.Split(text, "\n")
	if strings.HasPrefix(text, "time=") {
		slices.Sort(lines)
	}
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, "\n")
}

// Whoever compares must see a difference.
func TestDocsComparison(t *testing.T) {
	for _, test := range []struct {
		a, b string
		want bool
	}{
		{"idle 3s from 10.244.0.2:4000", "idle 12s from 10.244.0.2:5123", true},
		{"idle 3s from 10.244.0.2:4000", "idle 3s from 10.244.0.3:4000", false},
		{"time=1 level=INFO msg=a\ntime=2 level=INFO msg=b", "time=1 level=INFO msg=b\ntime=1 level=INFO msg=a", true},
		{"one\ntwo", "two\none", false},
		{"a  b", "a b", true},
		{"ip_masq_agent_nat_entries 3", "ip_masq_agent_nat_entries 4", false},
	} {
		if got := same(test.a, test.b); got != test.want {
			t.Errorf("%q and %q: got %v", test.a, test.b, got)
		}
	}
	steps := parseSession([]string{"# cat <<EOF", "> text", "> EOF", "text", "# true"})
	if got := fmt.Sprintf("%q", steps); got != `[{["# cat <<EOF" "> text" "> EOF"] ["text"]} {["# true"] []}]` {
		t.Errorf("parsed %s", got)
	}
}
