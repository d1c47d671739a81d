// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	agentModule    = "ip-masq-agent"
	agentPackage   = agentModule + "/cmd/ip-masq-agent"
	metricsFlag    = "--metrics-bind-address="
	metricsDefault = "127.0.0.1:9613"
	readyTimeout   = 30 * time.Second
	stopTimeout    = 10 * time.Second
)

// builtAgent builds the agent once for the test process.
var builtAgent = sync.OnceValues(buildAgent)

// AgentBinary is the path of the agent: that of the environment variable
// IP_MASQ_AGENT_BIN, or of one built from the module around the test.
func AgentBinary(tb testing.TB) string {
	tb.Helper()
	if path := os.Getenv("IP_MASQ_AGENT_BIN"); path != "" {
		return path
	}
	binary, err := builtAgent()
	if err != nil {
		tb.Fatal(err)
	}
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), binary.Fd())
}

// buildAgent gives the binary as a file without a name, so that it is gone
// when the process is. The test may be in a module beside the agent's.
func buildAgent() (*os.File, error) {
	module, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", agentModule).Output()
	if err != nil {
		return nil, fmt.Errorf("find the agent's module: %w", err)
	}
	directory, err := os.MkdirTemp("", "ip-masq-agent-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(directory) }()
	path := filepath.Join(directory, "ip-masq-agent")
	build := exec.Command("go", "build", "-o", path, agentPackage)
	build.Dir = strings.TrimSpace(string(module))
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if said, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build the agent: %w: %s", err, said)
	}
	return os.Open(path)
}

// Agent is a running agent process.
type Agent struct {
	ns      *Namespace
	cmd     *Cmd
	logs    Log
	metrics string
	exited  chan struct{}
	err     error // valid once exited is closed
}

// StartAgent runs the agent in ns, waits until it is ready, and kills it at
// the end of the test. What it logged is shown if the test fails. On a lab's
// node its default pin path is on a BPF file system of the node's own.
func StartAgent(tb testing.TB, ns *Namespace, args ...string) *Agent {
	tb.Helper()
	a := LaunchAgent(tb, ns, args...)
	a.AwaitReady(tb)
	return a
}

// LaunchAgent is StartAgent without the wait.
func LaunchAgent(tb testing.TB, ns *Namespace, args ...string) *Agent {
	tb.Helper()
	a := &Agent{ns: ns, metrics: metricsDefault, exited: make(chan struct{})}
	for _, arg := range args {
		if address, ok := strings.CutPrefix(arg, metricsFlag); ok {
			a.metrics = address
		}
	}
	a.cmd = ns.Command(context.Background(), AgentBinary(tb), args...)
	a.cmd.Args[0] = "ip-masq-agent"
	a.cmd.Stdout, a.cmd.Stderr = &a.logs, &a.logs
	if err := a.cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	go func() {
		a.err = a.cmd.Wait()
		close(a.exited)
	}()
	tb.Cleanup(func() {
		a.Kill()
		if tb.Failed() {
			tb.Logf("log of %s in %s:\n%s", strings.Join(a.cmd.Args, " "), ns.name, a.Logs())
		}
	})
	return a
}

// AwaitReady waits until /readyz answers 200. With the HTTP server off it
// returns at once.
func (a *Agent) AwaitReady(tb testing.TB) {
	tb.Helper()
	if a.metrics == "0" {
		return
	}
	deadline := time.Now().Add(Patience(readyTimeout))
	for {
		code, _, err := a.Get("/readyz")
		switch {
		case err == nil && code == http.StatusOK:
			return
		case time.Now().After(deadline):
			tb.Fatalf("agent is not ready after %v: HTTP %d, %v", Patience(readyTimeout), code, err)
		}
		select {
		case <-a.exited:
			tb.Fatalf("agent ended before it was ready: %v", a.err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Get fetches a page of the agent's HTTP server.
func (a *Agent) Get(path string) (code int, body string, err error) {
	client := http.Client{
		Timeout: Patience(exchangeTimeout),
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				return a.ns.DialContext(ctx, network, netip.AddrPort{}, address)
			},
		},
	}
	response, err := client.Get("http://" + a.metrics + path)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = response.Body.Close() }()
	content, err := io.ReadAll(response.Body)
	return response.StatusCode, string(content), err
}

// PID is the process id.
func (a *Agent) PID() int { return a.cmd.Process.Pid }

// Logs is what the agent wrote until now.
func (a *Agent) Logs() string { return a.logs.String() }

// Signal sends a signal.
func (a *Agent) Signal(signal syscall.Signal) error { return a.cmd.Process.Signal(signal) }

// Exited is closed once the process has ended.
func (a *Agent) Exited() <-chan struct{} { return a.exited }

// Stop sends SIGTERM and waits. The error says if the agent had to be killed
// or ended with another code than 0.
func (a *Agent) Stop() error {
	if err := a.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-a.exited:
		return a.err
	case <-time.After(Patience(stopTimeout)):
		a.Kill()
		return fmt.Errorf("agent ran on for %v after SIGTERM", Patience(stopTimeout))
	}
}

// Kill sends SIGKILL and waits. It does nothing to a process that has ended.
func (a *Agent) Kill() {
	_ = a.cmd.Process.Kill()
	<-a.exited
}

// Output is what a command of the agent left behind.
type Output struct {
	Stdout, Stderr string
	Code           int
}

// RunAgent runs a command of the agent in ns to its end, for example
// "status", "-o", "json".
func RunAgent(tb testing.TB, ns *Namespace, args ...string) Output {
	tb.Helper()
	binary := AgentBinary(tb) // building it takes its own time
	ctx, cancel := context.WithTimeout(context.Background(), Patience(commandTimeout))
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := ns.Command(ctx, binary, args...)
	cmd.Args[0] = "ip-masq-agent"
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if _, ran := errors.AsType[*exec.ExitError](err); err != nil && !ran {
		tb.Fatal(err)
	}
	return Output{Stdout: stdout.String(), Stderr: stderr.String(), Code: cmd.ProcessState.ExitCode()}
}
