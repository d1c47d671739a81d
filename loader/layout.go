// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"

	"ip-masq-agent/bpf"
)

// layoutNumber numbers the shapes of the maps in the directory of the layout.
// Whoever changes one, a key, a value or the size of an array, gives them the
// next number, and adds the format of the flows to formats if it is theirs that
// changed.
const (
	layoutNumber = 1
	layout       = "v1"
)

// format reads the flows of a layout as if they were of this one.
type format struct {
	v4 func(flows *ebpf.Map, visit func(*bpf.MasqTupleV4, *bpf.MasqMappingV4)) error
	v6 func(flows *ebpf.Map, visit func(*bpf.MasqTupleV6, *bpf.MasqMappingV6)) error
}

func currentFormat() format {
	return format{
		v4: scan[bpf.MasqTupleV4, bpf.MasqMappingV4],
		v6: scan[bpf.MasqTupleV6, bpf.MasqMappingV6],
	}
}

// formats are those of older layouts, by number. There is none yet.
func formats() map[int]format { return nil }

// olderMaps is the directory of an older layout.
type olderMaps struct {
	number int
	dir    string
}

// olderLayouts finds the directories of older layouts, the newest first. What a
// newer agent has left is an error: its flows cannot be read, and they live.
func olderLayouts(pinPath string) ([]olderMaps, error) {
	entries, err := os.ReadDir(pinPath)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("look for other layouts: %w", err)
	}
	var older []olderMaps
	for _, e := range entries {
		number, ok := layoutOf(e)
		dir := filepath.Join(pinPath, e.Name())
		if !ok || number == layoutNumber || !hasFiles(dir) {
			continue
		}
		if number > layoutNumber {
			return nil, fmt.Errorf("%s has the translations of a newer ip-masq-agent (layout %d, this one reads up to %d): "+
				"run that version again, or end them with its `ip-masq-agent cleanup`", dir, number, layoutNumber)
		}
		older = append(older, olderMaps{number: number, dir: dir})
	}
	slices.SortFunc(older, func(a, b olderMaps) int { return b.number - a.number })
	return older, nil
}

func layoutOf(e fs.DirEntry) (number int, ok bool) {
	text, ok := strings.CutPrefix(e.Name(), "v")
	number, err := strconv.Atoi(text)
	return number, ok && err == nil && e.IsDir()
}

func hasFiles(dir string) bool {
	entries, err := os.ReadDir(dir)
	return err == nil && len(entries) > 0
}

// adopt pins the maps of older layouts that have the shape of today in the
// directory of today's, too: old and new programs then share them. The two maps
// of a family's flows go together, or not at all.
func adopt(spec *ebpf.CollectionSpec, pinPath string, older []olderMaps) error {
	for _, from := range older {
		for _, is6 := range []bool{false, true} {
			flows, reverse := flowMaps(is6)
			if !fits(spec.Maps[flows], from.dir) || !fits(spec.Maps[reverse], from.dir) {
				continue
			}
			if err := adoptMaps(spec, pinPath, from, flows, reverse); err != nil {
				return err
			}
		}
		if err := adoptMaps(spec, pinPath, from, alone(spec, pinPath)...); err != nil {
			return err
		}
	}
	return nil
}

// alone are the maps of a layout that need no other one.
func alone(spec *ebpf.CollectionSpec, pinPath string) (names []string) {
	for name := range spec.Maps {
		isNAT := strings.HasPrefix(name, "flows_") || strings.HasPrefix(name, "reverse_")
		if !isNAT && filepath.Dir(pinOf(pinPath, name)) == filepath.Join(pinPath, layout) {
			names = append(names, name)
		}
	}
	return names
}

// fits reports whether a map of the shape of today is pinned in dir.
func fits(spec *ebpf.MapSpec, dir string) bool {
	m, err := openPin(spec, filepath.Join(dir, spec.Name))
	if m != nil {
		m.Close()
	}
	return m != nil && err == nil
}

func adoptMaps(spec *ebpf.CollectionSpec, pinPath string, from olderMaps, names ...string) error {
	for _, name := range names {
		if err := adoptMap(spec.Maps[name], filepath.Join(from.dir, name), pinOf(pinPath, name)); err != nil {
			return fmt.Errorf("take over %s of layout %d: %w", name, from.number, err)
		}
	}
	return nil
}

func adoptMap(spec *ebpf.MapSpec, from, to string) error {
	if _, err := os.Lstat(to); err == nil {
		return nil
	}
	m, err := openPin(spec, from)
	if _, other := errors.AsType[*PinError](err); other || m == nil && err == nil {
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(pinAgain(m, to), m.Close())
}

// pinAgain pins a map at a place without moving the pin that it was opened by.
func pinAgain(m *ebpf.Map, at string) error {
	clone, err := m.Clone()
	if err != nil {
		return err
	}
	return errors.Join(clone.Pin(at), clone.Close())
}

// openOlder opens the flows of older layouts, to be taken over, and makes room
// for them. With an error it gives those that it had opened.
func openOlder(spec *ebpf.CollectionSpec, older []olderMaps, formats map[int]format) (all []*natMaps, err error) {
	for _, from := range older {
		for _, is6 := range []bool{false, true} {
			old, err := openNATMaps(from.dir, is6)
			if err != nil {
				return all, fmt.Errorf("open layout %d: %w", from.number, err)
			}
			if old == nil {
				continue
			}
			all = append(all, old)
			if err := old.readable(spec, from, formats); err != nil {
				return all, err
			}
			flows, reverse := flowMaps(is6)
			room := max(spec.Maps[flows].MaxEntries, old.flows.MaxEntries())
			spec.Maps[flows].MaxEntries, spec.Maps[reverse].MaxEntries = room, room
		}
	}
	return all, nil
}

// readable finds the format of the flows. They have today's if their shape is
// today's, and are even the same map then, unless its size has changed.
func (n *natMaps) readable(spec *ebpf.CollectionSpec, from olderMaps, formats map[int]format) error {
	flows, _ := flowMaps(n.is6)
	if shapeOf(n.flows) == shape(spec.Maps[flows]) {
		return nil
	}
	known, ok := formats[from.number]
	if !ok {
		return fmt.Errorf("%s is of an older ip-masq-agent (layout %d) than this one can take over from: update in smaller steps, "+
			"or end its translations with `ip-masq-agent cleanup`", from.dir, from.number)
	}
	n.format = known
	return nil
}

// removeOlder removes the directories of older layouts, when their flows have
// been taken over.
func (d *Datapath) removeOlder() error {
	for _, from := range d.maps.older {
		if err := removeFrom(from.dir, isMapPin(d.spec)); err != nil {
			return fmt.Errorf("remove layout %d: %w", from.number, err)
		}
		d.log.Info("translations of an older layout taken over", "from", from.number, "to", layoutNumber)
	}
	d.maps.older = nil
	return nil
}
