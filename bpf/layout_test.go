// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

func loadContract(t *testing.T) *ebpf.CollectionSpec {
	t.Helper()
	spec, err := contract()
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

func enum(t *testing.T, name string) *btf.Enum {
	t.Helper()
	var found *btf.Enum
	if err := loadContract(t).Types.TypeByName(name, &found); err != nil {
		t.Fatalf("enum %s: %v", name, err)
	}
	return found
}

// The kernel cuts longer names, and nobody finds the map by what is left.
func TestMapNamesAreShortEnough(t *testing.T) {
	const limit = 15 // BPF_OBJ_NAME_LEN without its end
	for name := range loadContract(t).Maps {
		if len(name) > limit && !strings.HasPrefix(name, ".") {
			t.Errorf("map %s: %d characters, want at most %d", name, len(name), limit)
		}
	}
}

// Each fate has one name and one number, and a place in the counters.
func TestVerdictsAreNumberedWithoutGaps(t *testing.T) {
	names := map[uint64]string{}
	var drops []string
	for _, value := range enum(t, "verdict").Values {
		switch value.Name {
		case "VERDICT_COUNT", "VERDICT_DROP_FIRST":
			continue
		}
		if other, ok := names[value.Value]; ok {
			t.Errorf("%s and %s are both %d", other, value.Name, value.Value)
		}
		names[value.Value] = value.Name
		drop := strings.HasPrefix(value.Name, "VERDICT_DROP_")
		if drop != (value.Value >= uint64(MasqVerdictVERDICT_DROP_FIRST)) {
			t.Errorf("%s is %d, drops begin at %d", value.Name, value.Value, MasqVerdictVERDICT_DROP_FIRST)
		}
		if drop {
			drops = append(drops, value.Name)
		}
	}
	for verdict := range uint64(MasqVerdictVERDICT_COUNT) {
		if names[verdict] == "" {
			t.Errorf("verdict %d has no name", verdict)
		}
	}
	if len(names) != int(MasqVerdictVERDICT_COUNT) {
		t.Errorf("%d verdicts, want %d", len(names), MasqVerdictVERDICT_COUNT)
	}
	want := []string{
		"VERDICT_DROP_PORT_EXHAUSTED", "VERDICT_DROP_TABLE_FULL", "VERDICT_DROP_FRAGMENT",
		"VERDICT_DROP_INVALID", "VERDICT_DROP_UNSUPPORTED", "VERDICT_DROP_NO_ADDRESS",
	}
	if !slices.Equal(drops, want) {
		t.Errorf("reasons to drop: %v, want %v: they are in the metrics' interface", drops, want)
	}
	const counters = uint32(MasqDirectionDIRECTION_COUNT) * uint32(MasqFamilyFAMILY_COUNT) * uint32(MasqVerdictVERDICT_COUNT)
	if got := loadContract(t).Maps[MasqMapCounters].MaxEntries; got != counters {
		t.Errorf("%d counters, want %d", got, counters)
	}
}

// What pinned maps of this layout hold (trap 70: no padding that nobody sees). A size that changes needs a new layout
// number, or the agent that comes after reads nonsense.
func TestSizesOfKeysAndValues(t *testing.T) {
	want := map[string][2]uint32{
		MasqMapNonmasqV4:   {8, 4},
		MasqMapNonmasqV6:   {20, 4},
		MasqMapDrainingV4:  {8, 8},
		MasqMapDrainingV6:  {20, 8},
		MasqMapFlowsV4:     {16, 48},
		MasqMapFlowsV6:     {40, 64},
		MasqMapReverseV4:   {16, 8},
		MasqMapReverseV6:   {40, 20},
		MasqMapInboundV4:   {16, 8},
		MasqMapInboundV6:   {40, 8},
		MasqMapFragmentsV4: {16, 16},
		MasqMapFragmentsV6: {40, 16},
		MasqMapTalkersV4:   {12, 24},
		MasqMapTalkersV6:   {36, 32},
		MasqMapWaysV4:      {16, 64},
		MasqMapWaysV6:      {40, 64},
		MasqMapPodLinks:    {4, 8},
		MasqMapFastPath:    {4, 24},
		MasqMapUplinks:     {4, 32},
		MasqMapSticky:      {4, 16},
		MasqMapMoved:       {4, 8},
		MasqMapAddressesV4: {12, 4},
		MasqMapAddressesV6: {24, 16},
		MasqMapNodeV4:      {4, 4},
		MasqMapNodeV6:      {16, 4},
		MasqMapPortPool:    {4, 24 + 8192 + 131072},
		MasqMapTimeouts:    {4, 4},
		MasqMapAttempts:    {4, 8},
		MasqMapCounters:    {4, 16},
	}
	sizes := loadContract(t).Maps
	for _, name := range slices.Sorted(maps.Keys(want)) {
		m := sizes[name]
		if m == nil {
			t.Errorf("no map %s", name)
			continue
		}
		if got := [2]uint32{m.KeySize, m.ValueSize}; got != want[name] {
			t.Errorf("%s: key and value of %v octets, want %v", name, got, want[name])
		}
	}
	for name := range sizes {
		if _, ok := want[name]; !ok && !strings.HasPrefix(name, ".") && name != MasqMapScratch && name != MasqMapEvents {
			t.Errorf("map %s is not held to a size here", name)
		}
	}
}

// Go's types are as large as C's: what is written is what is read.
func TestSizesInGo(t *testing.T) {
	for name, value := range map[string]any{
		"tuple_v4": MasqTupleV4{}, "tuple_v6": MasqTupleV6{}, "mapping_v4": MasqMappingV4{}, "mapping_v6": MasqMappingV6{},
		"reverse_v4": MasqReverseV4{}, "reverse_v6": MasqReverseV6{}, "inbound": MasqInbound{},
		"fragment_key_v4": MasqFragmentKeyV4{}, "fragment_key_v6": MasqFragmentKeyV6{}, "fragment": MasqFragment{},
		"talker_key_v4": MasqTalkerKeyV4{}, "talker_key_v6": MasqTalkerKeyV6{},
		"talker_v4": MasqTalkerV4{}, "talker_v6": MasqTalkerV6{}, "uplink": MasqUplink{}, "sticky": MasqSticky{},
		"address_rule_v4": MasqAddressRuleV4{}, "address_rule_v6": MasqAddressRuleV6{},
		"cidr_v4": MasqCidrV4{}, "cidr_v6": MasqCidrV6{}, "port_pool": MasqPortPool{}, "counter": MasqCounter{},
		"sweep_request": MasqSweepRequest{}, "event": MasqEvent{},
	} {
		var found *btf.Struct
		if err := loadContract(t).Types.TypeByName(name, &found); err != nil {
			t.Errorf("struct %s: %v", name, err)
			continue
		}
		if got := binary.Size(value); got != int(found.Size) {
			t.Errorf("struct %s: %d octets in Go, %d in C", name, got, found.Size)
		}
	}
}

// The verifier's work on each program, everything on: what grew by a quarter
// will not load on an old kernel one day, and should be seen before.
func TestInstructionCeilings(t *testing.T) {
	ceilings := map[string]uint32{
		MasqProgMasqEgress:    43000,
		MasqProgMasqIngress:   17500,
		MasqProgMasqFastPath:  9000,
		MasqProgSweepV4:       1700,
		MasqProgSweepV6:       1700,
		MasqProgProbeDirect:   50,
		MasqProgProbeCtinfo:   50,
		MasqProgProbeGuarded:  50,
		MasqProgProbeCtLookup: 50,
	}
	s := spec(t, config{ctinfo: true, ctLookup: true, fastPath: true})
	shrink(s, config{})
	coll, err := ebpf.NewCollection(s)
	if err != nil {
		t.Fatalf("load: %+v", err)
	}
	defer coll.Close()
	for name, program := range coll.Programs {
		info, err := program.Info()
		if err != nil {
			t.Fatal(err)
		}
		verified, ok := info.VerifiedInstructions()
		if !ok {
			t.Fatalf("%s: the kernel does not tell what it verified", name)
		}
		ceiling, ok := ceilings[name]
		if !ok || verified > ceiling {
			t.Errorf("%s: %d instructions verified, want at most %d", name, verified, ceiling)
		}
	}
}
