// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRewriteArgs(t *testing.T) {
	for _, test := range []struct{ in, want string }{
		{"", ""},
		{"-masq-chain=X", "--masq-chain=X"},
		{"-masq-chain X", "--masq-chain X"},
		{"--masq-chain X", "--masq-chain X"},
		{"-enable-ipv6", "--enable-ipv6"},
		{"-random-fully=false", "--random-fully=false"},
		{"-enable-ipv6 -nomasq-all-reserved-ranges", "--enable-ipv6 --nomasq-all-reserved-ranges"},
		{"-v=2", "-v=2"},
		{"-v 2", "-v 2"},
		{"--v=2", "--v=2"},
		{"--v 2", "--v 2"},
		{"-v2", "-v2"},
		{"-h", "-h"},
		{"-help", "--help"},
		{"-o json", "-o json"},
		{"-ojson", "-ojson"},
		{"-vmodule=a=2", "--vmodule=a=2"},
		{"--log_file=/dev/stdout", "--log-file=/dev/stdout"},
		{"-log_file_max_size 0", "--log-file-max-size 0"},
		{"--logtostderr=false", "--logtostderr=false"},
		{"explain -dst 8.8.8.8", "explain --dst 8.8.8.8"},
		{"-unknown-flag=x", "-unknown-flag=x"},
		{"-masq-chain -enable-ipv6", "--masq-chain -enable-ipv6"}, // a value, as package flag reads it
		{"-v -enable-ipv6", "-v -enable-ipv6"},
		{"-masq-chain", "--masq-chain"},
		{"-- -enable-ipv6", "-- -enable-ipv6"},
		{"__complete -enable-ipv6", "__complete -enable-ipv6"},
		{"-", "-"},
	} {
		t.Run(test.in, func(t *testing.T) {
			got := rewriteArgs(strings.Fields(test.in), newRoot(realEnvironment()))
			if diff := cmp.Diff(test.want, strings.Join(got, " ")); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// Manifests in the field start the agent like this.
func TestArgvOfTheClassicAgent(t *testing.T) {
	defaults := func(change func(*options)) options {
		o, err := defaultOptions()
		if err != nil {
			t.Fatal(err)
		}
		change(o)
		return *o
	}
	for _, test := range []struct {
		args string
		want func(*options)
	}{
		{"", func(*options) {}},
		{"--masq-chain=IP-MASQ --nomasq-all-reserved-ranges", func(o *options) {
			o.chain, o.config.AllReservedRanges = "IP-MASQ", true
		}},
		{"-masq-chain IP-MASQ -nomasq-all-reserved-ranges=true -enable-ipv6=1", func(o *options) {
			o.chain, o.config.AllReservedRanges, o.config.EnableIPv6 = "IP-MASQ", true, true
		}},
		{"--v=2 --logtostderr=false --log_file=/dev/stdout --log_file_max_size=0 --masq-chain=IP-MASQ --random-fully=false", func(o *options) {
			o.verbosity, o.chain, o.randomFully = 2, "IP-MASQ", false
		}},
		{"-v=4 -alsologtostderr -stderrthreshold=ERROR -vmodule= -log_backtrace_at=:0 -log_dir= -one_output", func(o *options) {
			o.verbosity = 4
		}},
		{"-v 2 --add_dir_header --alsologtostderrthreshold=0 --legacy_stderr_threshold_behavior=true --skip_headers --skip_log_headers=T", func(o *options) {
			o.verbosity = 2
		}},
		{"-to-ports=1024-29999,32768-65535", func(o *options) { o.toPortsText = "1024-29999,32768-65535" }},
		{"--interfaces=eth0,bond* --interfaces eth9", func(o *options) { o.interfaces = []string{"eth0", "bond*", "eth9"} }},
		{"--v=2 --resync-interval=60", func(o *options) { o.verbosity = 2 }}, // AKS
		{"--invalid=drop", func(o *options) { o.invalid = "drop" }},
		{"--datapath=ebpf", func(o *options) { o.datapath, o.datapathGiven = "ebpf", true }},
		{"--datapath=ebpf --invalid=pass --nat-table-size=1000 --node-port-range= --fast-path", func(o *options) {
			o.datapath, o.datapathGiven, o.invalid, o.natTableSize, o.nodePortsText, o.fastPath = "ebpf", true, "pass", 1000, "", true
		}},
	} {
		t.Run(test.args, func(t *testing.T) {
			s := newStage(t)
			if got := s.run(append(strings.Fields(test.args), "--once")...); got.code != exitFine {
				t.Fatalf("got %+v", got)
			}
			want := defaults(test.want)
			want.once = true
			if err := want.check(); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, *s.opened, cmp.AllowUnexported(options{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestInvalidFollowsTheDatapath(t *testing.T) {
	for args, want := range map[string]bool{
		"--datapath=iptables":                false,
		"--datapath=ebpf":                    true,
		"--datapath=iptables --invalid=drop": true,
		"--datapath=ebpf --invalid=pass":     false,
	} {
		s := newStage(t)
		s.once(strings.Fields(args)...)
		if s.opened == nil || s.opened.dropInvalid != want {
			t.Errorf("%s: got %+v, want drop %v", args, s.opened, want)
		}
	}
}

func TestKlogFileFlagsAreToldOnce(t *testing.T) {
	s := newStage(t)
	got := s.once("--v=2", "--logtostderr=false", "--log_file=/dev/stdout", "--log_file_max_size=0")
	if strings.Count(got.stderr, `flags="--log_file --log_file_max_size"`) != 1 {
		t.Errorf("want one line:\n%s", got.stderr)
	}
	if got := s.once("--v=2", "--logtostderr"); strings.Contains(got.stderr, "log file flags") {
		t.Errorf("told without cause:\n%s", got.stderr)
	}
}

func TestResyncIntervalIsToldOnce(t *testing.T) {
	s := newStage(t)
	got := s.once("--resync-interval=60")
	if got.code != exitFine || strings.Count(got.stderr, "resyncInterval in the config") != 1 {
		t.Errorf("want one line that says where it lives: %+v", got)
	}
	if got := s.once(); strings.Contains(got.stderr, "resync-interval") {
		t.Errorf("told without cause:\n%s", got.stderr)
	}
	if got := s.once("--resync-interval=often"); got.code != exitUsage {
		t.Errorf("no number: %+v", got)
	}
}

func TestStartUpLine(t *testing.T) {
	s := newStage(t)
	for args, want := range map[string]string{"--v=0": "datapath=iptables why=default", "--datapath=ebpf": "datapath=ebpf why=--datapath"} {
		got := s.once(args)
		line, _, _ := strings.Cut(got.stderr, "\n")
		if !strings.Contains(line, `msg="ip-masq-agent starts" version=`+thisVersion().Version+" kernel=") || !strings.Contains(line, want) {
			t.Errorf("%s: got %s, want %s", args, line, want)
		}
	}
}
