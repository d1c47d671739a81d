// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace that has no name in the file system: only
// this process's descriptors and the processes inside keep it, so it is gone
// as soon as the process is, however it ended.
type Namespace struct {
	name    string
	network *os.File
	mounts  *os.File // nil: the mounts of the test process
	handle  *netlink.Handle
}

// newNamespace makes a namespace with lo up. With ownMounts it has mounts of
// its own too, see mountLikeHost.
func newNamespace(name string, ownMounts bool) (*Namespace, error) {
	ns := &Namespace{name: name}
	if err := onNewThread(func() error { return ns.unshare(ownMounts) }); err != nil {
		return nil, errors.Join(fmt.Errorf("make namespace %s: %w", name, err), ns.close())
	}
	handle, err := netlink.NewHandleAt(netns.NsHandle(ns.network.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open netlink in %s: %w", name, err), ns.close())
	}
	ns.handle = handle
	if err := ns.setUp("lo"); err != nil {
		return nil, errors.Join(err, ns.close())
	}
	return ns, nil
}

// unshare moves the calling thread into new namespaces and keeps them.
func (ns *Namespace) unshare(ownMounts bool) error {
	flags := unix.CLONE_NEWNET
	if ownMounts {
		flags |= unix.CLONE_NEWNS
	}
	if err := unix.Unshare(flags); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	var err error
	if ns.network, err = os.Open("/proc/thread-self/ns/net"); err != nil || !ownMounts {
		return err
	}
	if ns.mounts, err = os.Open("/proc/thread-self/ns/mnt"); err != nil {
		return err
	}
	return mountLikeHost()
}

// mountLikeHost gives the calling thread, which must have a mount namespace of
// its own, what a node has and the machine's mounts cannot give: the /sys of
// its network namespace, a BPF file system at /sys/fs/bpf, and a /run whose
// xtables.lock is not shared with other labs.
func mountLikeHost() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	for _, m := range []struct{ kind, target string }{{"sysfs", "/sys"}, {"bpf", "/sys/fs/bpf"}, {"tmpfs", "/run"}} {
		if err := unix.Mount(m.kind, m.target, m.kind, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
			return fmt.Errorf("mount %s at %s: %w", m.kind, m.target, err)
		}
	}
	return nil
}

// Name is for messages: "node", "pod0" and so on.
func (ns *Namespace) Name() string { return ns.name }

// Path names the network namespace as long as this process lives, for example
// for `nsenter --net=`.
func (ns *Namespace) Path() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.network.Fd())
}

// Netlink is a route netlink handle that works inside the namespace from any
// thread.
func (ns *Namespace) Netlink() *netlink.Handle { return ns.handle }

// Do runs f inside the namespace, on a thread of its own that ends with f:
// sockets that f makes stay in the namespace, goroutines that f starts do not
// run in it. A panic or a FailNow in f goes on in the caller.
func (ns *Namespace) Do(f func() error) error {
	return onNewThread(func() error {
		if err := ns.enter(); err != nil {
			return fmt.Errorf("enter namespace %s: %w", ns.name, err)
		}
		return f()
	})
}

// enter moves the calling thread into ns. The thread must end afterwards.
func (ns *Namespace) enter() error {
	if err := unix.Setns(int(ns.network.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("set network namespace: %w", err)
	}
	if ns.mounts == nil {
		return nil
	}
	directory, err := os.Getwd()
	if err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare working directory: %w", err)
	}
	if err := unix.Setns(int(ns.mounts.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("set mount namespace: %w", err)
	}
	return unix.Chdir(directory)
}

// Sysctl writes a sysctl of the namespace; name is the path below /proc/sys.
func (ns *Namespace) Sysctl(name, value string) error {
	return ns.Do(func() error {
		return os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0)
	})
}

// Run runs a command in the namespace and gives its standard output. The error
// holds what it wrote to standard error.
func (ns *Namespace) Run(ctx context.Context, name string, args ...string) (string, error) {
	out, err := ns.Command(ctx, name, args...).Output()
	return string(out), err
}

func (ns *Namespace) setUp(link string) error {
	l, err := ns.handle.LinkByName(link)
	if err != nil {
		return fmt.Errorf("find %s in %s: %w", link, ns.name, err)
	}
	if err := ns.handle.LinkSetUp(l); err != nil {
		return fmt.Errorf("set %s in %s up: %w", link, ns.name, err)
	}
	return nil
}

func (ns *Namespace) close() error {
	var errs []error
	if ns.handle != nil {
		ns.handle.Close()
	}
	for _, f := range []*os.File{ns.network, ns.mounts} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// onNewThread runs f on a thread that ends with it, so that f may change the
// thread's namespaces. A panic or Goexit of f goes on in the caller.
func onNewThread(f func() error) error {
	var (
		err      error
		panicked any
		returned bool
		done     = make(chan struct{})
	)
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		defer func() {
			if r := recover(); r != nil {
				panicked = fmt.Sprintf("%v\n\n%s", r, debug.Stack())
			}
		}()
		err = f()
		returned = true
	}()
	<-done
	if panicked != nil {
		panic(panicked)
	}
	if !returned {
		runtime.Goexit()
	}
	return err
}
