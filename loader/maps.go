// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	gomaps "maps"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

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
	byName map[string]*ebpf.Map // to load programs with
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
	m := &maps{byName: make(map[string]*ebpf.Map)}
	for name, mapSpec := range spec.Maps {
		dir, isRoot := dirs[name]
		if !isRoot {
			dir = layoutDir
		}
		opened, err := openMap(mapSpec, dir, opts)
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
func openMap(spec *ebpf.MapSpec, dir string, opts Options) (*ebpf.Map, error) {
	spec = spec.Copy()
	switch spec.Name {
	case ".rodata", ".data", ".bss":
		return nil, nil
	case bpf.MasqMapScratch:
		return ebpf.NewMap(spec)
	case bpf.MasqMapFlowsV4, bpf.MasqMapFlowsV6, bpf.MasqMapReverseV4, bpf.MasqMapReverseV6:
		spec.MaxEntries = uint32(opts.NATTableSize)
		if err := resize(spec, filepath.Join(dir, spec.Name)); err != nil {
			return nil, err
		}
	}
	spec.Pinning = ebpf.PinByName
	return ebpf.NewMapWithOptions(spec, ebpf.MapOptions{PinPath: dir})
}

// Close gives up the handles. Pinned maps stay.
func (m *maps) Close() error {
	var errs []error
	for _, opened := range m.byName {
		errs = append(errs, opened.Close())
	}
	return errors.Join(errs...)
}

// resize replaces the map that is pinned at path, if it has another size than
// spec, by a copy of the size of spec. If its entries do not fit, it stays as
// it is and spec gets its size: no live flow dies for a smaller table.
func resize(spec *ebpf.MapSpec, path string) error {
	old, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open pinned map: %w", err)
	}
	defer old.Close()
	if old.MaxEntries() == spec.MaxEntries {
		return nil
	}
	resized, err := ebpf.NewMap(spec)
	if err != nil {
		return fmt.Errorf("make map of %d entries: %w", spec.MaxEntries, err)
	}
	defer resized.Close()
	err = copyEntries(old, resized)
	if errors.Is(err, unix.E2BIG) {
		spec.MaxEntries = old.MaxEntries()
		return nil
	}
	if err != nil {
		return err
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("unpin the map of %d entries: %w", old.MaxEntries(), err)
	}
	if err := resized.Pin(path); err != nil {
		return fmt.Errorf("pin the map of %d entries: %w", spec.MaxEntries, err)
	}
	return nil
}

func copyEntries(from, to *ebpf.Map) error {
	var key, value []byte
	entries := from.Iterate()
	for entries.Next(&key, &value) {
		if err := to.Put(key, value); err != nil {
			return fmt.Errorf("copy entries: %w", err)
		}
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("copy entries: %w", err)
	}
	return nil
}
