// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// The man page is what the commands say of themselves. With -update it is made
// anew.
func TestManPage(t *testing.T) {
	golden(t, "../../../docs/man/ip-masq-agent.8", manPage(newRoot(realEnvironment())))
}

// manPage writes all commands as one page for man(1).
func manPage(root *cobra.Command) string {
	m := &man{}
	m.raw(`.\" SPDX-License-Identifier: Apache-2.0`)
	m.raw(`.\" Made by go test ./cmd/ip-masq-agent -run TestManPage -update`)
	m.raw(`.TH IP\-MASQ\-AGENT 8 "" "ip\-masq\-agent" "System administration"`)
	m.section("NAME")
	m.text("ip-masq-agent - " + strings.ToLower(root.Short[:1]) + root.Short[1:])
	m.section("SYNOPSIS")
	m.raw(`.B ip\-masq\-agent`)
	m.raw(`.RI [ flags ]`)
	for _, command := range commandsOf(root) {
		m.raw(".br")
		m.raw(".B " + escape(command.UseLine()))
	}
	m.section("DESCRIPTION")
	m.text(root.Long)
	m.section("FLAGS OF THE AGENT")
	m.flags(root.LocalFlags())
	m.section("COMMANDS")
	for _, command := range commandsOf(root) {
		m.raw(`.SS "` + escape(command.UseLine()) + `"`)
		long := command.Long
		if long == "" {
			long = command.Short + "."
		}
		m.text(long)
		m.flags(command.LocalFlags())
	}
	m.section("EXIT STATUS")
	m.text("0: fine. 1: failure at run time. 2: bad usage.")
	m.section("FILES")
	m.item(defaultConfig, "the config, YAML or JSON; without it the defaults apply")
	m.item(defaultPinPath, "maps and links of the ebpf datapath")
	m.item("@ip-masq-agent", "abstract socket on which the agent answers root's commands")
	m.section("SIGNALS")
	m.item("SIGTERM, SIGINT", "end the agent; what it made in the kernel stays")
	m.item("SIGHUP", "sync now")
	m.section("SEE ALSO")
	m.text("iptables(8), conntrack(8), bpftool(8), tc(8)")
	return m.String()
}

// commandsOf lists the commands that do something.
func commandsOf(parent *cobra.Command) (all []*cobra.Command) {
	for _, command := range parent.Commands() {
		switch {
		case command.HasSubCommands():
			all = append(all, commandsOf(command)...)
		case command.Name() != "help":
			all = append(all, command)
		}
	}
	return all
}

type man struct{ strings.Builder }

func (m *man) raw(line string) { m.WriteString(line + "\n") }

func (m *man) section(name string) { m.raw(".SH " + name) }

// text writes paragraphs. Indented lines stay as they are.
func (m *man) text(text string) {
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		switch {
		case line == "":
			m.raw(".PP")
		case strings.HasPrefix(line, "  "):
			m.raw(".EX\n" + escape(line) + "\n.EE")
		default:
			m.raw(escape(line))
		}
	}
}

func (m *man) item(term, text string) {
	m.raw(".TP\n.B " + escape(term))
	m.raw(escape(text))
}

func (m *man) flags(flags *pflag.FlagSet) {
	flags.VisitAll(func(flag *pflag.Flag) {
		if flag.Hidden || flag.Name == "help" {
			return
		}
		value, usage := pflag.UnquoteUsage(flag)
		term := "--" + flag.Name
		if flag.Shorthand != "" {
			term = "-" + flag.Shorthand + ", " + term
		}
		if value != "" {
			term += "=" + value
		}
		switch flag.DefValue {
		case "", "false", "0", "[]":
		default:
			usage += " (default " + flag.DefValue + ")"
		}
		m.item(term, usage)
	})
}

// escape keeps roff from reading text as its own.
func escape(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`, "…", `...`).Replace(text)
	if strings.HasPrefix(text, ".") || strings.HasPrefix(text, "'") {
		text = `\&` + text
	}
	return text
}

// What is completed are the commands and flags that there are, by a script that
// bash takes.
func TestCompletion(t *testing.T) {
	s := newStage(t)
	check := exec.CommandContext(t.Context(), "bash", "-n")
	check.Stdin = strings.NewReader(s.run("completion", "bash").stdout)
	if said, err := check.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, said)
	}
	got := s.run("__complete", "nat", "list", "--count")
	if got.code != exitFine || !strings.HasPrefix(got.stdout, "--count-by\t") {
		t.Errorf("got %+v", got)
	}
	got = s.run("__complete", "")
	for _, command := range []string{"status", "explain", "nat", "cleanup", "validate", "version", "completion"} {
		if !strings.Contains(got.stdout, command+"\t") {
			t.Errorf("%s is not completed: %s", command, got.stdout)
		}
	}
}
