// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/api"
)

// Socket is the abstract unix socket on which the agent answers commands. One
// network namespace has one such name, and so one agent.
const Socket = "@ip-masq-agent"

// Paths of the control protocol: HTTP with JSON bodies, but for lists that can be
// as long as the table. An error is a
// controlError with a status of 4xx or 5xx.
const (
	statusPath  = "/v1/status"  // GET: api.Status
	explainPath = "/v1/explain" // POST api.Question: api.Answer
	natPath     = "/v1/nat"     // GET with a NATFilter as query: gob, chunks of []api.Translation

	// GET with a NATFilter and by as query: []api.FlowCount
	natCountsPath = "/v1/nat/counts"
)

const (
	controlReadTimeout  = 5 * time.Second
	controlWriteTimeout = time.Minute // a full table is a long answer
)

type controlError struct {
	Error string `json:"error"`
}

// ErrRunning means that an agent runs in this network namespace already.
var ErrRunning = errors.New("another ip-masq-agent runs in this network namespace")

// Listen takes the socket in the network namespace of the calling thread. The
// error wraps ErrRunning if somebody has it.
func Listen(ctx context.Context, socket string) (net.Listener, error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "unix", socket)
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("%w (%s)", ErrRunning, holder(ctx, socket))
	}
	if err != nil {
		return nil, fmt.Errorf("listen on control socket: %w", err)
	}
	return listener, nil
}

// holder says who listens on the socket. Anyone may take the name, so the user
// is worth telling.
func holder(ctx context.Context, socket string) string {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", socket)
	if err != nil {
		return "which does not answer on " + socket
	}
	defer func() { _ = conn.Close() }()
	peer, err := peerOf(conn)
	if err != nil {
		return "which holds " + socket
	}
	return fmt.Sprintf("pid %d, uid %d, holds %s", peer.Pid, peer.Uid, socket)
}

// peerOf gives the credentials of the process at the other end: for a client
// those at the time of its connect, for a server those of its listen (unix(7)).
func peerOf(conn net.Conn) (*unix.Ucred, error) {
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("%T is not a unix socket", conn)
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil, err
	}
	var peer *unix.Ucred
	var optErr error
	err = raw.Control(func(fd uintptr) {
		peer, optErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	return peer, errors.Join(err, optErr)
}

// peerKey is the context key of a connection's *unix.Ucred.
type peerKey struct{}

// serveControl answers commands until ctx ends.
func (a *Agent) serveControl(ctx context.Context) {
	if a.options.Control == nil {
		return
	}
	server := &http.Server{
		Handler:           onlyRoot(a.controlHandler()),
		ReadHeaderTimeout: controlReadTimeout,
		ReadTimeout:       controlReadTimeout,
		WriteTimeout:      controlWriteTimeout,
		MaxHeaderBytes:    1 << 14,
		ErrorLog:          slog.NewLogLogger(a.options.Log.Handler(), slog.LevelDebug),
		ConnContext: func(ctx context.Context, conn net.Conn) context.Context {
			peer, err := peerOf(conn)
			if err != nil {
				return ctx // without credentials nothing is answered
			}
			return context.WithValue(ctx, peerKey{}, peer)
		},
	}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	err := server.Serve(a.options.Control)
	if endedWith(ctx, err) != nil {
		a.options.Log.Error("control socket fails, commands are not answered any more", "error", err)
	}
}

func onlyRoot(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		peer, ok := r.Context().Value(peerKey{}).(*unix.Ucred)
		if !ok || peer.Uid != 0 {
			refuse(w, http.StatusForbidden, errors.New("only root is answered"))
			return
		}
		next.ServeHTTP(w, r)
	})
}

func (a *Agent) controlHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+statusPath, func(w http.ResponseWriter, _ *http.Request) {
		status, err := a.Status()
		answer(w, http.StatusInternalServerError, status, err)
	})
	mux.HandleFunc("POST "+explainPath, func(w http.ResponseWriter, r *http.Request) {
		var question api.Question
		err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<14)).Decode(&question)
		if err != nil {
			refuse(w, http.StatusBadRequest, fmt.Errorf("read question: %w", err))
			return
		}
		explained, err := a.Explain(question)
		answer(w, http.StatusUnprocessableEntity, explained, err)
	})
	mux.HandleFunc("GET "+natPath, a.answerNAT)
	mux.HandleFunc("GET "+natCountsPath, a.answerNATCounts)
	return mux
}

func answer(w http.ResponseWriter, failure int, body any, err error) {
	if err != nil {
		refuse(w, failure, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(body) // the client went away
}

func refuse(w http.ResponseWriter, code int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(controlError{Error: err.Error()}) // the client went away
}
