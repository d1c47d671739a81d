// SPDX-License-Identifier: Apache-2.0

package kernels_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"ip-masq-agent/internal/lab"
	"ip-masq-agent/loader"
)

// TestFastPath has flows take the fast path, or holds that a kernel without what
// it needs refuses it and names that.
func TestFastPath(t *testing.T) {
	n := &node{Lab: lab.New(t, lab.Options{Pods: 1, RoutedPods: -1})}
	attach := n.start(t).Interfaces[0].Attach
	n.stop(t)
	opts := options(t)
	opts.FastPath = true
	if attach != "tcx" {
		n.refuses(t, opts)
		return
	}
	n.startWith(t, opts)
	n.openFlows(t)
	n.takesFastPath(t)
	n.checkNoDrops(t)
	n.stop(t)
	n.cleanUp(t)
}

func (n *node) refuses(t *testing.T, opts loader.Options) {
	t.Helper()
	err := n.Node.Do(func() error {
		d, err := loader.New(opts)
		if err == nil {
			err = d.Close()
		}
		return err
	})
	unsupported, ok := errors.AsType[*loader.UnsupportedError](err)
	if !ok {
		t.Fatalf("got %v, want it refused", err)
	}
	for _, missing := range unsupported.Missing {
		if !strings.HasPrefix(missing, "--fast-path: ") {
			t.Errorf("missing %q", missing)
		}
	}
	fact(t, "no fast path")
}

// takesFastPath has flows go on until packets of theirs took it both ways.
func (n *node) takesFastPath(t *testing.T) {
	t.Helper()
	const patience = 2 * time.Minute // an emulated machine seldom answers within the second that a way is good for
	flows := n.openFlows(t)
	for end := time.Now().Add(patience); ; {
		continueFlows(t, flows, "on the fast path")
		if err := n.Node.Do(func() error { return n.sync(t) }); err != nil {
			t.Fatal(err)
		}
		status, err := n.datapath.Status()
		if err != nil {
			t.Fatal(err)
		}
		if p := status.FastPath; p.Packets > 0 && len(p.Interfaces) == 1 {
			fact(t, "fast path from %s", p.Interfaces[0])
			return
		}
		if time.Now().After(end) {
			t.Fatalf("fast path %+v after %v", status.FastPath, patience)
		}
	}
}
