// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

const (
	// lockWait is how long the legacy programs wait for the xtables lock, in
	// seconds.
	lockWait = 5

	// commandTimeout bounds each program, the wait for the lock included. A
	// restore among 100,000 foreign rules takes a few seconds.
	commandTimeout = 30 * time.Second
)

// family is IPv4 or IPv6.
type family int

const (
	ipv4 family = 4
	ipv6 family = 6
)

func (f family) String() string { return "ipv" + strconv.Itoa(int(f)) }

func families() []family { return []family{ipv4, ipv6} }

// mode is one of the two backends: a kernel interface and the programs for it.
type mode string

const (
	nft    mode = "nft"
	legacy mode = "legacy"
)

// tool runs the programs of one backend for one family. They are called by
// their own names: what is called plain iptables-restore is in common images a
// script that swallows its input and exits 0.
type tool struct {
	mode    mode
	family  family
	timeout time.Duration
	started func(pid int) // told of every restore; nil: nobody is
}

func newTool(m mode, f family) tool {
	return tool{mode: m, family: f, timeout: commandTimeout}
}

func (t tool) program(suffix string) string {
	name := "iptables-"
	if t.family == ipv6 {
		name = "ip6tables-"
	}
	return name + string(t.mode) + suffix
}

// list shows a chain and what its rules counted. A chain that is not there is
// not an error. One chain is asked for at a time: among 16,000 rules of
// kube-proxy that takes nft 4 ms, the whole table 220 ms, and a rule that
// iptables cannot show spoils the listing of nothing but its own chain.
func (t tool) list(ctx context.Context, table, name string) (listed, error) {
	out, err := t.run(ctx, "", t.program(""), "-w", strconv.Itoa(lockWait), "-t", table, "-v", "-S", name)
	switch {
	case err == nil:
		return parseTable(out)[name], nil
	case said(err, "is incompatible"):
		// iptables 1.8.9 says this of chains that are not there, too.
		return listed{opaque: true}, nil
	case isMissing(err):
		return listed{}, nil
	}
	return listed{}, err
}

// listTable shows a whole table.
func (t tool) listTable(ctx context.Context, table string) (map[string]listed, error) {
	out, err := t.run(ctx, "", t.program(""), "-w", strconv.Itoa(lockWait), "-t", table, "-S")
	if err != nil {
		return nil, err
	}
	return parseTable(out), nil
}

// has asks whether a chain holds a rule, which works where listing does not.
func (t tool) has(ctx context.Context, table, name string, r rule) (bool, error) {
	args := []string{"-w", strconv.Itoa(lockWait), "-t", table, "-C", name}
	for _, w := range r.words() {
		args = append(args, w.text)
	}
	_, err := t.run(ctx, "", t.program(""), args...)
	if isMissing(err) {
		return false, nil
	}
	return err == nil, err
}

// restore applies lines to a table in one transaction.
func (t tool) restore(ctx context.Context, table string, lines []string) error {
	_, err := t.run(ctx, transaction(table, lines), t.program("-restore"), "--noflush", "-w", strconv.Itoa(lockWait))
	return err
}

func transaction(table string, lines []string) string {
	return "*" + table + "\n" + strings.Join(lines, "\n") + "\nCOMMIT\n"
}

// run runs a program and gives its standard output.
func (t tool) run(ctx context.Context, stdin, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, t.timeout, fmt.Errorf("no end after %v: %w", t.timeout, context.DeadlineExceeded))
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.WaitDelay = time.Second // a script's children may hold the pipes
	cmd.Stdin = strings.NewReader(stdin)
	var out, errText bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errText
	err := cmd.Start()
	if err == nil {
		if t.started != nil && stdin != "" {
			t.started(cmd.Process.Pid)
		}
		err = cmd.Wait()
	}
	if err == nil {
		return out.String(), nil
	}
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	return "", &commandError{program: program, args: args, stderr: strings.TrimSpace(errText.String()), err: err}
}

// commandError is a program that could not be run or failed.
type commandError struct {
	program string
	args    []string
	stderr  string
	err     error
}

func (e *commandError) Unwrap() error { return e.err }

func (e *commandError) Error() string {
	switch {
	case errors.Is(e.err, exec.ErrNotFound):
		return e.program + " is not in PATH: install iptables 1.8 or newer with its nft and legacy programs"
	case strings.Contains(e.stderr, "holding the xtables lock"):
		return fmt.Sprintf("%s: another program held the xtables lock for %d seconds: %s", e.program, lockWait, e.stderr)
	}
	text := e.program + " " + strings.Join(e.args, " ") + ": " + e.err.Error()
	if e.stderr != "" {
		text += ": " + e.stderr
	}
	if strings.HasPrefix(e.stderr, "ip") && strings.HasSuffix(strings.TrimSuffix(e.stderr, "."), " failed") {
		// All that the legacy programs say when the table changed while they worked.
		text += " (does another program write rules without sharing /run/xtables.lock with this one?)"
	}
	return text
}

// isMissing reports whether err says that a chain, a rule or the target of a
// rule is not there. `-C` exits 2 instead of 1 for a jump whose chain is gone.
func isMissing(err error) bool {
	return said(err, "No chain/target/match by that name", "does a matching rule exist",
		"Couldn't load target", "' does not exist")
}

// isUnsupported reports whether err says that the kernel lacks the backend, the
// family or the table.
func isUnsupported(err error) bool {
	return said(err, "Protocol not supported", "Operation not supported", "Address family not supported",
		"Could not fetch rule set generation id: Invalid argument", "Table does not exist", "No such device")
}

func said(err error, texts ...string) bool {
	var e *commandError
	if !errors.As(err, &e) {
		return false
	}
	for _, text := range texts {
		if strings.Contains(e.stderr, text) {
			return true
		}
	}
	return false
}
