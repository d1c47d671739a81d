// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/api"
)

// socketFor is a name of its own for each test.
func socketFor(t *testing.T) string {
	return fmt.Sprintf("@ip-masq-agent-test-%d-%s", os.Getpid(), t.Name())
}

// requireRoot fails where the answer of the kernel would be another one.
func requireRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() == 0 {
		return
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("root is needed")
	}
	t.Skip("root is needed")
}

// serveBench runs the agent with its control socket.
func serveBench(t *testing.T, socket string) *bench {
	t.Helper()
	listener, err := Listen(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	b := newBench(t, func(o *Options) { o.Control = listener })
	b.datapath.name = EBPF
	b.network.paths = testPaths()
	b.datapath.status = api.DatapathStatus{
		Backend:    api.Backend{Name: "tcx", Reason: "the kernel has it"},
		Interfaces: []api.Interface{{Name: "eth0", Attach: "tcx", SNATv4: netip.MustParseAddr("192.0.2.1")}},
		NAT:        api.NAT{V4: api.Table{Entries: 1, Capacity: 2}},
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return b
}

func TestControlSocketAnswers(t *testing.T) {
	requireRoot(t)
	socket := socketFor(t)
	b := serveBench(t, socket)
	client, err := Dial(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	status, err := client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if status.Version != "v1.2.3" || status.Datapath != EBPF || status.Backend.Name != "tcx" || !status.Config.Valid || status.Config.Path != b.file {
		t.Errorf("got status %+v", status)
	}
	explained, err := client.Explain(t.Context(), api.Question{Dst: netip.MustParseAddr("8.8.8.8")})
	if err != nil || explained.Verdict != "masquerade" || explained.SNATAddress != netip.MustParseAddr("192.0.2.1") {
		t.Errorf("got explanation %+v, %v", explained, err)
	}
	_, err = client.Explain(t.Context(), api.Question{Dst: netip.MustParseAddr("203.0.113.1")})
	if err == nil || err.Error() != "find the route to 203.0.113.1: network is unreachable" {
		t.Errorf("got error %v, want the agent's own text", err)
	}
}

func TestControlSocketFiltersTranslations(t *testing.T) {
	requireRoot(t)
	socket := socketFor(t)
	b := serveBench(t, socket)
	flow := func(proto, src, dst string) api.Translation {
		return api.Translation{Family: 4, Proto: proto, Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr(dst), State: "established"}
	}
	b.datapath.flows = []api.Translation{
		flow("tcp", "10.244.0.1", "8.8.8.8"), flow("udp", "10.244.0.1", "8.8.4.4"), flow("tcp", "10.244.1.1", "9.9.9.9"),
	}
	client, err := Dial(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		filter NATFilter
		want   []int
	}{
		{NATFilter{}, []int{0, 1, 2}},
		{NATFilter{Proto: "TCP"}, []int{0, 2}},
		{NATFilter{Src: netip.MustParsePrefix("10.244.0.0/24")}, []int{0, 1}},
		{NATFilter{Dst: netip.MustParsePrefix("8.8.4.4/32")}, []int{1}},
		{NATFilter{Src: netip.MustParsePrefix("10.244.1.0/24"), Proto: "udp"}, nil},
	} {
		want := []api.Translation{}
		for _, i := range test.want {
			want = append(want, b.datapath.flows[i])
		}
		got := []api.Translation{}
		if err := client.NAT(t.Context(), test.filter, func(t api.Translation) { got = append(got, t) }); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", test.filter, diff)
		}
	}
}

func TestControlSocketCountsTranslations(t *testing.T) {
	requireRoot(t)
	socket := socketFor(t)
	b := serveBench(t, socket)
	flow := func(proto, src, dst string, port uint16) api.Translation {
		return api.Translation{Proto: proto, Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr(dst), DPort: port}
	}
	b.datapath.flows = []api.Translation{
		flow("tcp", "10.244.0.2", "8.8.8.8", 443), flow("tcp", "10.244.0.1", "8.8.8.8", 443), flow("icmp", "10.244.0.2", "9.9.9.9", 0),
		flow("udp", "10.244.0.2", "8.8.8.8", 443), flow("udp", "10.244.1.1", "8.8.8.8", 53),
	}
	client, err := Dial(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	filter := NATFilter{Src: netip.MustParsePrefix("10.244.0.0/24")}
	for by, want := range map[CountBy]string{
		ByPod: `[{"src":"10.244.0.2","flows":3},{"src":"10.244.0.1","flows":1}]`,
		ByDestination: `[{"proto":"tcp","dst":"8.8.8.8","dport":443,"flows":2},{"proto":"udp","dst":"8.8.8.8","dport":443,"flows":1},` +
			`{"proto":"icmp","dst":"9.9.9.9","flows":1}]`,
	} {
		counts, err := client.NATCounts(t.Context(), filter, by)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := json.Marshal(counts); err != nil || string(got) != want {
			t.Errorf("by %s: got %s, %v; want %s", by, got, err, want)
		}
	}
	if _, err := client.NATCounts(t.Context(), filter, "colour"); err == nil || !strings.Contains(err.Error(), ErrCountBy.Error()) {
		t.Errorf("by colour: got %v", err)
	}
}

// A list that ends early is no list.
func TestHalfAListIsAnError(t *testing.T) {
	var page bytes.Buffer
	w := &translationWriter{out: bufio.NewWriter(&page)}
	w.encoder = gob.NewEncoder(w.out)
	for range natChunk + 1 {
		w.add(api.Translation{Proto: "tcp", Src: netip.MustParseAddr("10.0.0.1")})
	}
	w.end()
	whole := page.Bytes()
	visited := 0
	count := func(api.Translation) { visited++ }
	if err := readTranslations(bytes.NewReader(whole), count); err != nil || visited != natChunk+1 {
		t.Errorf("the whole: %d, %v", visited, err)
	}
	for _, length := range []int{0, len(whole) / 2, len(whole) - 1} {
		if err := readTranslations(bytes.NewReader(whole[:length]), count); err == nil {
			t.Errorf("%d of %d bytes: no error", length, len(whole))
		}
	}
}

func TestStatusListsAreNeverNull(t *testing.T) {
	b := newBench(t)
	if err := b.Once(t.Context()); err != nil { // so that there is nothing to warn of
		t.Fatal(err)
	}
	status, err := b.Status()
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(status)
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range []string{`"interfaces":[]`, `"masquerade_cidrs":[]`, `"warnings":[]`} {
		if !strings.Contains(string(text), list) {
			t.Errorf("no %s in %s", list, text)
		}
	}
}

func TestSecondAgentIsRefused(t *testing.T) {
	socket := socketFor(t)
	listener, err := Listen(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	_, err = Listen(t.Context(), socket)
	want := fmt.Sprintf("another ip-masq-agent runs in this network namespace (pid %d, uid %d, holds %s)", os.Getpid(), os.Getuid(), socket)
	if !errors.Is(err, ErrRunning) || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestDialWithoutAgent(t *testing.T) {
	if _, err := Dial(t.Context(), socketFor(t)); !errors.Is(err, ErrNotRunning) {
		t.Errorf("got %v, want %v", err, ErrNotRunning)
	}
}

// asNobody runs f on a thread that is not root, which then dies.
func asNobody(t *testing.T, f func()) {
	t.Helper()
	done := make(chan unix.Errno)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		const nobody = 65534
		// The raw call changes this thread alone; the wrapper would change all.
		_, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody)
		if errno == 0 {
			f()
		}
		done <- errno
	}()
	if errno := <-done; errno != 0 {
		t.Fatal(errno)
	}
}

func TestOnlyRootIsAnswered(t *testing.T) {
	requireRoot(t)
	socket := socketFor(t)
	serveBench(t, socket)
	for _, path := range []string{statusPath, natPath, "/"} {
		asNobody(t, func() {
			conn, err := net.Dial("unix", socket)
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: agent\r\n\r\n", path); err != nil {
				t.Error(err)
				return
			}
			response, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Error(err)
				return
			}
			body, _ := io.ReadAll(response.Body)
			if response.StatusCode != http.StatusForbidden || string(body) != `{"error":"only root is answered"}`+"\n" {
				t.Errorf("%s: got %d %s, want 403", path, response.StatusCode, body)
			}
		})
	}
}

func TestFalseAgentIsNotBelieved(t *testing.T) {
	requireRoot(t)
	socket := socketFor(t)
	asNobody(t, func() {
		listener, err := net.Listen("unix", socket)
		if err != nil {
			t.Error(err)
			return
		}
		t.Cleanup(func() { _ = listener.Close() })
	})
	if _, err := Dial(t.Context(), socket); err == nil || !strings.Contains(err.Error(), "uid 65534") {
		t.Errorf("got %v, want a refusal that names the user", err)
	}
	if _, err := Listen(t.Context(), socket); err == nil || !strings.Contains(err.Error(), "uid 65534") {
		t.Errorf("got %v, want an error that names the user", err)
	}
}

func TestParseAddressOrPrefix(t *testing.T) {
	for text, want := range map[string]string{
		"10.0.0.1": "10.0.0.1/32", "10.0.0.1/8": "10.0.0.0/8", "fd00::1": "fd00::1/128", "::ffff:10.0.0.1": "10.0.0.1/32",
	} {
		if got, err := ParseAddressOrPrefix(text); err != nil || got.String() != want {
			t.Errorf("%s: got %v, %v, want %s", text, got, err, want)
		}
	}
	for _, text := range []string{"", "x", "10.0.0.0/33", "10.0.0"} {
		if got, err := ParseAddressOrPrefix(text); err == nil {
			t.Errorf("%q: got %v, want an error", text, got)
		}
	}
}
