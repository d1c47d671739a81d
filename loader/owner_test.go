// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/lab"
)

// elsewhere runs f in a network namespace of its own that has the node's mounts.
func (n *node) elsewhere(f func() error) {
	n.t.Helper()
	n.do(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// Two network namespaces with one bpffs: the second agent takes nothing from the
// first, and nobody cleans up behind the other's back.
func TestPinsOfAnotherNetworkNamespace(t *testing.T) {
	opts := testOptions4(t)
	n := newNode(t, lab.Options{}, opts)
	conn := n.dial("tcp", n.serve("tcp", n.Remote.V4))
	before := n.everything()
	n.elsewhere(func() error {
		_, err := New(opts)
		if owner, ok := errors.AsType[*OwnerError](err); !ok || owner.Path != testPinPath || owner.Owner == owner.Own {
			t.Errorf("a second agent: %v", err)
		}
		if err := Cleanup(opts); err == nil || !strings.Contains(err.Error(), "_ingress is attached there") && !strings.Contains(err.Error(), "_egress is attached there") {
			t.Errorf("cleanup: %v", err)
		}
		if _, found, err := Inspect(opts); found || err != nil {
			t.Errorf("inspect: %t, %v", found, err)
		}
		return nil
	})
	n.stop()
	if got := n.everything(); got != before {
		t.Errorf("before\n%s\nafter\n%s", before, got)
	}
	n.goesOn(conn)

	n.run("ip", "link", "del", "eth0") // as all links go with their namespace
	n.elsewhere(func() error { return Cleanup(opts) })
	n.do(func() error {
		if _, err := os.Stat(testPinPath); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("cleanup of what nobody has: %v", err)
		}
		return nil
	})
}
