// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
)

// Cleanup removes all that the datapath made: programs, filters, the qdiscs
// that were added for them, maps, the pin directory and the mount, and nothing
// else that is there. It does nothing where nothing is, and works where half of
// it is missing.
func Cleanup(opts Options) error {
	foreign, err := isForeign(opts.PinPath)
	if err != nil {
		return err
	}
	if !foreign { // else the numbers of links are not those of today's
		if err := errors.Join(detachPodLinks(opts.PinPath), detachAll(opts.PinPath)); err != nil {
			return err
		}
	}
	if err := removePins(opts.PinPath); err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	return unmountBPFFS(opts.PinPath)
}

// removePins removes what has the name of something of ours, and the
// directories that are empty then. A path that is not the agent's own, by
// mistake, keeps all else.
func removePins(path string) error {
	if on, err := onBPFFS(path); err != nil || !on {
		return err
	}
	spec, err := bpf.LoadMasq()
	if err != nil {
		return fmt.Errorf("read programs: %w", err)
	}
	layouts, err := filepath.Glob(filepath.Join(path, "v*"))
	if err != nil {
		return err
	}
	for _, dir := range layouts {
		if err := removeFrom(dir, isMapPin(spec)); err != nil {
			return err
		}
	}
	for _, is := range []struct {
		dir  string
		ours func(name string) bool
	}{
		{linksDir, isLinkPin},
		{"", isMapPin(spec)},
		{"", func(name string) bool { return name == ownerLink }},
	} {
		if err := removeFrom(filepath.Join(path, is.dir), is.ours); err != nil {
			return err
		}
	}
	return nil
}

func isMapPin(spec *ebpf.CollectionSpec) func(name string) bool {
	return func(name string) bool { return spec.Maps[strings.TrimSuffix(name, nextSuffix)] != nil }
}

func isLinkPin(name string) bool {
	index, suffix, _ := strings.Cut(name, "_")
	_, err := strconv.Atoi(index)
	return err == nil && slices.ContainsFunc(append(directions(), secondIngress(), fromPods()), func(d direction) bool { return d.suffix == suffix })
}

// removeFrom removes files from a directory, and the directory if it is empty
// then.
func removeFrom(dir string, ours func(name string) bool) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	left := false
	for _, e := range entries {
		if e.IsDir() || !ours(e.Name()) {
			left = left || isPin(e)
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if left {
		return nil
	}
	err = os.Remove(dir)
	if errors.Is(err, unix.EBUSY) || errors.Is(err, os.ErrNotExist) {
		return nil // the mount goes next
	}
	return err
}

// detachAll takes our programs from every link that shows one: by the slots,
// the pins, or the names of filters.
func detachAll(pinPath string) error {
	served, err := servedLinks(pinPath)
	if err != nil {
		return err
	}
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list links: %w", err)
	}
	for _, l := range links {
		index := l.Attrs().Index
		if served[index].Flags != 0 {
			continue
		}
		// The map may be gone, or its pin: what the filters use tells, too.
		if served[index], err = usedByFilters(index); err != nil {
			return err
		}
	}
	var errs []error
	for _, value := range served {
		errs = append(errs, detach(pinPath, value))
	}
	return errors.Join(errs...)
}

// usedByFilters is the slot of a link in the map that our filters there use,
// with the interface index alone if there are none, or without SYS_ADMIN.
func usedByFilters(index int) (bpf.MasqUplink, error) {
	value := bpf.MasqUplink{Ifindex: uint32(index)}
	for _, dir := range directions() {
		filters, err := listFilters(index, dir)
		if err != nil {
			return value, err
		}
		for _, f := range filters {
			if !isOurs(f, dir) {
				continue
			}
			slots, err := slotsOf(ebpf.ProgramID(f.(*netlink.BpfFilter).Id))
			if err != nil && !errors.Is(err, os.ErrPermission) {
				return value, fmt.Errorf("look at filter %s: %w", dir.program, err)
			}
			if slot, ok := slots[index]; ok {
				return slot, nil
			}
		}
	}
	return value, nil
}

// slotsOf reads the uplinks of the datapath that a program belongs to.
func slotsOf(id ebpf.ProgramID) (map[int]bpf.MasqUplink, error) {
	slots := make(map[int]bpf.MasqUplink)
	program, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return nil, err
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil {
		return nil, err
	}
	ids, _ := info.MapIDs()
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			return nil, err
		}
		var read error
		if info, err := m.Info(); err == nil && info.Name == bpf.MasqMapUplinks {
			read = readSlots(m, func(_ uint32, value bpf.MasqUplink) { slots[int(value.Ifindex)] = value })
		}
		if err := errors.Join(read, m.Close()); err != nil {
			return nil, err
		}
	}
	return slots, nil
}

// servedLinks reads by interface index which links have our programs.
func servedLinks(pinPath string) (map[int]bpf.MasqUplink, error) {
	served := make(map[int]bpf.MasqUplink)
	pins, err := os.ReadDir(filepath.Join(pinPath, linksDir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list pinned links: %w", err)
	}
	for _, pin := range pins {
		text, suffix, _ := strings.Cut(pin.Name(), "_")
		if index, err := strconv.Atoi(text); err == nil && suffix != fromPods().suffix {
			served[index] = bpf.MasqUplink{Ifindex: uint32(index)}
		}
	}
	spec, err := bpf.LoadMasq()
	if err != nil {
		return nil, fmt.Errorf("read programs: %w", err)
	}
	uplinks, err := openPin(spec.Maps[bpf.MasqMapUplinks], filepath.Join(pinPath, layout, bpf.MasqMapUplinks))
	if _, foreign := errors.AsType[*PinError](err); foreign || uplinks == nil && err == nil {
		return served, nil
	}
	if err != nil {
		return nil, err
	}
	defer uplinks.Close()
	err = readSlots(uplinks, func(_ uint32, value bpf.MasqUplink) { served[int(value.Ifindex)] = value })
	return served, err
}

// readSlots visits the slots of the uplinks map that are in use.
func readSlots(uplinks *ebpf.Map, visit func(slot uint32, value bpf.MasqUplink)) error {
	for slot := range uplinks.MaxEntries() {
		var value bpf.MasqUplink
		if err := uplinks.Lookup(slot, &value); err != nil {
			return fmt.Errorf("read uplink %d: %w", slot, err)
		}
		if value.Ifindex != 0 {
			visit(slot, value)
		}
	}
	return nil
}
