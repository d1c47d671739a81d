// SPDX-License-Identifier: Apache-2.0

// Package kernels_test holds the tests that test/kernels/run runs in every
// kernel. They run on the machine's own kernel too, as part of go test.
package kernels_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/lab"
)

// shownLines of a verifier's log are enough to see what it refused, and why.
const shownLines = 60

// variant is what the programs are loaded for: constants of theirs.
type variant map[string]bool

// TestVerifierAccepts loads the programs as a kernel without the optional
// features gets them, and as this one does.
func TestVerifierAccepts(t *testing.T) {
	lab.New(t, lab.Options{Pods: -1, RoutedPods: -1, Conntrack: true}) // loads nf_conntrack
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	least := variant{"cfg_ipv6": true}
	most := variant{
		"cfg_ipv6":         true,
		"cfg_random_fully": true,
		"cfg_drop_invalid": true,
		"cfg_ctinfo":       accepts(t, bpf.MasqProgProbeCtinfo),
		"cfg_ct_lookup":    accepts(t, bpf.MasqProgProbeCtLookup),
	}
	fact(t, "ctinfo", most["cfg_ctinfo"])
	fact(t, "ct_lookup", most["cfg_ct_lookup"])
	for _, program := range []string{bpf.MasqProgMasqEgress, bpf.MasqProgMasqIngress} {
		t.Run(program+"/least", func(t *testing.T) { mustLoad(t, program, least) })
		t.Run(program+"/most", func(t *testing.T) { mustLoad(t, program, most) })
	}
	for _, program := range []string{bpf.MasqProgSweepV4, bpf.MasqProgSweepV6} {
		t.Run(program, func(t *testing.T) { mustLoad(t, program, nil) })
	}
}

// accepts says whether the kernel loads a program that probes for a feature.
func accepts(t *testing.T, program string) bool {
	t.Helper()
	_, err := load(t, program, nil)
	if err != nil {
		t.Logf("%s: %v", program, err)
	}
	return err == nil
}

func mustLoad(t *testing.T, program string, v variant) {
	t.Helper()
	instructions, err := load(t, program, v)
	var refused *ebpf.VerifierError
	if errors.As(err, &refused) {
		tail := refused.Log[max(0, len(refused.Log)-shownLines):]
		t.Fatalf("%v\n%s", err, strings.Join(tail, "\n"))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the verifier looked at %d instructions", instructions)
}

// load loads one program and returns how many instructions the verifier looked
// at: 0 on kernels before 5.16, which do not say.
func load(t *testing.T, program string, v variant) (uint32, error) {
	t.Helper()
	spec, err := bpf.LoadMasq()
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range v {
		if err := spec.Variables[name].Set(value); err != nil {
			t.Fatal(err)
		}
	}
	spec.Programs = map[string]*ebpf.ProgramSpec{program: spec.Programs[program]}
	collection, err := ebpf.NewCollection(spec)
	if err != nil {
		return 0, err
	}
	defer collection.Close()
	info, err := collection.Programs[program].Info()
	if err != nil {
		t.Fatal(err)
	}
	instructions, _ := info.VerifiedInstructions()
	return instructions, nil
}

// fact logs what test/kernels/run shows in the line of the kernel.
func fact(t *testing.T, name string, value any) {
	t.Helper()
	t.Logf("FACT %s=%v", name, value)
}
