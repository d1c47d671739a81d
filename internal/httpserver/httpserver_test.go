// SPDX-License-Identifier: Apache-2.0

package httpserver

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"ip-masq-agent/internal/lab"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

func testOptions(t *testing.T, log io.Writer) Options {
	t.Helper()
	registry := prometheus.NewRegistry()
	counter := prometheus.NewCounter(prometheus.CounterOpts{Name: "tests_total", Help: "Tests."})
	registry.MustRegister(counter)
	return Options{
		Address: "127.0.0.1:0",
		Metrics: registry,
		Healthy: func() (bool, any) { return true, map[string]string{"state": "turns"} },
		Ready:   func() (bool, any) { return false, map[string][]string{"missing": {"first sync"}} },
		Log:     slog.New(slog.NewTextHandler(log, nil)),
	}
}

func TestEndpoints(t *testing.T) {
	handler := newHandler(testOptions(t, io.Discard))
	for _, test := range []struct {
		method, path string
		code         int
		body         string
	}{
		{"GET", "/metrics", 200, "# HELP tests_total Tests.\n# TYPE tests_total counter\ntests_total 0\n"},
		{"GET", "/healthz", 200, `{"state":"turns"}` + "\n"},
		{"HEAD", "/healthz", 200, `{"state":"turns"}` + "\n"}, // the server drops the body
		{"GET", "/readyz", 503, `{"missing":["first sync"]}` + "\n"},
		{"GET", "/", 404, "404 page not found\n"},
		{"POST", "/metrics", 405, "Method Not Allowed\n"},
	} {
		t.Run(test.method+test.path, func(t *testing.T) {
			answer := httptest.NewRecorder()
			handler.ServeHTTP(answer, httptest.NewRequest(test.method, test.path, nil))
			if answer.Code != test.code {
				t.Errorf("got code %d, want %d", answer.Code, test.code)
			}
			if diff := cmp.Diff(test.body, answer.Body.String()); diff != "" {
				t.Errorf("body (-want +got):\n%s", diff)
			}
		})
	}
}

func TestValidateAddress(t *testing.T) {
	for _, good := range []string{"", "0", "127.0.0.1:9613", ":9613", "[::1]:9613", "localhost:1"} {
		if err := ValidateAddress(good); err != nil {
			t.Errorf("%q: got %v, want no error", good, err)
		}
	}
	for _, bad := range []string{"9613", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:70000", "127.0.0.1:http", "::1:9613"} {
		if err := ValidateAddress(bad); err == nil {
			t.Errorf("%q: got no error", bad)
		}
	}
}

func TestOffReturnsAtOnce(t *testing.T) {
	for _, address := range []string{"", "0"} {
		o := testOptions(t, io.Discard)
		o.Address = address
		Run(t.Context(), o) // hangs if it serves
	}
}

// start runs a server and gives a function that ends it and waits for that.
func start(t *testing.T, o Options) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		Run(ctx, o)
	}()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return stop
}

func freePort(t *testing.T) (net.Listener, string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	return listener, listener.Addr().String()
}

func TestServesAndShutsDownGracefully(t *testing.T) {
	listener, address := freePort(t)
	_ = listener.Close()
	o := testOptions(t, io.Discard)
	o.Address = address
	inside, release := make(chan struct{}), make(chan struct{})
	o.Healthy = func() (bool, any) { close(inside); <-release; return true, "late" }
	stop := start(t, o)

	type result struct {
		body string
		err  error
	}
	answered := make(chan result, 1)
	go func() {
		body, err := getWhenUp("http://" + address + "/healthz")
		answered <- result{body, err}
	}()
	<-inside
	stopped := make(chan struct{})
	go func() { defer close(stopped); stop() }()
	time.Sleep(20 * time.Millisecond) // the shutdown has begun
	close(release)
	if got := <-answered; got.err != nil || got.body != "\"late\"\n" {
		t.Errorf("a request under way got %q, %v", got.body, got.err)
	}
	<-stopped
	if _, err := net.DialTimeout("tcp", address, time.Second); err == nil {
		t.Error("still listening after the end")
	}
}

func getWhenUp(url string) (string, error) {
	var err error
	for range 200 {
		var answer *http.Response
		if answer, err = http.Get(url); err == nil {
			defer answer.Body.Close()
			body, err := io.ReadAll(answer.Body)
			return string(body), err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return "", err
}

func TestPortInUseIsOneLineAndARetry(t *testing.T) {
	taken, address := freePort(t)
	var log lab.Log
	o := testOptions(t, &log)
	o.Address = address
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		run(ctx, o, time.Millisecond)
	}()
	time.Sleep(50 * time.Millisecond)
	_ = taken.Close()
	if _, err := getWhenUp("http://" + address + "/healthz"); err != nil {
		t.Errorf("not served after the port was free: %v", err)
	}
	cancel()
	<-done
	if got := strings.Count(log.String(), "level=ERROR"); got != 1 {
		t.Errorf("got %d error lines, want 1:\n%s", got, log.String())
	}
}
