// SPDX-License-Identifier: Apache-2.0

// Package kernels_test holds the tests that test/kernels/run runs in every
// kernel. They run on the machine's own kernel too, as part of go test.
package kernels_test

import (
	"errors"
	"fmt"
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
// features gets them, and as this one does, and shows how many instructions
// the verifier looked at.
func TestVerifierAccepts(t *testing.T) {
	lab.New(t, lab.Options{Pods: -1, RoutedPods: -1, Conntrack: true}) // loads nf_conntrack
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	least := variant{bpf.MasqVarCfgIpv6: true}
	most := variant{
		bpf.MasqVarCfgIpv6:        true,
		bpf.MasqVarCfgRandomFully: true,
		bpf.MasqVarCfgDropInvalid: true,
		bpf.MasqVarCfgCtinfo:      accepts(t, bpf.MasqProgProbeCtinfo),
		bpf.MasqVarCfgCtLookup:    accepts(t, bpf.MasqProgProbeCtLookup),
	}
	fact(t, "ctinfo", most[bpf.MasqVarCfgCtinfo])
	fact(t, "ct_lookup", most[bpf.MasqVarCfgCtLookup])
	for _, c := range []struct {
		name, program string
		variant       variant
	}{
		{"egress_least", bpf.MasqProgMasqEgress, least},
		{"egress", bpf.MasqProgMasqEgress, most},
		{"ingress", bpf.MasqProgMasqIngress, most},
	} {
		t.Run(c.name, func(t *testing.T) {
			instructions, err := load(t, c.program, c.variant)
			if err != nil {
				t.Fatal(explain(err))
			}
			fact(t, c.name, instructions)
		})
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

// explain gives an error together with the end of what the verifier said.
func explain(err error) string {
	var refused *ebpf.VerifierError
	if !errors.As(err, &refused) {
		return err.Error()
	}
	tail := refused.Log[max(0, len(refused.Log)-shownLines):]
	return fmt.Sprintf("%v\n%s", err, strings.Join(tail, "\n"))
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
