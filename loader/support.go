// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	gomaps "maps"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	ebpffeatures "github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
)

// UnsupportedError says what the kernel or the agent's rights lack.
type UnsupportedError struct {
	Missing []string // one line each, with what to do
}

func (e *UnsupportedError) Error() string {
	return "the eBPF datapath cannot run here: " + strings.Join(e.Missing, "; ")
}

// constantsMap has the constants that programs are loaded with.
const constantsMap = ".rodata"

// features are what the programs use where the kernel has it.
type features struct {
	// Direct: packets are readable without a call for each header (with
	// CAP_PERFMON: the place is computed, which a CPU may be made to do wrong).
	Direct bool
	// CTInfo: a packet's conntrack state is readable (6.2, with CAP_PERFMON).
	CTInfo bool
	// CTLookup: conntrack can be asked for a tuple (5.18, with nf_conntrack
	// loaded).
	CTLookup bool
	// CoarseClock: the time of the last tick can be read (5.11).
	CoarseClock bool
}

// String is for people: what makes a difference to them.
func (f features) String() string {
	return fmt.Sprintf("direct packet access: %s, conntrack state of packets: %s, conntrack lookup: %s",
		yesNo(f.Direct), yesNo(f.CTInfo), yesNo(f.CTLookup))
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// checkKernel names everything without which no program could run.
func checkKernel() []string {
	var missing []string
	check := func(what string, err error) {
		if err == nil || errors.Is(err, unix.EBUSY) {
			return
		}
		if errors.Is(err, unix.EPERM) {
			err = errors.New("not permitted; the container needs the capabilities BPF, NET_ADMIN and PERFMON, kernels before 5.8 SYS_ADMIN")
		}
		missing = append(missing, fmt.Sprintf("%s: %v", what, err))
	}
	check("BPF programs of type sched_cls", ebpffeatures.HaveProgramType(ebpf.SchedCLS))
	if len(missing) > 0 {
		return missing
	}
	for _, t := range []ebpf.MapType{ebpf.LPMTrie, ebpf.Hash, ebpf.LRUHash, ebpf.PerCPUArray, ebpf.RingBuf} {
		check(fmt.Sprintf("BPF maps of type %s", t), ebpffeatures.HaveMapType(t))
	}
	for _, fn := range []asm.BuiltinFunc{
		asm.FnFibLookup, asm.FnSkcLookupTcp, asm.FnSkLookupUdp, asm.FnSpinLock, asm.FnL4CsumReplace, asm.FnCsumUpdate,
		asm.FnRingbufOutput,
	} {
		check(fmt.Sprintf("BPF helper %s", fn), ebpffeatures.HaveProgramHelper(ebpf.SchedCLS, fn))
	}
	if _, err := os.Stat("/sys/kernel/btf/vmlinux"); err != nil {
		check("kernel type information (CONFIG_DEBUG_INFO_BTF)", err)
	}
	return missing
}

// isTracking reports whether nf_conntrack is loaded. That may happen at any time,
// and some kernels can be asked for connections only from then on.
func isTracking() bool {
	_, err := os.Stat("/proc/sys/net/netfilter/nf_conntrack_max")
	return err == nil
}

// isLoose reports whether conntrack picks up TCP connections in the middle, as
// it does by default.
func isLoose() bool {
	text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_tcp_loose")
	return err != nil || strings.TrimSpace(string(text)) != "0"
}

// syncFeatures probes again when nf_conntrack has come or gone, and replaces the
// programs if that, or what conntrack was told, makes a difference.
func (d *Datapath) syncFeatures() error {
	now, tracking, loose := d.features, isTracking(), isLoose()
	if tracking != d.tracking {
		now = probe(d.spec, nil)
	}
	if now != d.features || loose != d.loose {
		d.features, d.loose = now, loose
		d.log.Info("kernel features changed", "features", now, "nf_conntrack_tcp_loose", loose)
		for _, u := range d.uplinks {
			if err := d.replacePrograms(u); err != nil {
				return fmt.Errorf("%s: %w", u.Name, err)
			}
		}
	}
	d.tracking = tracking
	return nil
}

// probe finds out by loading whether optional parts of the programs work.
func probe(spec *ebpf.CollectionSpec, types *btf.Cache) features {
	return features{
		Direct:   loads(spec, types, bpf.MasqProgProbeDirect),
		CTInfo:   loads(spec, types, bpf.MasqProgProbeCtinfo),
		CTLookup: loads(spec, types, bpf.MasqProgProbeCtLookup),

		CoarseClock: ebpffeatures.HaveProgramHelper(ebpf.SchedCLS, asm.FnKtimeGetCoarseNs) == nil,
	}
}

// checkPerfmon says so if the capability PERFMON is missing, and fails where the
// programs cannot do without.
func (d *Datapath) checkPerfmon(types *btf.Cache) error {
	switch {
	case d.features.Direct:
		return nil
	case !loads(d.spec, types, bpf.MasqProgProbeGuarded):
		return &UnsupportedError{Missing: []string{"the capability PERFMON, which the verifier of this kernel asks for"}}
	}
	d.log.Warn("the capability PERFMON is missing: each packet costs more, and what conntrack says of it cannot be read")
	return nil
}

// loads tries a program that uses no map, with direct packet access on and all
// else that is constant off.
func loads(spec *ebpf.CollectionSpec, types *btf.Cache, program string) bool {
	alone := spec.Copy()
	gomaps.DeleteFunc(alone.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return name != program })
	gomaps.DeleteFunc(alone.Maps, func(name string, _ *ebpf.MapSpec) bool { return name != constantsMap })
	if err := alone.Variables[bpf.MasqVarCfgDirect].Set(true); err != nil {
		return false
	}
	collection, err := ebpf.NewCollectionWithOptions(alone, ebpf.CollectionOptions{
		Programs: ebpf.ProgramOptions{LogDisabled: true}, Cache: types,
	})
	if err != nil {
		return false
	}
	collection.Close()
	return true
}
