// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/api"
)

const (
	// watchInterval is how often `nat list --watch` looks.
	watchInterval = time.Second
	// watchShare is how many times longer than a look the pause after it is at
	// least: a full table must not keep a CPU busy.
	watchShare = 4
)

// natEvent is a line of `nat list --watch -o json`.
type natEvent struct {
	Event string `json:"event"` // "new", "state" or "end"
	api.Translation
}

// flowKey tells translations apart.
type flowKey struct {
	proto    string
	src, dst netip.AddrPort
}

func keyOf(t api.Translation) flowKey {
	return flowKey{proto: t.Proto, src: netip.AddrPortFrom(t.Src, t.SPort), dst: netip.AddrPortFrom(t.Dst, t.DPort)}
}

// watchNAT prints what changes from one look to the next until ctx ends.
func watchNAT(ctx context.Context, lister natLister, filter agent.NATFilter, w io.Writer, format string) error {
	known := make(map[flowKey]api.Translation)
	for {
		begin := time.Now()
		flows, err := listNAT(ctx, lister, filter)
		if err != nil {
			return err
		}
		for _, event := range natEvents(known, flows) {
			if err := printNATEvent(w, format, event); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(max(watchInterval, watchShare*time.Since(begin))):
		}
	}
}

// natEvents compares with what is known, and makes flows what is known.
func natEvents(known map[flowKey]api.Translation, flows []api.Translation) []natEvent {
	var events []natEvent
	seen := make(map[flowKey]bool, len(flows))
	for _, flow := range flows {
		key := keyOf(flow)
		seen[key] = true
		switch before, ok := known[key]; {
		case !ok:
			events = append(events, natEvent{"new", flow})
		case before.NATAddr != flow.NATAddr || before.NATPort != flow.NATPort:
			events = append(events, natEvent{"end", before}, natEvent{"new", flow})
		case before.State != flow.State:
			events = append(events, natEvent{"state", flow})
		}
		known[key] = flow
	}
	var ended []api.Translation
	for key, flow := range known {
		if !seen[key] {
			ended = append(ended, flow)
			delete(known, key)
		}
	}
	slices.SortFunc(ended, compareFlows)
	for _, flow := range ended {
		events = append(events, natEvent{"end", flow})
	}
	return events
}

func printNATEvent(w io.Writer, format string, event natEvent) error {
	if format == "json" {
		return json.NewEncoder(w).Encode(event)
	}
	_, err := fmt.Fprintf(w, "%-5s  %s\n", event.Event, strings.Join(natRow(event.Translation), "  "))
	return err
}
