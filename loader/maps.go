// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	gomaps "maps"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"ip-masq-agent/bpf"
)

// layout numbers the format of the NAT maps. A change to a key or a value in
// masq.h makes a new one.
const layout = "v1"

// linksDir is where attached programs are pinned, under the pin path.
const linksDir = "links"

// rootMaps are pinned at the pin path itself, for people to look at: their
// layout never changes. All others are in the directory of the layout.
func rootMaps() []string {
	return []string{
		bpf.MasqMapNonmasqV4, bpf.MasqMapNonmasqV6,
		bpf.MasqMapDrainingV4, bpf.MasqMapDrainingV6,
	}
}

// maps are the datapath's maps, shared by the programs of all uplinks.
type maps struct {
	bpf.MasqMaps
	byName   map[string]*ebpf.Map // to load programs with
	before   []*natMaps           // of another size, from which flows are to be taken over
	replaced uint64               // when they were copied
	types    *btf.Cache           // the kernel's, to load programs with; nil: not kept
}

// openMaps opens the pinned maps and makes those that are not there.
func openMaps(spec *ebpf.CollectionSpec, opts Options) (*maps, error) {
	layoutDir := filepath.Join(opts.PinPath, layout)
	for _, dir := range []string{layoutDir, filepath.Join(opts.PinPath, linksDir)} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("make pin directory: %w", err)
		}
	}
	dirs := make(map[string]string)
	for _, name := range rootMaps() {
		dirs[name] = opts.PinPath
	}
	begin := monotonic()
	before, err := resizeAll(spec, layoutDir, opts)
	if err != nil {
		return nil, err
	}
	m := &maps{byName: make(map[string]*ebpf.Map), before: before, replaced: begin}
	for name, mapSpec := range spec.Maps {
		dir, isRoot := dirs[name]
		if !isRoot {
			dir = layoutDir
		}
		opened, err := openMap(mapSpec, dir)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open map %s: %w", name, err), m.Close())
		}
		if opened != nil {
			m.byName[name] = opened
			mapSpec.MaxEntries = opened.MaxEntries() // programs are checked against it
		}
	}
	named := &ebpf.Collection{Maps: gomaps.Clone(m.byName)}
	if err := named.Assign(&m.MasqMaps); err != nil {
		return nil, errors.Join(fmt.Errorf("open maps: %w", err), m.Close())
	}
	return m, nil
}

// openMap opens one map. It returns nil for the sections of constants, which
// belong to each loaded program.
func openMap(spec *ebpf.MapSpec, dir string) (*ebpf.Map, error) {
	switch spec.Name {
	case ".rodata", ".data", ".bss":
		return nil, nil
	case bpf.MasqMapScratch:
		return ebpf.NewMap(spec)
	}
	spec = spec.Copy()
	spec.Pinning = ebpf.PinByName
	return ebpf.NewMapWithOptions(spec, ebpf.MapOptions{PinPath: dir})
}

// Close gives up the handles. Pinned maps stay.
func (m *maps) Close() error {
	var errs []error
	for _, opened := range m.byName {
		errs = append(errs, opened.Close())
	}
	for _, old := range m.before {
		errs = append(errs, old.Close())
	}
	return errors.Join(errs...)
}
