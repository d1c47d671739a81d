// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"

	"ip-masq-agent/internal/api"

	goiptables "github.com/coreos/go-iptables/iptables"
)

// hintChains are made by kubelet in the mangle table of the backend that the
// node uses: the first one since Kubernetes 1.24, the second one since 1.17.
func hintChains() []string { return []string{"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"} }

// choose finds the backend that the node uses and says why. Looking changes
// nothing: the legacy programs are asked only where their tables exist, since
// asking makes them.
func choose(ctx context.Context, toolFor func(mode, family) tool) (mode, api.Backend, error) {
	nftErr := usable(ctx, toolFor(nft, ipv4))
	legacyErr := installed(toolFor(legacy, ipv4))
	switch {
	case nftErr != nil && legacyErr != nil:
		return "", api.Backend{}, fmt.Errorf("find an iptables backend: %w", errors.Join(nftErr, legacyErr))
	case nftErr != nil:
		return legacy, api.Backend{Name: string(legacy), Reason: "nft cannot be used: " + nftErr.Error()}, nil
	case legacyErr != nil:
		return nft, api.Backend{Name: string(nft), Reason: "legacy cannot be used: " + legacyErr.Error()}, nil
	}
	m, reason := prefer(ctx, toolFor)
	return m, api.Backend{Name: string(m), Reason: reason}, nil
}

func prefer(ctx context.Context, toolFor func(mode, family) tool) (mode, string) {
	for _, m := range []mode{nft, legacy} {
		for _, f := range families() {
			if name := findHint(ctx, toolFor(m, f)); name != "" {
				return m, "kubelet's chain " + name + " is there"
			}
		}
	}
	nftUsed, legacyUsed := inUse(ctx, toolFor, nft), inUse(ctx, toolFor, legacy)
	switch {
	case legacyUsed && !nftUsed:
		return legacy, "its tables hold rules, those of nft hold none"
	case legacyUsed:
		return nft, "both backends hold rules and no kubelet's chain decides"
	case nftUsed:
		return nft, "its tables hold rules, those of legacy hold none"
	}
	return nft, "neither backend holds rules"
}

func findHint(ctx context.Context, t tool) string {
	if !t.registered(tableMangle) {
		return ""
	}
	for _, name := range hintChains() {
		// An error means that the family or the program is missing: no hint.
		if c, err := t.list(ctx, tableMangle, name); err == nil && c.found {
			return name
		}
	}
	return ""
}

// inUse reports whether any table of the backend holds a rule.
func inUse(ctx context.Context, toolFor func(mode, family) tool, m mode) bool {
	for _, f := range families() {
		t := toolFor(m, f)
		if len(t.tables()) == 0 && m == legacy {
			continue
		}
		out, err := t.run(ctx, "", t.program("-save"))
		if err == nil && strings.Contains(out, "\n-A ") {
			return true
		}
	}
	return false
}

// usable tells why the nft backend does not work here. Missing rights are no
// reason to take the other one.
func usable(ctx context.Context, t tool) error {
	if err := installed(t); err != nil {
		return err
	}
	if _, err := t.list(ctx, tableNAT, postrouting); isUnsupported(err) {
		return err
	}
	return nil
}

func installed(t tool) error {
	for _, suffix := range []string{"", "-restore", "-save"} {
		if _, err := exec.LookPath(t.program(suffix)); err != nil {
			return &commandError{program: t.program(suffix), err: err}
		}
	}
	return nil
}

// hasRandomFully asks the programs of a backend for their version. One that
// cannot be asked fails when it is used: until then it counts as a new one.
func hasRandomFully(t tool) bool {
	protocol := goiptables.ProtocolIPv4
	if t.family == ipv6 {
		protocol = goiptables.ProtocolIPv6
	}
	port, err := goiptables.New(goiptables.Path(t.program("")), goiptables.IPFamily(protocol), goiptables.Timeout(lockWait))
	return err != nil || port.HasRandomFully()
}

// registered reports whether asking the backend for a table leaves the kernel
// as it is. Reading never makes nft tables.
func (t tool) registered(table string) bool {
	return t.mode == nft || slices.Contains(t.tables(), table)
}

// tables are the legacy tables of the calling thread's network namespace.
func (t tool) tables() []string {
	name := "/proc/thread-self/net/ip_tables_names"
	if t.family == ipv6 {
		name = "/proc/thread-self/net/ip6_tables_names"
	}
	text, err := os.ReadFile(name)
	if err != nil { // the kernel has no legacy tables, or the module is not loaded
		return nil
	}
	return strings.Fields(string(text))
}
