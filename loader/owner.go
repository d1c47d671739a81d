// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// ownerLink is a symbolic link in the pin directory that names the network
// namespace whose links the pins are about, as /proc/PID/ns/net does: the same
// numbers mean other links in another one.
const ownerLink = "netns"

// OwnerError is a pin directory of another network namespace.
type OwnerError struct {
	Path       string
	Owner, Own string // as in /proc/PID/ns/net
}

func (e *OwnerError) Error() string {
	return fmt.Sprintf("%s belongs to the agent of another network namespace (%s, this one is %s): give each its own --pin-path, "+
		"or, if the other namespace is gone, run `ip-masq-agent cleanup`", e.Path, e.Owner, e.Own)
}

// checkOwner fails with an *OwnerError if the pins are of another network
// namespace. Pins that name none are ours.
func checkOwner(pinPath string) error {
	owner, err := os.Readlink(filepath.Join(pinPath, ownerLink))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the owner of the pins: %w", err)
	}
	own, err := networkNamespace()
	if err != nil {
		return err
	}
	if owner != own {
		return &OwnerError{Path: pinPath, Owner: owner, Own: own}
	}
	return nil
}

func networkNamespace() (string, error) {
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return "", fmt.Errorf("find the own network namespace: %w", err)
	}
	return own, nil
}

// own makes the pin directory that of the own network namespace.
func own(pinPath string) error {
	if err := checkOwner(pinPath); err != nil {
		return err
	}
	name, err := networkNamespace()
	if err != nil {
		return err
	}
	if err := os.Symlink(name, filepath.Join(pinPath, ownerLink)); err != nil && !errors.Is(err, fs.ErrExist) {
		return forbidden(fmt.Errorf("name the owner of the pins: %w", err))
	}
	return nil
}

// isAlive reports whether a pinned link is attached to a device: the kernel
// detaches it when the device goes, and with it all of a network namespace.
func isAlive(pin string) bool {
	pinned, err := openPinnedLink(pin)
	if err != nil {
		return false
	}
	defer func() { _ = pinned.Close() }()
	info, err := pinned.Info()
	if err != nil {
		return false
	}
	tcx := info.TCX()
	return tcx != nil && tcx.Ifindex != 0
}

// isForeign reports whether the pins are of another network namespace, which is
// gone. While it lives, as far as its links tell, that is an error.
func isForeign(pinPath string) (bool, error) {
	err := checkOwner(pinPath)
	if _, foreign := errors.AsType[*OwnerError](err); !foreign {
		return false, err
	}
	pins, globErr := filepath.Glob(filepath.Join(pinPath, linksDir, "*"))
	if globErr != nil {
		return true, globErr
	}
	for _, pin := range pins {
		if isAlive(pin) {
			return true, fmt.Errorf("%s is attached there: %w", pin, err)
		}
	}
	return true, nil
}
