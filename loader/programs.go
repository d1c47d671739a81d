// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"

	"github.com/cilium/ebpf"

	"ip-masq-agent/bpf"
)

// Clang is the version of the compiler that made the programs.
const Clang = bpf.Clang

// loadPrograms loads the named programs with the shared maps and the given
// constants. The verifier's own words are in the error if it refuses.
func loadPrograms(spec *ebpf.CollectionSpec, m *maps, constants map[string]any, names ...string) (map[string]*ebpf.Program, error) {
	spec = spec.Copy()
	wanted := make(map[string]*ebpf.ProgramSpec)
	for _, name := range names {
		wanted[name] = spec.Programs[name]
	}
	spec.Programs = wanted
	for name, value := range constants {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("set %s: %w", name, err)
		}
	}
	collection, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: m.byName, Cache: m.types})
	if err != nil {
		return nil, fmt.Errorf("load programs: %w", err)
	}
	defer collection.Close()
	programs := make(map[string]*ebpf.Program)
	for _, name := range names {
		programs[name] = collection.DetachProgram(name)
	}
	return programs, nil
}

// constants are what the programs of the uplink in slot are loaded with.
func (d *Datapath) constants(slot uint32) map[string]any {
	return map[string]any{
		bpf.MasqVarCfgSlot:        slot,
		bpf.MasqVarCfgIpv6:        d.opts.IPv6 || d.ending6,
		bpf.MasqVarCfgRandomFully: d.opts.RandomFully,
		bpf.MasqVarCfgDropInvalid: d.opts.DropInvalid,
		bpf.MasqVarCfgTcpLoose:    d.loose,
		bpf.MasqVarCfgCoarseClock: d.features.CoarseClock,
		bpf.MasqVarCfgDirect:      d.features.Direct,
		bpf.MasqVarCfgCtinfo:      d.features.CTInfo,
		bpf.MasqVarCfgCtLookup:    d.features.CTLookup,
		bpf.MasqVarCfgFastPath:    d.opts.FastPath,
	}
}
