// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// roleVariable has the test binary play another program.
const roleVariable = "LAB_TEST_ROLE"

func TestMain(m *testing.M) {
	switch os.Getenv(roleVariable) {
	case "agent":
		os.Exit(playAgent())
	default:
		os.Exit(m.Run())
	}
}

// playAgent does what the lab needs of an agent: it becomes ready, logs, and
// ends on SIGTERM.
func playAgent() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if len(os.Args) > 1 && os.Args[1] == "status" {
		fmt.Println("fine")
		fmt.Fprintln(os.Stderr, "said")
		return 3
	}
	fmt.Println("agent starts")
	http.HandleFunc("/readyz", func(http.ResponseWriter, *http.Request) {})
	go func() {
		fmt.Println(http.ListenAndServe(metricsDefault, nil))
	}()
	<-ctx.Done()
	fmt.Println("agent ends")
	return 0
}

func playAgentBinary(t *testing.T) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("IP_MASQ_AGENT_BIN", self)
	t.Setenv(roleVariable, "agent")
}

func TestAgentRuns(t *testing.T) {
	playAgentBinary(t)
	l := New(t, Options{Pods: -1, RoutedPods: -1})
	a := StartAgent(t, l.Node)
	code, _, err := a.Get("/elsewhere")
	if err != nil || code != http.StatusNotFound {
		t.Errorf("HTTP %d, %v", code, err)
	}
	if err := a.Stop(); err != nil {
		t.Error(err)
	}
	if logs := a.Logs(); logs != "agent starts\nagent ends\n" {
		t.Errorf("logs %q", logs)
	}
	a = StartAgent(t, l.Node)
	a.Kill()
	if logs := a.Logs(); logs != "agent starts\n" {
		t.Errorf("logs %q", logs)
	}
	want := Output{Stdout: "fine\n", Stderr: "said\n", Code: 3}
	if diff := cmp.Diff(want, RunAgent(t, l.Node, "status")); diff != "" {
		t.Error(diff)
	}
}

// TestHoldLab is what TestNothingOutlivesTheProcess kills.
func TestHoldLab(t *testing.T) {
	if os.Getenv(roleVariable) != "hold" {
		return
	}
	l := New(t, Options{})
	cmd := l.Node.Command(t.Context(), "sleep", "300")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var id string
	if err := l.Node.Do(func() (err error) {
		id, err = os.Readlink("/proc/thread-self/ns/net")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	fmt.Printf("\nlab %s\n", id)
	_ = cmd.Wait()
}

func TestNothingOutlivesTheProcess(t *testing.T) {
	machine := New(t, Options{Pods: -1, RoutedPods: -1}).Node
	before := visible(t, machine)
	held := machine.Command(t.Context(), fmt.Sprintf("/proc/%d/exe", os.Getpid()), "-test.run=^TestHoldLab$")
	held.Env = append(os.Environ(), roleVariable+"=hold")
	out, err := held.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := held.Start(); err != nil {
		t.Fatal(err)
	}
	id := labLine(t, out)
	if !inUse(id) {
		t.Fatalf("%s is not in use while the lab lives", id)
	}
	if err := held.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = held.Wait()
	for deadline := time.Now().Add(5 * time.Second); inUse(id); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("a process still uses %s", id)
		}
	}
	if diff := cmp.Diff(before, visible(t, machine)); diff != "" {
		t.Errorf("the machine changed:\n%s", diff)
	}
}

func labLine(t *testing.T, out io.Reader) string {
	t.Helper()
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if id, ok := strings.CutPrefix(lines.Text(), "lab "); ok {
			return id
		}
	}
	t.Fatal("the other process made no lab")
	return ""
}

// visible is what a lab might leave behind: mounts, links, named namespaces.
func visible(t *testing.T, machine *Namespace) []string {
	t.Helper()
	var state []string
	if err := machine.Do(func() error {
		mounts, err := os.ReadFile("/proc/thread-self/mounts")
		state = strings.Split(string(mounts), "\n")
		for _, pattern := range []string{"/run/*", "/run/netns/*", "/sys/class/net/*", "/sys/fs/bpf/*"} {
			names, _ := filepath.Glob(pattern)
			state = append(state, names...)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return state
}

// inUse reports whether a thread of any process is in the namespace.
func inUse(id string) bool {
	links, _ := filepath.Glob("/proc/[0-9]*/task/*/ns/net")
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil && target == id {
			return true
		}
	}
	return false
}
