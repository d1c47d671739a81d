// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/lab"
)

// footprint is all on a node that the datapath could leave: qdiscs, filters,
// programs of TCX by name, files below the places where pins and mounts may be,
// mounts.
func (n *node) footprint() []string {
	n.t.Helper()
	var found []string
	add := func(text string) { found = append(found, strings.Split(strings.TrimSpace(text), "\n")...) }
	add(n.run("tc", "qdisc", "show"))
	add(n.filters())
	n.do(func() error {
		for _, dir := range directions() {
			chain, err := link.QueryPrograms(link.QueryOptions{Target: n.Uplinks[0].Index, Attach: dir.tcx})
			if err != nil {
				return err
			}
			for _, p := range chain.Programs {
				name, err := programName(p.ID)
				if err != nil {
					return err
				}
				found = append(found, dir.suffix+" "+name)
			}
		}
		for _, pattern := range []string{"/sys/fs/bpf/*", "/sys/fs/bpf/*/*", "/run/*", "/run/*/*"} {
			files, err := filepath.Glob(pattern)
			if err != nil {
				return err
			}
			found = append(found, files...)
		}
		mounts, err := os.ReadFile("/proc/thread-self/mounts")
		add(string(mounts))
		return err
	})
	return found
}

func programName(id ebpf.ProgramID) (string, error) {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return "", err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return "", err
	}
	return info.Name, nil
}

func (n *node) cleanup(opts Options) {
	n.t.Helper()
	n.do(func() error { return Cleanup(opts) })
}

// foreign is what others have on the node: a TCX program before and one behind
// ours, a clsact qdisc with filters, a pinned map.
func (n *node) foreign() {
	n.t.Helper()
	n.run("tc", "qdisc", "add", "dev", "eth0", "clsact")
	for _, side := range []string{"ingress", "egress"} {
		n.run("tc", "filter", "add", "dev", "eth0", side, "protocol", "ip", "pref", "1", "u32", "match", "ip", "dst", "192.88.99.1/32", "classid", "1:1")
	}
	for _, attach := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
		n.attachForeign(attach, link.Tail())
	}
	n.do(func() error {
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
		if err != nil {
			return err
		}
		return errors.Join(m.Pin("/sys/fs/bpf/foreign"), m.Close())
	})
}

// attachForeign attaches a program that passes all to the next one.
func (n *node) attachForeign(attach ebpf.AttachType, at link.Anchor) {
	n.t.Helper()
	n.do(func() error {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: "foreign", Type: ebpf.SchedCLS, License: "GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
		})
		if err != nil {
			return err
		}
		defer p.Close()
		l, err := link.AttachTCX(link.TCXOptions{Interface: n.Uplinks[0].Index, Program: p, Attach: attach, Anchor: at})
		if err == nil {
			n.t.Cleanup(func() { l.Close() })
		}
		return err
	})
}

func TestCleanup(t *testing.T) {
	for attach, noTCX := range attachments() {
		for _, foreign := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, others' things %t", attach, foreign), func(t *testing.T) {
				t.Parallel()
				opts := testOptions(t)
				opts.noTCX = noTCX
				n := &node{Lab: lab.New(t, lab.Options{Pods: 1, RoutedPods: -1}), t: t, policy: testPolicy("10.0.0.0/8")}
				t.Cleanup(n.stop)
				if foreign {
					n.foreign()
				}
				before := n.footprint()
				n.start(opts)
				n.translates("tcp", false)
				n.translates("udp", true)
				conn := n.dial("udp", n.serve("udp", n.Remote.V4))
				n.sync()
				if s := n.status(); s.Interfaces[0].Attach != attach || (len(s.Warnings) > 0) != (noTCX && foreign) {
					t.Errorf("status %+v", s)
				}
				n.stop()
				if cmp.Equal(before, n.footprint()) {
					t.Error("there is nothing to clean up")
				}
				for range 2 {
					n.cleanup(opts)
					if diff := cmp.Diff(before, n.footprint()); diff != "" {
						t.Errorf("(-before +after):\n%s", diff)
					}
				}
				if seen, err := conn.Ask(); err != nil || !lab.IsPod(seen.Addr()) {
					t.Errorf("seen from %s, its translation should have ended; %v", seen, err)
				}
			})
		}
	}
}

// It works with half of the state, and finds what its pins do not show.
func TestCleanupOfHalf(t *testing.T) {
	const layoutDir = testPinPath + "/" + layout
	remove := func(pattern string) func(*node) {
		return func(n *node) {
			n.do(func() error {
				files, err := filepath.Glob(pattern)
				if err == nil && len(files) == 0 {
					err = errors.New("nothing to remove")
				}
				for _, f := range files {
					err = errors.Join(err, os.RemoveAll(f))
				}
				return err
			})
		}
	}
	command := func(args ...string) func(*node) {
		return func(n *node) { n.run(args[0], args[1:]...) }
	}
	for _, tt := range []struct {
		name, attach string
		half         func(*node)
	}{
		{"the pins are gone", "tcx", remove(testPinPath)},
		{"the links are gone", "tcx", remove(testPinPath + "/" + linksDir)},
		{"one link is gone", "tcx", remove(testPinPath + "/" + linksDir + "/*_egress")},
		{"the interface is gone", "tcx", command("ip", "link", "del", "eth0")},
		{"the pins are gone", "tc", remove(testPinPath)},
		{"the maps are gone", "tc", remove(layoutDir)},
		{"the uplinks are gone", "tc", remove(layoutDir + "/" + bpf.MasqMapUplinks)},
		{"one filter is gone", "tc", command("tc", "filter", "del", "dev", "eth0", "egress")},
		{"the qdisc is gone", "tc", command("tc", "qdisc", "del", "dev", "eth0", "clsact")},
	} {
		t.Run(tt.name+", "+tt.attach, func(t *testing.T) {
			t.Parallel()
			opts := testOptions4(t)
			opts.noTCX = tt.attach == "tc"
			n := &node{Lab: lab.New(t, lab.Options{Pods: -1, RoutedPods: -1}), t: t, policy: testPolicy()}
			t.Cleanup(n.stop)
			before := n.footprint()
			n.start(opts)
			n.stop()
			tt.half(n)
			n.cleanup(opts)
			if _, err := n.Node.Netlink().LinkByName("eth0"); err != nil {
				if got := n.pins(); got != "" {
					t.Errorf("left: %s", got)
				}
				return
			}
			// A link whose pin the test took detaches some time after.
			deadline := time.Now().Add(5 * time.Second)
			diff := cmp.Diff(before, n.footprint())
			for diff != "" && time.Now().Before(deadline) {
				time.Sleep(20 * time.Millisecond)
				diff = cmp.Diff(before, n.footprint())
			}
			if diff != "" {
				t.Errorf("(-before +after):\n%s", diff)
			}
		})
	}
}

// Mounts that the agent made go with it, others' stay.
func TestCleanupOfMounts(t *testing.T) {
	for name, tt := range map[string]struct {
		path    string
		prepare func(*node)
	}{
		"default, mounted by others": {testPinPath, func(*node) {}},
		"default, not mounted":       {testPinPath, func(n *node) { n.run("umount", defaultBPFFS) }},
		"elsewhere, with parents":    {"/run/some/masq", func(n *node) { n.run("mkdir", "/run/some") }},
		"elsewhere, mounted by others": {"/run/masq", func(n *node) {
			n.run("mkdir", "/run/masq")
			n.run("mount", "-t", "bpf", "others", "/run/masq")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			opts := testOptions4(t)
			opts.PinPath = tt.path
			n := &node{Lab: lab.New(t, lab.Options{Pods: -1, RoutedPods: -1}), t: t, policy: testPolicy()}
			t.Cleanup(n.stop)
			tt.prepare(n)
			before := n.footprint()
			n.start(opts)
			n.stop()
			for range 2 {
				n.cleanup(opts)
				if diff := cmp.Diff(before, n.footprint()); diff != "" {
					t.Errorf("(-before +after):\n%s", diff)
				}
			}
		})
	}
}

// A path that is not the agent's own keeps what others have there.
func TestCleanupOfAWrongPath(t *testing.T) {
	t.Parallel()
	opts := testOptions4(t)
	opts.PinPath = defaultBPFFS
	n := &node{Lab: lab.New(t, lab.Options{Pods: -1, RoutedPods: -1}), t: t, policy: testPolicy()}
	t.Cleanup(n.stop)
	n.foreign()
	n.run("mkdir", "-p", "/sys/fs/bpf/others/links", "/sys/fs/bpf/links/others", "/run/masq/links")
	n.run("touch", "/run/masq/links/2_egress")
	before := n.footprint()
	n.start(opts)
	n.stop()
	n.cleanup(opts)
	opts.PinPath = "/run/masq" // no bpffs
	n.cleanup(opts)
	if diff := cmp.Diff(before, n.footprint()); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
	if !slices.Contains(n.footprint(), "/run/masq/links") {
		t.Error("it removed what is no pin")
	}
}
