// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// keepRights takes all capabilities but the named ones from this thread, which
// ends with its goroutine.
func keepRights(capabilities ...uint) error {
	runtime.LockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	for _, c := range capabilities {
		data[c/32].Effective |= 1 << (c % 32)
		data[c/32].Permitted |= 1 << (c % 32)
	}
	return unix.Capset(&header, &data[0])
}

// Without PERFMON the verifier allows less: no reading of kernel memory, no
// arithmetic on pointers that a CPU could be made to speculate about. All
// programs do with what is left, if they do not ask the kernel's structures.
func TestLoadWithoutPerfmon(t *testing.T) {
	for name := range loadContract(t).Programs {
		if name == MasqProgProbeCtinfo || name == MasqProgProbeDirect {
			continue // which is how the agent finds out
		}
		t.Run(name, func(t *testing.T) {
			s := spec(t, config{noDirect: true})
			shrink(s, config{noDirect: true})
			s.Programs = map[string]*ebpf.ProgramSpec{name: s.Programs[name]}
			done := make(chan error)
			go func() {
				if err := keepRights(unix.CAP_BPF, unix.CAP_NET_ADMIN); err != nil {
					done <- err
					return
				}
				coll, err := ebpf.NewCollection(s)
				if err == nil {
					coll.Close()
				}
				done <- err
			}()
			err := <-done
			if verifier, ok := errors.AsType[*ebpf.VerifierError](err); ok {
				t.Fatalf("%-10v", verifier)
			}
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}
