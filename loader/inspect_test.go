// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/lab"
)

// inspect looks at the node without its agent.
func (n *node) inspect() (status api.DatapathStatus, flows []api.Translation, found bool) {
	n.t.Helper()
	opts := Options{PinPath: testPinPath}
	n.do(func() (err error) {
		if status, found, err = Inspect(opts); err != nil {
			return err
		}
		flows = []api.Translation{}
		_, err = InspectTranslations(opts, func(t api.Translation) { flows = append(flows, t) })
		return err
	})
	return status, flows, found
}

func compareAddrs(a, b netip.Addr) bool { return a == b }

// withoutTimes leaves out what changes from one look to the next.
func withoutTimes(list []api.Translation) []api.Translation {
	for i := range list {
		list[i].IdleSeconds, list[i].ExpiresSeconds = 0, 0
	}
	return list
}

// What is told without an agent is what the agent told.
func TestInspect(t *testing.T) {
	for attach, noTCX := range attachments() {
		t.Run(attach, func(t *testing.T) {
			opts := testOptions(t)
			opts.noTCX = noTCX
			n := newNode(t, lab.Options{SecondUplink: true}, opts) // eth0 has several addresses, eth1 one
			for _, is6 := range []bool{false, true} {
				n.translates("tcp", is6)
				n.translates("udp", is6)
			}
			told, flows := n.status(), withoutTimes(n.translations())
			told.Backend.Reason = "pinned under " + testPinPath
			n.stop()

			before := openFiles(t)
			status, left, found := n.inspect()
			if after := openFiles(t); after != before {
				t.Errorf("%d open files before, %d after", before, after)
			}
			if diff := cmp.Diff(told, status, cmp.Comparer(compareAddrs)); diff != "" || !found {
				t.Errorf("found %t (-agent +kernel):\n%s", found, diff)
			}
			if diff := cmp.Diff(flows, withoutTimes(left), cmp.Comparer(compareAddrs)); diff != "" || len(flows) != 4 {
				t.Errorf("flows (-agent +kernel):\n%s", diff)
			}
			n.cleanup(opts)
			if status, left, found := n.inspect(); found || len(left) > 0 {
				t.Errorf("after cleanup: %+v, %+v", status, left)
			}
		})
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(files)
}

func TestInspectFindsFaults(t *testing.T) {
	opts := testOptions4(t)
	n := newNode(t, lab.Options{Pods: -1, RoutedPods: -1, SecondUplink: true}, opts)
	n.stop()
	warns := func(want ...string) {
		t.Helper()
		status, _, found := n.inspect()
		if !found || len(status.Warnings) != len(want) {
			t.Errorf("found %t, warnings %q, want %q", found, status.Warnings, want)
		}
		for _, w := range want {
			if !slices.ContainsFunc(status.Warnings, func(got string) bool { return strings.Contains(got, w) }) {
				t.Errorf("warnings %q, want %q", status.Warnings, w)
			}
		}
	}
	warns()
	n.attachForeign(ebpf.AttachTCXEgress, link.Head())
	const ahead = "another TC program comes before ours on eth0 egress"
	warns(ahead)
	n.run("ip", "link", "del", "eth1")
	const gone = "programs are pinned for an interface that is gone, number "
	warns(ahead, gone)
	n.do(func() error { return os.Remove(testPinPath + "/" + layout + "/" + bpf.MasqMapFlowsV4) })
	const missing = bpf.MasqMapFlowsV4 + " is missing"
	warns(ahead, gone, missing, "eth0 has no usable IPv4 address")
	n.start(opts) // mends
	n.stop()
	warns(ahead)
	n.do(func() error {
		return os.Remove(linkPin(testPinPath, n.Uplinks[0].Index, directions()[1]))
	})
	warns("program masq_egress is not attached to eth0 any more")
	if status, _, _ := n.inspect(); status.Interfaces[0].Attach != "" {
		t.Errorf("status %+v", status)
	}
}

// withoutRights runs f on the node with no capability.
func (n *node) withoutRights(f func() error) error {
	return n.Node.Do(func() error {
		// Of this thread alone, which ends with the function.
		const nobody = 65534
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody); errno != 0 {
			return errno
		}
		return f()
	})
}

// Programs are found attached by filters, without the right to open links: a link
// that is not there is not one that is forbidden.
func TestHookWithoutRights(t *testing.T) {
	n := &node{Lab: lab.New(t, lab.Options{Pods: -1, RoutedPods: -1}), t: t}
	err := n.withoutRights(func() error {
		h, err := pinnedHook("/no_such_pin")
		if err == nil && h.kind() != "tc" {
			t.Errorf("a hook by %s", h.kind())
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

func TestInspectWithoutRights(t *testing.T) {
	opts := testOptions4(t)
	n := newNode(t, lab.Options{Pods: -1, RoutedPods: -1}, opts)
	err := n.withoutRights(func() error {
		_, _, err := Inspect(Options{PinPath: testPinPath})
		return err
	})
	if err == nil || !strings.Contains(err.Error(), "not permitted, it takes root with the capabilities BPF and NET_ADMIN") {
		t.Errorf("got %v", err)
	}
}
