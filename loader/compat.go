// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// PinError is a pin that is there and cannot be used.
type PinError struct {
	Path   string
	Found  string
	Wanted string
}

func (e *PinError) Error() string {
	return fmt.Sprintf("%s is %s, wanted is %s: it is not of this build of ip-masq-agent; "+
		"end whoever uses it and remove it with `ip-masq-agent cleanup`, which ends open connections, or choose another --pin-path",
		e.Path, e.Found, e.Wanted)
}

// openPinnedLink opens a pinned link. os.ErrNotExist: nothing is pinned there. The
// kernel asks for rights before it looks, so that without them a pin that is not
// there would be a forbidden one.
func openPinnedLink(pin string) (link.Link, error) {
	if _, err := os.Lstat(pin); err != nil {
		return nil, err
	}
	return link.LoadPinnedLink(pin, nil)
}

// openPin opens a pinned map, which has to be as spec says but for its size. nil:
// nothing is pinned there.
func openPin(spec *ebpf.MapSpec, path string) (*ebpf.Map, error) {
	// The kernel asks for rights before it looks, and the iptables datapath has none.
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	m, err := ebpf.LoadPinnedMap(path, nil)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("open %s: %w", path, err)
	case err != nil:
		return nil, &PinError{Path: path, Found: fmt.Sprintf("no map (%v)", err), Wanted: shape(spec)}
	}
	if found := shapeOf(m); found != shape(spec) {
		return nil, errors.Join(&PinError{Path: path, Found: found, Wanted: shape(spec)}, m.Close())
	}
	return m, nil
}

// shape is what programs must know of a map to use it: all but its size, except
// for the kinds in which a program's access depends on it.
func shape(spec *ebpf.MapSpec) string {
	return shapeText(spec.Type, spec.KeySize, spec.ValueSize, spec.MaxEntries, spec.Flags)
}

func shapeOf(m *ebpf.Map) string {
	return shapeText(m.Type(), m.KeySize(), m.ValueSize(), m.MaxEntries(), m.Flags())
}

func shapeText(kind ebpf.MapType, key, value, entries, flags uint32) string {
	text := fmt.Sprintf("a map of type %s, key %d, value %d, flags %#x", kind, key, value, flags)
	switch kind {
	case ebpf.Array, ebpf.PerCPUArray, ebpf.RingBuf:
		text += fmt.Sprintf(", entries %d", entries)
	}
	return text
}

// checkPins fails for the first pin that cannot be used, before anything is
// changed.
func checkPins(spec *ebpf.CollectionSpec, pinPath string) error {
	for name, mapSpec := range spec.Maps {
		pin := pinOf(pinPath, name)
		if pin == "" {
			continue
		}
		m, err := openPin(mapSpec, pin)
		if err != nil {
			return err
		}
		if m != nil {
			m.Close()
		}
	}
	return nil
}
