// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	gomaps "maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"ip-masq-agent/bpf"
)

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

// ownMaps are of one process: what is in them is good for a second at most.
func ownMaps() []string {
	return []string{bpf.MasqMapScratch, bpf.MasqMapWaysV4, bpf.MasqMapWaysV6, bpf.MasqMapPodLinks}
}

// maps are the datapath's maps, shared by the programs of all uplinks.
type maps struct {
	bpf.MasqMaps
	byName   map[string]*ebpf.Map // to load programs with
	before   []*natMaps           // of another size or layout, from which flows are to be taken over
	replaced uint64               // when they were copied
	older    []olderMaps          // layouts, which go when their flows have been taken over
	types    *btf.Cache           // the kernel's, to load programs with; nil: not kept
}

// openMaps opens the pinned maps and makes those that are not there. What an
// agent of an older layout left is taken over.
func openMaps(spec *ebpf.CollectionSpec, opts Options) (*maps, error) {
	older, err := olderLayouts(opts.PinPath)
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{layout, linksDir} {
		if err := os.MkdirAll(filepath.Join(opts.PinPath, dir), 0o700); err != nil {
			return nil, fmt.Errorf("make pin directory: %w", err)
		}
	}
	m := &maps{byName: make(map[string]*ebpf.Map), replaced: monotonic(), older: older}
	if err := m.open(spec, opts); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

func (m *maps) open(spec *ebpf.CollectionSpec, opts Options) (err error) {
	if !opts.FastPath {
		spec.Maps[bpf.MasqMapWaysV4].MaxEntries, spec.Maps[bpf.MasqMapWaysV6].MaxEntries = 1, 1
	}
	if err := checkPins(spec, opts.PinPath); err != nil {
		return err
	}
	if err := adopt(spec, opts.PinPath, m.older); err != nil {
		return err
	}
	if m.before, err = resizeAll(spec, filepath.Join(opts.PinPath, layout), opts); err != nil {
		return err
	}
	older, err := openOlder(spec, m.older, opts.formats)
	m.before = append(m.before, older...)
	if err != nil {
		return err
	}
	for name, mapSpec := range spec.Maps {
		opened, err := openMap(mapSpec, pinOf(opts.PinPath, name))
		if err != nil {
			return fmt.Errorf("open map %s: %w", name, err)
		}
		if opened != nil {
			m.byName[name] = opened
			mapSpec.MaxEntries = opened.MaxEntries() // programs are checked against it
		}
	}
	named := &ebpf.Collection{Maps: gomaps.Clone(m.byName)}
	if err := named.Assign(&m.MasqMaps); err != nil {
		return fmt.Errorf("open maps: %w", err)
	}
	for _, old := range older {
		if err := m.natMaps(old.is6).takeOver(old, 0); err != nil {
			return err
		}
	}
	return nil
}

// pinOf is where a map is pinned. Empty: it is of one program or process.
func pinOf(pinPath, name string) string {
	switch {
	case strings.HasPrefix(name, "."), slices.Contains(ownMaps(), name):
		return ""
	case slices.Contains(rootMaps(), name):
		return filepath.Join(pinPath, name)
	}
	return filepath.Join(pinPath, layout, name)
}

// openMap opens one map, or makes it. It returns nil for the sections of
// constants, which belong to each loaded program.
func openMap(spec *ebpf.MapSpec, pin string) (*ebpf.Map, error) {
	if strings.HasPrefix(spec.Name, ".") {
		return nil, nil
	}
	if pin == "" {
		return ebpf.NewMap(spec)
	}
	if m, err := openPin(spec, pin); err != nil || m != nil {
		return m, err
	}
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, err
	}
	if err := m.Pin(pin); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
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
