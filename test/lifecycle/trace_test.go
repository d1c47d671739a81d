// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/lab"
)

// runTraced runs a command in a namespace to its end, with a look at each system
// call that is to change something in the kernel, of the command and of all that
// it starts: step names it, before it is made. False from step kills all of
// them, so that this change and all further ones are not made. Without TCX the
// command takes the kernel for one before Linux 6.6.
func runTraced(ns *lab.Namespace, command []string, withoutTCX bool, step func(what string) bool) error {
	return ns.Do(func() error { // whose thread is the tracer, and nobody else's parent
		var said bytes.Buffer
		cmd := exec.CommandContext(context.Background(), command[0], command[1:]...)
		cmd.Stdout, cmd.Stderr = &said, &said
		cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true, Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			return err
		}
		t := &tracer{root: cmd.Process.Pid, withoutTCX: withoutTCX, step: step}
		err := t.run()
		_ = cmd.Wait() // for its output: it has been waited for itself
		if err != nil {
			return fmt.Errorf("%s: %w; it said\n%s", strings.Join(command, " "), err, said.String())
		}
		return nil
	})
}

// tracer follows a process with its threads and children by ptrace(2).
type tracer struct {
	root       int
	withoutTCX bool
	step       func(what string) bool
	killed     bool
	status     syscall.WaitStatus // of root, once it has ended
}

const (
	waitForAll = unix.WALL | unix.WNOTHREAD

	traceOptions = unix.PTRACE_O_TRACESYSGOOD | unix.PTRACE_O_EXITKILL |
		unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_TRACEFORK | unix.PTRACE_O_TRACEVFORK
	syscallStop = unix.SIGTRAP | 0x80
)

func (t *tracer) run() error {
	var status syscall.WaitStatus
	if _, err := syscall.Wait4(t.root, &status, waitForAll, nil); err != nil {
		return fmt.Errorf("wait for the start: %w", err)
	}
	if err := syscall.PtraceSetOptions(t.root, traceOptions); err != nil {
		return fmt.Errorf("set trace options: %w", err)
	}
	pid, signal := t.root, 0
	for {
		if err := syscall.PtraceSyscall(pid, signal); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("go on: %w", err)
		}
		var err error
		if pid, err = syscall.Wait4(-1, &status, waitForAll, nil); err != nil {
			return t.end(err)
		}
		if signal, err = t.stopped(pid, status); err != nil {
			return err
		}
	}
}

// end is the result once wait has failed: ECHILD says that all have ended.
func (t *tracer) end(err error) error {
	switch {
	case !errors.Is(err, unix.ECHILD):
		return fmt.Errorf("wait: %w", err)
	case t.killed || t.status.Exited() && t.status.ExitStatus() == 0:
		return nil
	}
	return fmt.Errorf("ended with %#x", uint32(t.status))
}

// stopped looks at what a thread stopped for. It gives the signal to let it go
// on with.
func (t *tracer) stopped(pid int, status syscall.WaitStatus) (signal int, err error) {
	switch {
	case !status.Stopped():
		if pid == t.root {
			t.status = status
		}
		return 0, nil
	case status.StopSignal() == syscallStop:
		return 0, t.look(pid)
	case status.StopSignal() == unix.SIGTRAP, status.StopSignal() == unix.SIGSTOP:
		return 0, nil // an event of ours, or a new thread's first stop
	}
	return int(status.StopSignal()), nil
}

// look shows a system call to step, if it begins and changes something.
func (t *tracer) look(pid int) error {
	var call systemCall
	if err := call.read(pid); err != nil || call.Op != enterStop {
		return ignoreGone(err)
	}
	what := call.change(pid)
	if what == "attach" && t.withoutTCX {
		return ignoreGone(call.spoil(pid)) // and so changes nothing
	}
	if what == "" || t.killed || t.step(what) {
		return nil
	}
	t.killed = true
	return ignoreGone(syscall.Kill(t.root, unix.SIGKILL))
}

// ignoreGone is for threads that end meanwhile.
func ignoreGone(err error) error {
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// systemCall is struct ptrace_syscall_info at the entry of a call.
type systemCall struct {
	Op     uint8
	_      [3]uint8
	Arch   uint32
	_      [2]uint64
	Number uint64
	Args   [6]uint64
}

const (
	getSyscallInfo = 0x420e // PTRACE_GET_SYSCALL_INFO
	enterStop      = 1      // PTRACE_SYSCALL_INFO_ENTRY

	replaceTable = 64 // IPT_SO_SET_REPLACE
)

func (c *systemCall) read(pid int) error {
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, getSyscallInfo, uintptr(pid), unsafe.Sizeof(*c), uintptr(unsafe.Pointer(c)), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// spoil makes a BPF_LINK_CREATE one that asks for a kind of attachment that no
// kernel has: EINVAL, as for one that this kernel does not know yet.
func (c *systemCall) spoil(pid int) error {
	const attachType = 8 // its offset in union bpf_attr
	_, err := syscall.PtracePokeData(pid, uintptr(c.Args[1]+attachType), []byte{0xff, 0xff, 0, 0})
	return err
}

// change says what the call is to change; empty: nothing that outlives its
// process.
func (c *systemCall) change(pid int) string {
	switch c.Number {
	case unix.SYS_BPF:
		return bpfChanges()[c.Args[0]]
	case unix.SYS_MKDIRAT:
		return "mkdir"
	case unix.SYS_UNLINKAT:
		return "unlink"
	case unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2:
		return "rename"
	case unix.SYS_MOUNT:
		return "mount"
	case unix.SYS_UMOUNT2:
		return "umount"
	case unix.SYS_SENDTO:
		return netlinkChange(pid, c.Args[1])
	case unix.SYS_SENDMSG:
		return netlinkChange(pid, firstBuffer(pid, c.Args[1]))
	case unix.SYS_SETSOCKOPT:
		if c.Args[1] == unix.SOL_IP && c.Args[2] == replaceTable {
			return "replace table"
		}
	}
	return ""
}

// bpfChanges are the commands of bpf(2) that make, change or remove something.
func bpfChanges() map[uint64]string {
	return map[uint64]string{
		unix.BPF_MAP_UPDATE_ELEM: "map update", unix.BPF_MAP_DELETE_ELEM: "map delete",
		unix.BPF_MAP_UPDATE_BATCH: "map update", unix.BPF_MAP_DELETE_BATCH: "map delete",
		unix.BPF_OBJ_PIN: "pin", unix.BPF_PROG_TEST_RUN: "run",
		unix.BPF_LINK_CREATE: "attach", unix.BPF_LINK_UPDATE: "replace program", unix.BPF_LINK_DETACH: "detach",
	}
}

// netlinkChange says what a message is to change. Of four kinds of rtnetlink in
// a row the third only asks; what changes nftables is in a batch.
func netlinkChange(pid int, at uint64) string {
	const batch = unix.NFNL_MSG_BATCH_BEGIN // the same number as RTM_NEWLINK
	switch kind := binary.NativeEndian.Uint16(peek(pid, at+4, 2)); {
	case kind == batch:
		return "commit"
	case kind < unix.RTM_BASE || kind > unix.RTM_MAX || kind%4 == 2:
		return ""
	default:
		return fmt.Sprintf("netlink %d", kind)
	}
}

// firstBuffer is where the first part of what a struct msghdr refers to is.
func firstBuffer(pid int, msghdr uint64) uint64 {
	const iov = 16 // offset of msg_iov
	vector := binary.NativeEndian.Uint64(peek(pid, msghdr+iov, 8))
	return binary.NativeEndian.Uint64(peek(pid, vector, 8))
}

// peek reads memory of the process; zeros where there is none.
func peek(pid int, at uint64, length int) []byte {
	read := make([]byte, length)
	if n, err := syscall.PtracePeekData(pid, uintptr(at), read); err != nil || n != length {
		return make([]byte, length)
	}
	return read
}
