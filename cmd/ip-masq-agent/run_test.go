// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", file, diff)
	}
}

// fakeDatapath stands where the kernel would.
type fakeDatapath struct {
	name   string
	events *eventList
	flows  []api.Translation
}

func (d *fakeDatapath) Name() string { return d.name }
func (d *fakeDatapath) Sync(context.Context, *prefix.Policy, *route.Snapshot) error {
	d.events.add("sync " + d.name)
	return nil
}

func (d *fakeDatapath) Plan(policy *prefix.Policy, _ *route.Snapshot) (string, error) {
	return fmt.Sprintln(d.name, policy.Lists().NonMasquerade), nil
}
func (d *fakeDatapath) Changed() <-chan struct{}  { return nil }
func (d *fakeDatapath) Stats() (api.Stats, error) { return api.Stats{}, nil }
func (d *fakeDatapath) EachTranslation(visit func(api.Translation)) error {
	for _, flow := range d.flows {
		visit(flow)
	}
	return nil
}
func (d *fakeDatapath) Close() error { d.events.add("close " + d.name); return nil }
func (d *fakeDatapath) Status() (api.DatapathStatus, error) {
	return api.DatapathStatus{
		Backend:    api.Backend{Name: "fake", Reason: "this is a test"},
		Interfaces: []api.Interface{{Name: "eth0", Attach: "tcx", SNATv4: netip.MustParseAddr("192.0.2.1")}},
		NAT:        api.NAT{V4: api.Table{Entries: 3, Capacity: 10}, V6: api.Table{Capacity: 10}},
		FastPath:   api.FastPath{Enabled: true, Interfaces: []string{"cni0", "veth1"}, Packets: 17},
		Warnings:   []string{"something is odd"},
	}, nil
}

// eventList is what happened, in order.
type eventList struct {
	mu   sync.Mutex
	list []string
}

func (e *eventList) add(event string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, event)
}

func (e *eventList) String() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return strings.Join(e.list, ", ")
}

// stage is an environment with fake datapaths and a socket of its own.
type stage struct {
	t      *testing.T
	env    environment
	events *eventList
	opened *options // by the last open
	left   string   // the datapath that inspection finds
	flows  []api.Translation
}

var stages atomic.Int32 // tells the sockets of stages apart

func newStage(t *testing.T) *stage {
	t.Helper()
	s := &stage{t: t, events: &eventList{}, flows: testFlows()}
	s.env = environment{
		ctx:       t.Context(),
		socket:    fmt.Sprintf("@ip-masq-agent-test-%d-%d", os.Getpid(), stages.Add(1)),
		datapaths: map[string]datapath{agent.IPTables: s.fake(agent.IPTables), agent.EBPF: s.fake(agent.EBPF)},
	}
	return s
}

func (s *stage) fake(name string) datapath {
	note := func(what string) func(context.Context, *options, *slog.Logger) error {
		return func(context.Context, *options, *slog.Logger) error {
			s.events.add(what + " " + name)
			return nil
		}
	}
	fake := &fakeDatapath{name: name, events: s.events}
	return datapath{
		open: func(o *options, _ *slog.Logger) (agent.Datapath, error) {
			s.opened, fake.flows = o, s.flows
			return fake, nil
		},
		plan: func(_ *options, _ *slog.Logger, policy *prefix.Policy, network *route.Snapshot) (string, error) {
			return fake.Plan(policy, network)
		},
		inspect: func(context.Context, *options, *slog.Logger) (api.DatapathStatus, bool, error) {
			status, err := fake.Status()
			return status, name == s.left, err
		},
		flows: func(_ *options, _ *slog.Logger, visit func(api.Translation)) error {
			if name != s.left {
				return nil
			}
			fake.flows = s.flows
			return fake.EachTranslation(visit)
		},
		giveWay: func(o *options, log *slog.Logger) retreat {
			return func(ctx context.Context, _ *route.Snapshot) (agent.Retirement, error) {
				return agent.Retirement{Gone: true}, note("give way")(ctx, o, log)
			}
		},
		cleanup: note("clean up"),
	}
}

func testFlows() []api.Translation {
	flow := func(proto, src, state string) api.Translation {
		return api.Translation{
			Family: 4, Proto: proto, Src: netip.MustParseAddr(src), SPort: 4000,
			Dst: netip.MustParseAddr("198.51.100.1"), DPort: 443,
			NATAddr: netip.MustParseAddr("192.0.2.1"), NATPort: 50000,
			State: state, IdleSeconds: 1, ExpiresSeconds: 100,
		}
	}
	return []api.Translation{flow("udp", "10.0.0.2", "assured"), flow("tcp", "10.0.0.1", "established")}
}

type result struct {
	stdout, stderr string
	code           int
}

func (s *stage) run(args ...string) result {
	var stdout, stderr bytes.Buffer
	code := run(args, &stdout, &stderr, s.env)
	return result{stdout: stdout.String(), stderr: stderr.String(), code: code}
}

// once runs an agent for one sync, without a server or a config in its way.
func (s *stage) once(args ...string) result {
	s.t.Helper()
	s.opened = nil
	nowhere := filepath.Join(s.t.TempDir(), "none")
	return s.run(append([]string{"--once", "--config=" + nowhere}, args...)...)
}

// startAgent runs an agent until the test ends, and waits for its first sync.
func (s *stage) startAgent(args ...string) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(s.t.Context())
	env := s.env
	env.ctx = ctx
	ended := make(chan int, 1)
	nowhere := filepath.Join(s.t.TempDir(), "none")
	var output bytes.Buffer
	go func() {
		ended <- run(append([]string{"--metrics-bind-address=0", "--config=" + nowhere}, args...), &output, &output, env)
	}()
	s.t.Cleanup(func() {
		cancel()
		if code := <-ended; code != exitFine {
			s.t.Errorf("the agent ended with %d:\n%s", code, output.String())
		}
	})
	for deadline := time.Now().Add(5 * time.Second); !strings.Contains(s.events.String(), "give way"); {
		if time.Now().After(deadline) {
			s.t.Fatalf("no sync: %s", s.events)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestExitCodes(t *testing.T) {
	for _, test := range []struct {
		args   string
		code   int
		stderr string // all of it; "*" for anything
	}{
		{"--help", exitFine, ""},
		{"-h", exitFine, ""},
		{"-help", exitFine, ""},
		{"help", exitFine, ""},
		{"status --help", exitFine, ""},
		{"--version", exitFine, ""},
		{"-version", exitFine, ""},
		{"version", exitFine, ""},
		{"--once", exitFine, "*"},
		{"--dry-run", exitFine, "*"},
		{"completion bash", exitFine, ""},
		{"completion zsh", exitFine, ""},
		{"completion fish", exitFine, ""},
		{"validate /nowhere", exitFailure, "/nowhere: no such file"},
		{"--foo", exitUsage, "unknown flag: --foo (see ip-masq-agent --help)"},
		{"-foo", exitUsage, "unknown shorthand flag: 'f' in -foo (see ip-masq-agent --help)"},
		{"frob", exitUsage, `unknown command "frob" (see ip-masq-agent --help)`},
		{"--enable-ipv6 false", exitUsage, `unknown command "false" (see ip-masq-agent --help)`},
		{"-enable-ipv6=maybe", exitUsage, `invalid argument "maybe" for "--enable-ipv6" flag: must be true or false (see ip-masq-agent --help)`},
		{"--datapath=xdp", exitUsage, `--datapath: "xdp" is neither iptables nor ebpf (see ip-masq-agent --help)`},
		{"--to-ports=5-1", exitUsage, `--to-ports: first is greater than last in "5-1" (see ip-masq-agent --help)`},
		{"--to-ports=70000", exitUsage, "*"},
		{"--node-port-range=0", exitUsage, "*"},
		{"--masq-chain=", exitUsage, "*"},
		{"--masq-chain=POSTROUTING", exitUsage, "*"},
		{"--invalid=reject", exitUsage, `--invalid: "reject" is neither drop nor pass (see ip-masq-agent --help)`},
		{"--metrics-bind-address=9613", exitUsage, "*"},
		{"--log-format=xml", exitUsage, `--log-format: "xml" is neither text nor json (see ip-masq-agent --help)`},
		{"--nat-table-size=0", exitUsage, "*"},
		{"--fast-path", exitUsage, "--fast-path: only --datapath=ebpf has one, this is iptables (see ip-masq-agent --help)"},
		{"--interfaces=[", exitUsage, "*"},
		{"--v=x", exitUsage, `invalid argument "x" for "-v, --v" flag: must be an integer (see ip-masq-agent --help)`},
		{"status extra", exitUsage, `unexpected argument "extra" (see ip-masq-agent status --help)`},
		{"status -o yaml", exitUsage, `--output: "yaml" is neither text nor json (see ip-masq-agent status --help)`},
		{"explain", exitUsage, "--dst is needed (see ip-masq-agent explain --help)"},
		{"explain --dst here", exitUsage, `--dst: "here" is not an IP address (see ip-masq-agent explain --help)`},
		{"explain --dst 8.8.8.8 --dport 70000", exitUsage, "*"},
		{"nat", exitUsage, "a command is missing: nat list (see ip-masq-agent nat --help)"},
		{"nat show", exitUsage, `unknown command "show" (see ip-masq-agent nat --help)`},
		{"nat list --src x", exitUsage, `--src: "x" is neither an IP address nor a CIDR (see ip-masq-agent nat list --help)`},
		{"cleanup --masq-chain DROP", exitUsage, "*"},
		{"validate a b", exitUsage, "validate takes one file, not 2 (see ip-masq-agent validate --help)"},
		{"completion tcsh", exitUsage, `no completion for "tcsh", only for bash, zsh and fish (see ip-masq-agent completion --help)`},
		{"completion", exitUsage, "*"},
	} {
		t.Run(test.args, func(t *testing.T) {
			got := newStage(t).run(strings.Fields(test.args)...)
			if got.code != test.code {
				t.Errorf("got code %d, want %d", got.code, test.code)
			}
			want := test.stderr
			if want != "" {
				want = "ip-masq-agent: " + want + "\n"
			}
			if test.stderr != "*" && got.stderr != want {
				t.Errorf("stderr %q, want %q", got.stderr, want)
			}
			if got.code == exitUsage && (strings.Count(got.stderr, "\n") != 1 || got.stdout != "") {
				t.Errorf("want one line on stderr alone, got stdout %q, stderr %q", got.stdout, got.stderr)
			}
		})
	}
}

func TestHelp(t *testing.T) {
	for _, command := range []string{"", "status", "explain", "nat", "nat list", "cleanup", "validate", "version", "completion"} {
		t.Run(command, func(t *testing.T) {
			got := newStage(t).run(append(strings.Fields(command), "--help")...)
			golden(t, "help"+strings.ReplaceAll(" "+command, " ", "_")+".txt", got.stdout)
		})
	}
}

func TestOtherDatapathGivesWayAfterTheSync(t *testing.T) {
	for chosen, want := range map[string]string{
		agent.IPTables: "sync iptables, give way ebpf, close iptables",
		agent.EBPF:     "sync ebpf, give way iptables, close ebpf",
	} {
		s := newStage(t)
		if got := s.once("--datapath=" + chosen); got.code != exitFine {
			t.Errorf("%s: got %+v", chosen, got)
		}
		if got := s.events.String(); got != want {
			t.Errorf("%s: got %s, want %s", chosen, got, want)
		}
	}
}

func TestMissingThingsAreOneLineEach(t *testing.T) {
	s := newStage(t)
	s.env.datapaths[agent.EBPF] = datapath{open: func(*options, *slog.Logger) (agent.Datapath, error) {
		return nil, missingError{datapath: agent.EBPF, what: []string{"map type lpm_trie", "CAP_BPF"}}
	}}
	got := s.once("--datapath=ebpf", "--log-format=json")
	if got.code != exitFailure {
		t.Errorf("got code %d, want 1", got.code)
	}
	for _, missing := range []string{"map type lpm_trie", "CAP_BPF"} {
		line := fmt.Sprintf(`"msg":"datapath cannot run here","datapath":"ebpf","missing":"%s"}`, missing)
		if strings.Count(got.stderr, line) != 1 {
			t.Errorf("want one line about %s:\n%s", missing, got.stderr)
		}
	}
	if got := s.events.String(); got != "" {
		t.Errorf("something was done: %s", got)
	}
}

func TestOpenFailureIsOneLine(t *testing.T) {
	s := newStage(t)
	s.env.datapaths[agent.IPTables] = datapath{open: func(*options, *slog.Logger) (agent.Datapath, error) {
		return nil, errors.New("no iptables")
	}}
	got := s.once()
	if got.code != exitFailure || strings.Count(got.stderr, `level=ERROR msg="ip-masq-agent ends" error="open the iptables datapath: no iptables"`) != 1 {
		t.Errorf("got %+v", got)
	}
}

func TestDryRunPrintsAndTouchesNothing(t *testing.T) {
	s := newStage(t)
	got := s.run("--dry-run", "--config="+filepath.Join(t.TempDir(), "none"))
	if got.code != exitFine || got.stdout != "iptables [10.0.0.0/8 172.16.0.0/12 192.168.0.0/16]\n" {
		t.Errorf("got %+v", got)
	}
	if got := s.events.String(); got != "" {
		t.Errorf("done: %s", got)
	}
	bad := filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(bad, []byte("nonMasqueradeCIDRs: [x]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got = s.run("--dry-run", "--config="+bad)
	if got.code != exitFailure || !strings.Contains(got.stdout, "10.0.0.0/8") || !strings.Contains(got.stderr, "could not be parsed") {
		t.Errorf("with a bad config: got %+v", got)
	}
}
