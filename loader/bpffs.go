// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// defaultBPFFS is where systems mount the bpffs.
	defaultBPFFS = "/sys/fs/bpf"
	// mountSource marks the mounts that the agent made, which it takes away
	// again.
	mountSource = "ip-masq-agent"
)

// ensureBPFFS makes path a directory on a bpffs, and mounts one if it must.
func ensureBPFFS(path string, log *slog.Logger) error {
	on, err := onBPFFS(path)
	if err != nil {
		return err
	}
	if !on {
		at := mountPoint(path)
		if err := mountBPFFS(at); err != nil {
			return &UnsupportedError{Missing: []string{fmt.Sprintf(
				"%s is not on a bpffs and mounting one at %s failed: %v; give the container a hostPath volume of %s at that path, with mountPropagation HostToContainer, on nodes that mount a bpffs there",
				path, at, err, at)}}
		}
		log.Info("mounted a bpffs", "path", at)
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return forbidden(fmt.Errorf("make pin directory: %w", err))
	}
	return nil
}

// forbidden names who forbids to write on a bpffs: root owns it, so that it takes
// no capability.
func forbidden(err error) error {
	if !errors.Is(err, fs.ErrPermission) {
		return err
	}
	return &UnsupportedError{Missing: []string{fmt.Sprintf(
		"%v; AppArmor or SELinux forbids it: give the container the appArmorProfile Unconfined and, under SELinux, the type spc_t", err)}}
}

// onBPFFS looks at the nearest directory above path that exists.
func onBPFFS(path string) (bool, error) {
	for {
		var stat unix.Statfs_t
		err := unix.Statfs(path, &stat)
		if err == nil {
			return uint32(stat.Type) == unix.BPF_FS_MAGIC, nil // Type is signed, and 32 bits wide on some machines
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return false, fmt.Errorf("look at pin directory %s: %w", path, err)
		}
		path = filepath.Dir(path)
	}
}

func mountPoint(path string) string {
	if path == defaultBPFFS || strings.HasPrefix(path, defaultBPFFS+"/") {
		return defaultBPFFS
	}
	return path
}

func mountBPFFS(at string) error {
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	return unix.Mount(mountSource, at, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700")
}

// unmountBPFFS takes away the bpffs that the agent mounted for path, if it did
// and nobody else uses it, with the directory that it made for that.
func unmountBPFFS(path string) error {
	at := mountPoint(path)
	ours, err := mountedByUs(at)
	if err != nil || !ours {
		return err
	}
	left, err := os.ReadDir(at)
	if err != nil || slices.ContainsFunc(left, isPin) {
		return err
	}
	if err := unix.Unmount(at, 0); err != nil {
		return fmt.Errorf("unmount bpffs at %s: %w", at, err)
	}
	if at != defaultBPFFS {
		_ = os.Remove(at) // it stays if it is not empty
	}
	return nil
}

// isPin tells what people pinned from the kernel's own files (maps.debug and
// progs.debug of CONFIG_BPF_PRELOAD), which have the dot that a pin may not have.
func isPin(entry fs.DirEntry) bool { return !strings.Contains(entry.Name(), ".") }

// mountedByUs reads the fields of mountinfo (proc(5)): the mount point is the
// fifth, the source the second after the separator. Of mounts at the same place
// the last one is what is seen there.
func mountedByUs(at string) (bool, error) {
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return false, fmt.Errorf("list mounts: %w", err)
	}
	ours := false
	for line := range strings.Lines(string(mounts)) {
		mount, source, found := strings.Cut(line, " - ")
		left, right := strings.Fields(mount), strings.Fields(source)
		if found && len(left) > 4 && len(right) > 1 && left[4] == at {
			ours = right[1] == mountSource
		}
	}
	return ours, nil
}
