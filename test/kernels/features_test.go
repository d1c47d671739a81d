// SPDX-License-Identifier: Apache-2.0

package kernels_test

import (
	"errors"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/lab"
	"ip-masq-agent/internal/route"
	"ip-masq-agent/loader"
)

// TestFeatures shows what of this kernel makes a difference, and holds that
// docs/kernels.md has a row for each. test/kernels/run compares the values.
func TestFeatures(t *testing.T) {
	n := &node{Lab: lab.New(t, lab.Options{Pods: 1, RoutedPods: -1, Conntrack: true})}
	n.start(t)
	status, err := n.datapath.Status()
	if err != nil {
		t.Fatal(err)
	}
	found := [][2]string{{"programs are attached by", status.Interfaces[0].Attach}}
	optional := strings.TrimPrefix(status.Backend.Reason, "--datapath=ebpf; ")
	for feature := range strings.SplitSeq(optional, ", ") {
		name, value, _ := strings.Cut(feature, ": ")
		found = append(found, [2]string{name, value})
	}
	found = append(found,
		[2]string{"maps count as locked memory", yesIf(mapsAreLocked(t))},
		[2]string{"iptables-nft", yesIf(n.hasBackend(t, "nft"))},
		[2]string{"iptables-legacy", yesIf(n.hasBackend(t, "legacy"))},
	)
	n.stop(t)
	found = append(found,
		[2]string{"drains without CAP_BPF", yesIf(n.drainsWithoutBPF(t))},
		[2]string{"runs without CAP_PERFMON", yesIf(loadsWithoutPerfmon(t))},
	)
	n.cleanUp(t)
	found = append(found, [2]string{"fast path", yesIf(n.offersFastPath(t))})

	page, err := os.ReadFile("../../docs/kernels.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range found {
		if row[0] == "" || row[1] == "" {
			t.Errorf("a feature without name or value: %q", row)
		}
		t.Logf("FEATURE %s: %s", row[0], row[1])
		if !strings.Contains(string(page), "\n| "+row[0]+" | ") {
			t.Errorf("docs/kernels.md lacks %q: UPDATE=1 test/kernels/run writes it", row[0])
		}
	}
}

func yesIf(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// drainsWithoutBPF has the datapath end with the rights of the iptables one, on
// a thread that ends with them.
func (n *node) drainsWithoutBPF(t *testing.T) bool {
	t.Helper()
	err := n.Node.Do(func() error {
		tracker, err := route.NewTracker(route.Options{Log: options(t).Log})
		if err != nil {
			return err
		}
		defer tracker.Close()
		if err := limitThread(unix.CAP_NET_ADMIN, unix.CAP_NET_RAW); err != nil {
			return err
		}
		_, err = loader.Drain(options(t), tracker.Snapshot())
		return err
	})
	if err != nil && !errors.Is(err, os.ErrPermission) {
		t.Errorf("drain without CAP_BPF: %v", err)
	}
	return err == nil
}

// offersFastPath reports whether the datapath takes the option.
func (n *node) offersFastPath(t *testing.T) bool {
	t.Helper()
	opts := options(t)
	opts.FastPath = true
	err := n.Node.Do(func() error {
		d, err := loader.New(opts)
		if err != nil {
			return err
		}
		return errors.Join(d.Close(), loader.Cleanup(opts))
	})
	if _, unsupported := errors.AsType[*loader.UnsupportedError](err); err != nil && !unsupported {
		t.Errorf("start with the fast path: %v", err)
	}
	return err == nil
}

// loadsWithoutPerfmon loads the programs on a thread that ends with its rights.
func loadsWithoutPerfmon(t *testing.T) bool {
	t.Helper()
	spec := contract(t)
	loaded := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := limitThread(unix.CAP_BPF, unix.CAP_NET_ADMIN); err != nil {
			loaded <- err
			return
		}
		collection, err := ebpf.NewCollection(spec)
		if err == nil {
			collection.Close()
		}
		loaded <- err
	}()
	return <-loaded == nil
}

// limitThread leaves this thread no capabilities but those.
func limitThread(capabilities ...int) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	for _, c := range capabilities {
		sets[c/32].Effective |= 1 << (c % 32)
		sets[c/32].Permitted |= 1 << (c % 32)
	}
	return unix.Capset(&header, &sets[0])
}

// mapsAreLocked reports whether a map needs RLIMIT_MEMLOCK, as before 5.11.
func mapsAreLocked(t *testing.T) bool {
	t.Helper()
	var before unix.Rlimit
	if err := unix.Prlimit(0, unix.RLIMIT_MEMLOCK, nil, &before); err != nil {
		t.Fatal(err)
	}
	if err := unix.Prlimit(0, unix.RLIMIT_MEMLOCK, &unix.Rlimit{Max: before.Max}, nil); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Prlimit(0, unix.RLIMIT_MEMLOCK, &before, nil); err != nil {
			t.Error(err)
		}
	}()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1 << 12})
	if err == nil {
		return m.Close() != nil
	}
	if !errors.Is(err, unix.EPERM) {
		t.Errorf("make a map: %v", err)
	}
	return true
}

// hasBackend makes and removes a nat chain.
func (n *node) hasBackend(t *testing.T, backend string) bool {
	t.Helper()
	for _, action := range []string{"-N", "-X"} {
		if _, err := n.Node.Run(t.Context(), "iptables-"+backend, "-w", "-t", "nat", action, "FEATURES"); err != nil {
			return false
		}
	}
	return true
}
