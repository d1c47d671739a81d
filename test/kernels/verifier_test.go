// SPDX-License-Identifier: Apache-2.0

// Package kernels_test holds the tests that test/kernels/run runs in every
// kernel. They run on the machine's own kernel too, as part of go test.
package kernels_test

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"ip-masq-agent/bpf"
)

// shownLines of a verifier's log are enough to see what it refused, and why.
const shownLines = 60

// TestVerifierAccepts loads the programs without what kernels or an agent's
// rights may lack. How this kernel gets them by default, TestDatapath shows.
// Trap 31 is the verifier's: it refuses a pointer into a packet that a helper may
// have moved since.
func TestVerifierAccepts(t *testing.T) {
	collection, err := ebpf.NewCollection(contract(t))
	if err != nil {
		t.Fatal(explain(err))
	}
	collection.Close()
}

// contract is what an uplink's programs are loaded from.
func contract(t *testing.T) *ebpf.CollectionSpec {
	t.Helper()
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	spec, err := bpf.LoadMasq()
	if err != nil {
		t.Fatal(err)
	}
	if err := spec.Variables[bpf.MasqVarCfgIpv6].Set(true); err != nil {
		t.Fatal(err)
	}
	maps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool {
		return name != bpf.MasqProgMasqEgress && name != bpf.MasqProgMasqIngress
	})
	return spec
}

// explain gives an error together with the end of what the verifier said.
func explain(err error) string {
	var refused *ebpf.VerifierError
	if !errors.As(err, &refused) {
		return err.Error()
	}
	tail := refused.Log[max(0, len(refused.Log)-shownLines):]
	return fmt.Sprintf("%v\n%s", err, strings.Join(tail, "\n"))
}

// showPrograms shows how many instructions the verifier looked at when the
// programs were loaded last. Before 5.16 the kernel does not say.
func showPrograms(t *testing.T) {
	t.Helper()
	looked := make(map[string]uint32)
	for id := ebpf.ProgramID(0); ; {
		var err error
		if id, err = ebpf.ProgramGetNextID(id); err != nil {
			break
		}
		program, err := ebpf.NewProgramFromID(id)
		if err != nil {
			continue // gone meanwhile
		}
		info, err := program.Info()
		program.Close()
		if err != nil {
			t.Fatal(err)
		}
		if n, ok := info.VerifiedInstructions(); ok {
			looked[info.Name] = n
		}
	}
	for _, name := range []string{bpf.MasqProgMasqEgress, bpf.MasqProgMasqIngress} {
		if n, ok := looked[name]; ok {
			fact(t, "%s: %d instructions", name, n)
		}
	}
}

// fact logs what test/kernels/run shows in the line of the kernel.
func fact(t *testing.T, format string, args ...any) {
	t.Helper()
	t.Logf("FACT "+format, args...)
}
