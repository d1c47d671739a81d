// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"

	"ip-masq-agent/bpf"
)

// left is what Sync wrote last of what others might change; nil: nothing yet,
// or not all of it.
type left struct {
	ports    *bpf.MasqPortPool
	timeouts map[string]uint32
}

// familyLeft is the same of one family's maps.
type familyLeft struct {
	cidrs           map[netip.Prefix]bpf.MasqCidrVerdict
	addresses, node map[any]any
}

// repaired notes that something was not as the last Sync had left it, and is
// right again.
func (d *Datapath) repaired(what string) {
	d.repairs++
	d.log.Warn("somebody had changed the datapath: put right", "what", what)
}

// keepPins pins again what somebody unpinned. The objects themselves live as
// long as we or the programs hold them.
func (d *Datapath) keepPins() error {
	for name, m := range d.maps.byName {
		if err := d.keepPin(pinOf(d.opts.PinPath, name), m); err != nil {
			return err
		}
	}
	for _, u := range d.uplinks {
		for i, dir := range directions() {
			if u.hooks[i].tcx == nil {
				continue
			}
			at, err := u.hooks[i].place(u.Index, dir)
			if err != nil {
				return fmt.Errorf("look at %s: %w", dir.program, err)
			}
			if at == placeGone {
				continue // with its link
			}
			if err := d.keepPin(linkPin(d.opts.PinPath, u.Index, dir), u.hooks[i].tcx); err != nil {
				return err
			}
		}
	}
	return nil
}

// pinned is a map or a link.
type pinned interface {
	Pin(path string) error
	Unpin() error
}

func (d *Datapath) keepPin(pin string, object pinned) error {
	if pin == "" {
		return nil
	}
	if _, err := os.Lstat(pin); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(pin), 0o700); err != nil {
		return fmt.Errorf("make pin directory: %w", err)
	}
	// Unpin has it forget where it was.
	if err := errors.Join(object.Unpin(), object.Pin(pin)); err != nil {
		return fmt.Errorf("pin again: %w", err)
	}
	d.repaired("pin " + pin)
	return nil
}
