// SPDX-License-Identifier: Apache-2.0

// Package httpserver serves /metrics, /healthz and /readyz. Nothing that goes
// wrong here stops the agent.
package httpserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

const (
	retryInterval = 5 * time.Second // between attempts to listen
	shutdownGrace = 2 * time.Second // for requests under way when the server ends

	readTimeout  = 5 * time.Second  // for a request, which has no body to speak of
	writeTimeout = 30 * time.Second // for a scrape over a slow link
	idleTimeout  = 2 * time.Minute  // longer than the usual scrape interval
)

// Check tells whether something is well and says so in body, which is shown as
// JSON. It is called from many goroutines.
type Check func() (ok bool, body any)

// Options of a server.
type Options struct {
	Address string              // host:port; empty or "0": no server
	Metrics prometheus.Gatherer // what /metrics shows
	Healthy Check               // 200 or 503 of /healthz
	Ready   Check               // 200 or 503 of /readyz
	Log     *slog.Logger
}

// Off reports whether address is one that turns the server off.
func Off(address string) bool { return address == "" || address == "0" }

// ValidateAddress tells whether address can be listened on: host:port, where
// the host may be empty, or one that turns the server off.
func ValidateAddress(address string) error {
	if Off(address) {
		return nil
	}
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("port %q is not a number from 1 to 65535", port)
	}
	return nil
}

// Run serves until ctx ends. An address that cannot be listened on is logged
// once, until the reason changes, and tried again for ever.
func Run(ctx context.Context, o Options) { run(ctx, o, retryInterval) }

func run(ctx context.Context, o Options, retry time.Duration) {
	if Off(o.Address) {
		return
	}
	handler := newHandler(o)
	logged := ""
	for ctx.Err() == nil {
		err := serve(ctx, o.Address, handler, o.Log)
		if err != nil && err.Error() != logged {
			logged = err.Error()
			o.Log.Error("metrics and health are not served, trying again",
				"address", o.Address, "error", err, "retry_interval", retry)
		}
		select {
		case <-ctx.Done():
		case <-time.After(retry):
		}
	}
}

// serve listens and serves until ctx ends, which gives nil, or until the
// listener fails.
func serve(ctx context.Context, address string, handler http.Handler, log *slog.Logger) error {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", address)
	if err != nil {
		return ignoreAfter(ctx, err)
	}
	log.Info("serving metrics and health", "address", listener.Addr())
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: readTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	select {
	case err := <-ended:
		return fmt.Errorf("serve %s: %w", address, err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownGrace)
	defer cancel()
	if err := server.Shutdown(grace); errors.Is(err, context.DeadlineExceeded) {
		_ = server.Close() // what is still open has had its time
	}
	return nil
}

// ignoreAfter is err while ctx lives: what fails because the agent ends is no
// failure.
func ignoreAfter(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func newHandler(o Options) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(o.Metrics, promhttp.HandlerOpts{
		ErrorLog:      slog.NewLogLogger(o.Log.Handler(), slog.LevelError),
		ErrorHandling: promhttp.ContinueOnError, // half a page beats none
	}))
	mux.HandleFunc("GET /healthz", checkHandler(o.Healthy))
	mux.HandleFunc("GET /readyz", checkHandler(o.Ready))
	return mux
}

func checkHandler(check Check) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		ok, body := check()
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		if !ok {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(body) // the client went away
	}
}
