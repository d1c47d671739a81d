// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"ip-masq-agent/bpf"
)

// Cleanup removes all that the datapath made: programs, filters, the qdiscs
// that were added for them, maps, the pin directory and the mount. It does
// nothing where nothing is, and works where half of it is missing.
func Cleanup(opts Options) error {
	if err := detachAll(opts.PinPath); err != nil {
		return err
	}
	if err := os.RemoveAll(opts.PinPath); err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	return unmountBPFFS(opts.PinPath)
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
		if _, ok := served[index]; !ok {
			served[index] = bpf.MasqUplink{Ifindex: uint32(index)}
		}
	}
	var errs []error
	for _, value := range served {
		errs = append(errs, detach(pinPath, value))
	}
	return errors.Join(errs...)
}

// servedLinks reads by interface index which links have our programs.
func servedLinks(pinPath string) (map[int]bpf.MasqUplink, error) {
	served := make(map[int]bpf.MasqUplink)
	pins, err := os.ReadDir(filepath.Join(pinPath, linksDir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list pinned links: %w", err)
	}
	for _, pin := range pins {
		text, _, _ := strings.Cut(pin.Name(), "_")
		if index, err := strconv.Atoi(text); err == nil {
			served[index] = bpf.MasqUplink{Ifindex: uint32(index)}
		}
	}
	uplinks, err := ebpf.LoadPinnedMap(filepath.Join(pinPath, layout, bpf.MasqMapUplinks), nil)
	if errors.Is(err, os.ErrNotExist) {
		return served, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open uplinks: %w", err)
	}
	defer uplinks.Close()
	for slot := range uplinks.MaxEntries() {
		var value bpf.MasqUplink
		if err := uplinks.Lookup(slot, &value); err != nil {
			return nil, fmt.Errorf("read uplink %d: %w", slot, err)
		}
		if value.Ifindex != 0 {
			served[int(value.Ifindex)] = value
		}
	}
	return served, nil
}
