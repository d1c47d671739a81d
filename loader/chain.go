// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// place is where a program of ours is in a link's chain.
type place int

const (
	placeGone  place = iota // somebody took it away
	placeFirst              // where it should be
	placeLater              // another program sees packets before it
)

// keepAttached looks at a link's programs. It attaches again what somebody took
// away, and gives a warning for each program of others that comes before ours:
// what that one ends never gets to us.
func (d *Datapath) keepAttached(u *uplink) (warnings []string, err error) {
	for i, dir := range directions() {
		at, err := u.hooks[i].place(u.Index, dir)
		if err != nil {
			return warnings, fmt.Errorf("look at %s: %w", dir.program, err)
		}
		switch at {
		case placeGone:
			err := d.attachAgain(u, i, dir)
			if errors.Is(err, unix.ENODEV) {
				return warnings, nil // the link has gone, as the next snapshot will tell
			}
			if err != nil {
				return warnings, err
			}
		case placeLater:
			warnings = append(warnings, aheadWarning(u.Name, dir))
		}
	}
	return warnings, nil
}

func aheadWarning(name string, dir direction) string {
	return fmt.Sprintf(
		"another TC program comes before ours on %s %s: packets that it takes are neither translated nor restored; let it attach behind %s",
		name, dir.suffix, dir.program)
}

func (d *Datapath) attachAgain(u *uplink, i int, dir direction) error {
	old := u.hooks[i]
	h, err := d.attach(u, dir)
	if err != nil {
		return fmt.Errorf("attach %s again: %w", dir.program, err)
	}
	u.hooks[i] = h
	d.repaired(fmt.Sprintf("program %s on %s", dir.program, u.Name))
	return old.close()
}

func (h *hook) place(ifindex int, dir direction) (place, error) {
	if h.tcx == nil {
		return filterPlace(ifindex, dir)
	}
	info, err := h.tcx.Info()
	if err != nil {
		return placeGone, err
	}
	if tcx := info.TCX(); tcx == nil || int(tcx.Ifindex) != ifindex {
		return placeGone, nil
	}
	chain, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: dir.tcx})
	if errors.Is(err, unix.ENODEV) {
		return placeGone, nil
	}
	if err != nil {
		return placeGone, err
	}
	if len(chain.Programs) > 0 && chain.Programs[0].ID != info.Program {
		return placeLater, nil
	}
	return placeFirst, nil
}

// filterPlace finds our filter among those of the link.
func filterPlace(ifindex int, dir direction) (place, error) {
	filters, err := listFilters(ifindex, dir)
	if err != nil {
		return placeGone, err
	}
	for i, f := range filters {
		if !isOurs(f, dir) {
			continue
		}
		if i > 0 {
			return placeLater, nil
		}
		return placeFirst, nil
	}
	return placeGone, nil
}

func isOurs(f netlink.Filter, dir direction) bool {
	ours, ok := f.(*netlink.BpfFilter)
	return ok && ours.Name == dir.program && ours.Attrs().Handle == dir.handle
}
