// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"ip-masq-agent/internal/config"
	"ip-masq-agent/internal/prefix"
)

// settings holds the config in force: the last good one, at first the
// defaults. It logs what changes and says nothing about what does not.
type settings struct {
	options config.Options
	log     *slog.Logger
	last    *reading // nil: none yet

	mu      sync.Mutex
	current view
}

// view is the config in force and the state of its file at one moment. What it
// points to is never changed.
type view struct {
	config   config.Config
	policy   *prefix.Policy
	present  bool      // the file was there when it was last good
	fault    error     // why the file as it is now was refused; nil: it is in force
	warnings []string  // about the config in force
	loaded   time.Time // when the config in force was taken; zero: none was good yet
}

func newSettings(o config.Options, log *slog.Logger) *settings {
	defaults := config.Defaults(o)
	return &settings{
		options: o,
		log:     log,
		current: view{config: defaults, policy: defaults.Policy(o.EnableIPv6)},
	}
}

func (s *settings) view() view {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

// settleTime is how long a change of the config must stand before it counts.
// Who writes a file in place empties it first, and an empty file has a meaning.
const settleTime = 50 * time.Millisecond

// reading is what reading the file gave.
type reading struct {
	result config.Result
	fault  error
}

func (r reading) equal(o reading) bool {
	if r.fault != nil || o.fault != nil {
		return r.fault != nil && o.fault != nil && r.fault.Error() == o.fault.Error()
	}
	return reflect.DeepEqual(r.result, o.result)
}

// read reads the file until it says the same twice where it says something new.
func (s *settings) read(ctx context.Context) reading {
	read := func() reading {
		result, err := config.Load(s.options)
		return reading{result: result, fault: err}
	}
	now := read()
	for try := 0; s.last != nil && !now.equal(*s.last) && try < 3; try++ {
		sleep(ctx, settleTime)
		again := read()
		if again.equal(now) {
			break
		}
		now = again
	}
	s.last = &now
	return now
}

// reload reads the file. A refused one changes nothing but the fault. It is
// called by one goroutine.
func (s *settings) reload(ctx context.Context) view {
	now := s.read(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.fault != nil {
		s.refuse(now.fault)
	} else {
		s.accept(now.result)
	}
	return s.current
}

func (s *settings) refuse(fault error) {
	old := s.current.fault
	s.current.fault = fault
	if old != nil && old.Error() == fault.Error() {
		return
	}
	enforced := "last good config"
	if s.current.loaded.IsZero() {
		enforced = "defaults"
	}
	s.log.Error("config refused", "path", s.options.Path, "enforced", enforced, "error", oneLine(fault))
}

func (s *settings) accept(result config.Result) {
	old := s.current
	s.current.fault = nil
	s.current.present = result.Present
	s.current.warnings = make([]string, 0, len(result.Warnings))
	for _, warning := range result.Warnings {
		s.current.warnings = append(s.current.warnings, warning.Error())
	}
	changed := !reflect.DeepEqual(old.config, result.Config)
	if changed {
		s.current.config = result.Config
		s.current.policy = result.Config.Policy(s.options.EnableIPv6)
	}
	if changed || old.fault != nil || old.loaded.IsZero() {
		s.current.loaded = time.Now()
	}
	s.logAccepted(old, changed)
}

func (s *settings) logAccepted(old view, changed bool) {
	source := "defaults"
	if s.current.present {
		source = s.options.Path
	}
	switch {
	case old.loaded.IsZero():
		s.log.Info("config in force", append([]any{"source", source}, summary(s.current.config)...)...)
	case changed:
		s.log.Info("config changed", append([]any{"source", source}, changes(old.config, s.current.config)...)...)
	case old.fault != nil:
		s.log.Info("config good again, nothing to change", "source", source)
	case old.present != s.current.present:
		s.log.Info("config file came or went, nothing to change", "source", source)
	}
	for _, warning := range s.current.warnings {
		if !slices.Contains(old.warnings, warning) {
			s.log.Warn("config warning", "warning", warning)
		}
	}
}

// summary describes a config for the log.
func summary(c config.Config) []any {
	return []any{
		"non_masquerade_cidrs", prefixList(c.NonMasqueradeCIDRs),
		"masquerade_cidrs", prefixList(c.MasqueradeCIDRs),
		"masq_link_local", c.MasqLinkLocal,
		"masq_link_local_ipv6", c.MasqLinkLocalIPv6,
		"resync_interval", c.ResyncInterval,
	}
}

// changes describes for the log what differs from old to now.
func changes(old, now config.Config) []any {
	var attrs []any
	lists := func(name string, old, now []netip.Prefix) {
		added, removed := without(now, old), without(old, now)
		if len(added) > 0 {
			attrs = append(attrs, name+"_added", prefixList(added))
		}
		if len(removed) > 0 {
			attrs = append(attrs, name+"_removed", prefixList(removed))
		}
		if len(added)+len(removed) == 0 && !slices.Equal(old, now) {
			attrs = append(attrs, name+"_reordered", prefixList(now))
		}
	}
	scalar := func(name string, old, now any) {
		if old != now {
			attrs = append(attrs, name, now)
		}
	}
	lists("non_masquerade_cidrs", old.NonMasqueradeCIDRs, now.NonMasqueradeCIDRs)
	lists("masquerade_cidrs", old.MasqueradeCIDRs, now.MasqueradeCIDRs)
	scalar("cidr_limit", old.CIDRLimit, now.CIDRLimit)
	scalar("masq_link_local", old.MasqLinkLocal, now.MasqLinkLocal)
	scalar("masq_link_local_ipv6", old.MasqLinkLocalIPv6, now.MasqLinkLocalIPv6)
	scalar("resync_interval", old.ResyncInterval, now.ResyncInterval)
	return attrs
}

// without is the prefixes of a that are not in b.
func without(a, b []netip.Prefix) []netip.Prefix {
	in := make(map[netip.Prefix]bool, len(b))
	for _, p := range b {
		in[p] = true
	}
	return slices.DeleteFunc(slices.Clone(a), func(p netip.Prefix) bool { return in[p] })
}

// prefixList names the first prefixes and counts the others: a log line must
// stay readable with ten thousand of them.
func prefixList(prefixes []netip.Prefix) string {
	const named = 16
	var words []string
	for _, p := range prefixes[:min(named, len(prefixes))] {
		words = append(words, p.String())
	}
	if rest := len(prefixes) - named; rest > 0 {
		words = append(words, fmt.Sprintf("and %d more", rest))
	}
	return strings.Join(words, " ")
}

// oneLine is the text of err on one line.
func oneLine(err error) string {
	return strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", "; ")
}
