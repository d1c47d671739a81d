// SPDX-License-Identifier: Apache-2.0

package kernels_test

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/lab"
	"ip-masq-agent/loader"
)

// TestRights takes one capability away at a time. Where it is missed, the agent
// names it; where this kernel does without, the datapath starts.
func TestRights(t *testing.T) {
	if os.Getenv("KERNEL_GUEST") != "true" {
		return // it takes the right to lift limits again
	}
	n := &node{Lab: lab.New(t, lab.Options{Pods: 1, RoutedPods: -1})}
	for _, test := range []struct {
		name       string
		capability int
		missed     bool
	}{
		{"BPF", unix.CAP_BPF, true},
		{"PERFMON", unix.CAP_PERFMON, !loadsWithoutPerfmon(t)},
		{"SYS_RESOURCE", unix.CAP_SYS_RESOURCE, mapsAreLocked(t)},
	} {
		t.Run(test.name, func(t *testing.T) {
			lockMemory(t)
			all := []int{unix.CAP_NET_ADMIN, unix.CAP_NET_RAW, unix.CAP_BPF, unix.CAP_PERFMON, unix.CAP_SYS_RESOURCE}
			rest := slices.DeleteFunc(all, func(c int) bool { return c == test.capability })
			err := n.tryWith(t, func() error { return limitThread(rest...) })
			if test.missed {
				wantUnsupported(t, err, test.name)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
}

// runtimeDefault is what matters of the profile that container runtimes give
// whoever asks for none, where there is AppArmor.
const runtimeDefault = `
profile runtime-default flags=(attach_disconnected, mediate_deleted) {
	network,
	capability,
	file,
	deny mount,
	deny /sys/fs/[^c]*/** wklx,
}
`

// TestAppArmor holds why the manifests of ebpf ask for no profile, and that an
// agent that has one says so. Of the iptables datapath nothing is in its way.
func TestAppArmor(t *testing.T) {
	if os.Getenv("KERNEL_GUEST") != "true" {
		return // it would leave the profile in this machine's kernel
	}
	load := exec.Command("apparmor_parser", "--replace", "--skip-cache")
	load.Stdin = strings.NewReader(runtimeDefault)
	if said, err := load.CombinedOutput(); err != nil {
		t.Fatalf("load the profile: %v: %s", err, said)
	}
	n := &node{Lab: lab.New(t, lab.Options{Pods: 1, RoutedPods: -1})}
	err := n.tryWith(t, func() error {
		if err := os.WriteFile("/proc/thread-self/attr/current", []byte("changeprofile runtime-default"), 0); err != nil {
			t.Error(err)
		}
		if said, err := exec.Command("iptables-nft", "-w", "-t", "nat", "-N", "CONFINED").CombinedOutput(); err != nil {
			t.Errorf("iptables: %v: %s", err, said)
		}
		return nil
	})
	wantUnsupported(t, err, "AppArmor")
	if err := n.tryWith(t, func() error { return nil }); err != nil {
		t.Errorf("without the profile: %v", err)
	}
}

// tryWith starts the datapath on a thread that limit has taken rights from and
// that ends with them, and takes it away again.
func (n *node) tryWith(t *testing.T, limit func() error) error {
	t.Helper()
	err := n.Node.Do(func() error {
		if err := limit(); err != nil {
			t.Error(err)
		}
		d, err := loader.New(options(t))
		if err != nil {
			return err
		}
		return d.Close()
	})
	if err := n.Node.Do(func() error { return loader.Cleanup(options(t)) }); err != nil {
		t.Errorf("clean up: %v", err)
	}
	return err
}

func wantUnsupported(t *testing.T, err error, what string) {
	t.Helper()
	if _, ok := errors.AsType[*loader.UnsupportedError](err); !ok || !strings.Contains(err.Error(), what) {
		t.Errorf("it says %v, want what names %s", err, what)
	}
}

// lockMemory gives the process the limit of a container until the test ends.
func lockMemory(t *testing.T) {
	t.Helper()
	limit := func(most uint64) {
		t.Helper()
		if err := unix.Prlimit(0, unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: most, Max: most}, nil); err != nil {
			t.Fatal(err)
		}
	}
	limit(64 << 10)
	t.Cleanup(func() { limit(unix.RLIM_INFINITY) })
}
