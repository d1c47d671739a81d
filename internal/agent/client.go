// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/api"
)

// ErrNotRunning means that no agent answers in this network namespace.
var ErrNotRunning = errors.New("no ip-masq-agent runs in this network namespace")

// Client asks the running agent.
type Client struct {
	http *http.Client
}

// Dial finds the agent of this network namespace. The error is ErrNotRunning
// where there is none. Anyone may listen on an abstract socket, so that an
// agent that is not root's is refused.
func Dial(ctx context.Context, socket string) (*Client, error) {
	conn, err := dialRoot(ctx, socket)
	if err != nil {
		return nil, err
	}
	_ = conn.Close() // it has shown what it was to show
	return &Client{http: &http.Client{Transport: &http.Transport{
		DisableKeepAlives:     true,
		ResponseHeaderTimeout: controlWriteTimeout, // an agent that just starts answers when it is up
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialRoot(ctx, socket)
		},
	}}}, nil
}

func dialRoot(ctx context.Context, socket string) (net.Conn, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", socket)
	if errors.Is(err, unix.ECONNREFUSED) {
		return nil, ErrNotRunning
	}
	if err != nil {
		return nil, fmt.Errorf("connect to the agent: %w", err)
	}
	peer, err := peerOf(conn)
	if err == nil && peer.Uid != 0 {
		err = fmt.Errorf("%s is held by uid %d, which is not an agent's", socket, peer.Uid)
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// Status asks for what `status` shows.
func (c *Client) Status(ctx context.Context) (api.Status, error) {
	var status api.Status
	err := c.ask(ctx, http.MethodGet, statusPath, nil, decodeInto(&status))
	return status, err
}

// Explain asks what happens to a packet.
func (c *Client) Explain(ctx context.Context, question api.Question) (api.Answer, error) {
	body, err := json.Marshal(question)
	if err != nil {
		return api.Answer{}, fmt.Errorf("write question: %w", err)
	}
	var explained api.Answer
	err = c.ask(ctx, http.MethodPost, explainPath, bytes.NewReader(body), decodeInto(&explained))
	return explained, err
}

// NAT visits the live translations that filter matches, in no particular order.
func (c *Client) NAT(ctx context.Context, filter NATFilter, visit func(api.Translation)) error {
	return c.ask(ctx, http.MethodGet, natPath+"?"+filter.query().Encode(), nil, func(body io.Reader) error {
		return readTranslations(body, visit)
	})
}

// NATCounts asks for the numbers of live translations that filter matches, the
// highest first.
func (c *Client) NATCounts(ctx context.Context, filter NATFilter, by CountBy) ([]api.FlowCount, error) {
	query := filter.query()
	query.Set("by", string(by))
	counts := []api.FlowCount{}
	err := c.ask(ctx, http.MethodGet, natCountsPath+"?"+query.Encode(), nil, decodeInto(&counts))
	return counts, err
}

func decodeInto(v any) func(io.Reader) error {
	return func(body io.Reader) error { return json.NewDecoder(body).Decode(v) }
}

func (c *Client) ask(ctx context.Context, method, path string, body io.Reader, read func(io.Reader) error) error {
	request, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, body)
	if err != nil {
		return fmt.Errorf("ask the agent: %w", err)
	}
	response, err := c.http.Do(request)
	if err != nil {
		return fmt.Errorf("ask the agent: %w", err)
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		var refused controlError
		if err := json.NewDecoder(response.Body).Decode(&refused); err != nil || refused.Error == "" {
			return fmt.Errorf("ask the agent: %s", response.Status)
		}
		return errors.New(refused.Error)
	}
	if err := read(response.Body); err != nil {
		return fmt.Errorf("read the agent's answer: %w", err)
	}
	return nil
}
