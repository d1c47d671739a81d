// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/lab"
)

// oldMapping is how a layout before the first might have kept a flow.
type oldMapping struct {
	LastSeen, Created uint64
	NatAddr           uint32
	NatPort           uint16
	State             uint16
	Ifindex, Unused   uint32
}

func oldFormat() format {
	return format{v4: func(flows *ebpf.Map, visit func(*bpf.MasqTupleV4, *bpf.MasqMappingV4)) error {
		return scan(flows, func(k *bpf.MasqTupleV4, old *oldMapping) {
			m := bpf.MasqMappingV4{NatAddr: old.NatAddr}
			m.Flow.NatPort, m.Flow.Ifindex, m.Flow.State = old.NatPort, old.Ifindex, uint8(old.State)
			m.Flow.LastSeen, m.Flow.Created = old.LastSeen, old.Created
			visit(k, &m)
		})
	}}
}

// oldLayout makes of the pins of today those of an older layout, without flows.
// It gives what notes a flow in them, as a program of that layout would.
func (n *node) oldLayout(old string) (note func(*bpf.MasqTupleV4, *bpf.MasqMappingV4)) {
	n.t.Helper()
	flows := &ebpf.MapSpec{Type: ebpf.Hash, KeySize: 16, ValueSize: 32, MaxEntries: 64, Flags: 1} // BPF_F_NO_PREALLOC
	var m *ebpf.Map
	n.do(func() (err error) {
		if err := os.Rename(filepath.Join(testPinPath, layout), filepath.Join(testPinPath, old)); err != nil {
			return err
		}
		pin := filepath.Join(testPinPath, old, bpf.MasqMapFlowsV4)
		if err := os.Remove(pin); err != nil {
			return err
		}
		if m, err = ebpf.NewMap(flows); err != nil {
			return err
		}
		return m.Pin(pin)
	})
	n.t.Cleanup(func() { m.Close() })
	return func(k *bpf.MasqTupleV4, now *bpf.MasqMappingV4) {
		n.t.Helper()
		value := oldMapping{
			NatAddr: now.NatAddr, NatPort: now.Flow.NatPort, State: uint16(now.Flow.State), Ifindex: now.Flow.Ifindex,
			LastSeen: now.Flow.LastSeen, Created: now.Flow.Created,
		}
		if err := m.Put(k, &value); err != nil {
			n.t.Fatal(err)
		}
	}
}

// The flows of an older layout go on: those that are there, and those that its
// programs open until others are attached.
func TestOlderLayoutIsTakenOver(t *testing.T) {
	for attach, noTCX := range attachments() {
		t.Run(attach, func(t *testing.T) {
			t.Parallel()
			opts := testOptions4(t)
			opts.noTCX = noTCX
			n := newNode(t, lab.Options{}, opts)
			open := []*lab.Conn{n.dial("tcp", n.serve("tcp", n.Remote.V4)), n.dial("udp", n.serve("udp", n.Remote.V4))}
			pinned := n.pins()
			keys, values := []bpf.MasqTupleV4{}, []bpf.MasqMappingV4{}
			if err := scan(n.d.maps.FlowsV4, func(k *bpf.MasqTupleV4, m *bpf.MasqMappingV4) {
				keys, values = append(keys, *k), append(values, *m)
			}); err != nil || len(keys) != len(open) {
				t.Fatalf("%d flows, %v", len(keys), err)
			}
			n.stop()
			note := n.oldLayout("v0")
			note(&keys[0], &values[0])
			opts.formats = map[int]format{0: oldFormat()}
			n.do(func() (err error) {
				n.d, err = New(opts)
				return err
			})
			note(&keys[1], &values[1])
			n.sync()
			for _, c := range open {
				n.goesOn(c)
			}
			n.translates("tcp", false)
			n.wholePairs()
			if got := n.pins(); got != pinned {
				t.Errorf("pins before\n%s\nafter\n%s", pinned, got)
			}
			if left := n.run("ls", testPinPath); strings.Contains(left, "v0") {
				t.Errorf("left: %s", left)
			}
			if s := n.status(); len(s.Interfaces) != 1 || len(s.Warnings) != 0 {
				t.Errorf("status %+v", s)
			}
		})
	}
}

// What it cannot read it leaves alone, and says so.
func TestOtherLayoutsAreRefused(t *testing.T) {
	for name, tt := range map[string]struct{ layout, want string }{
		"newer":   {"v2", "/v2 has the translations of a newer ip-masq-agent (layout 2, this one reads up to 1): run that version again"},
		"too old": {"v0", "/v0 is of an older ip-masq-agent (layout 0) than this one can take over from: update in smaller steps"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			opts := testOptions4(t)
			n := newNode(t, lab.Options{}, opts)
			conn := n.dial("tcp", n.serve("tcp", n.Remote.V4))
			n.stop()
			n.oldLayout(tt.layout)
			if err := n.refused(opts); !strings.Contains(err.Error(), testPinPath+tt.want) {
				t.Errorf("got %v", err)
			}
			n.goesOn(conn)
			n.cleanup(opts)
			if _, err := n.Node.Run(t.Context(), "ls", testPinPath); err == nil {
				t.Errorf("cleanup left %s", n.run("find", testPinPath))
			}
		})
	}
}

// refused gives the error with which no datapath can be made.
func (n *node) refused(opts Options) error {
	n.t.Helper()
	var refusal error
	n.do(func() error {
		d, err := New(opts)
		if err == nil {
			return errors.Join(errors.New("it was not refused"), d.Close())
		}
		refusal = err
		return nil
	})
	return refusal
}

// A pin that is not what it should be is named, with what to do.
func TestForeignPinsAreRefused(t *testing.T) {
	foreign := func(change func(*ebpf.MapSpec)) func(*ebpf.MapSpec, string) error {
		return func(spec *ebpf.MapSpec, pin string) error {
			spec = spec.Copy()
			change(spec)
			spec.Key, spec.Value = nil, nil
			m, err := ebpf.NewMap(spec)
			if err != nil {
				return err
			}
			return errors.Join(m.Pin(pin), m.Close())
		}
	}
	program := func(_ *ebpf.MapSpec, pin string) error {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
		})
		if err != nil {
			return err
		}
		return errors.Join(p.Pin(pin), p.Close())
	}
	n := newNode(t, lab.Options{Pods: -1, RoutedPods: -1}, testOptions4(t))
	n.stop()
	for _, tt := range []struct {
		name, pin, found string
		put              func(spec *ebpf.MapSpec, pin string) error
	}{
		{"another type", bpf.MasqMapFlowsV4, "a map of type LRUHash, ", foreign(func(s *ebpf.MapSpec) { s.Type, s.Flags = ebpf.LRUHash, 0 })},
		{"another key", bpf.MasqMapReverseV4, "key 20, ", foreign(func(s *ebpf.MapSpec) { s.KeySize = 20 })},
		{"another value", bpf.MasqMapNodeV4, "value 8, ", foreign(func(s *ebpf.MapSpec) { s.ValueSize = 8 })},
		{"another size", bpf.MasqMapPortPool, "entries 2", foreign(func(s *ebpf.MapSpec) { s.MaxEntries = 2 })},
		{"another trie", bpf.MasqMapNonmasqV4, "value 1, ", foreign(func(s *ebpf.MapSpec) { s.ValueSize = 1 })},
		{"a program", bpf.MasqMapFlowsV4, "no map", program},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n.t = t
			opts := testOptions4(t)
			n.start(opts)
			spec, err := bpf.LoadMasq()
			if err != nil {
				t.Fatal(err)
			}
			n.stop()
			pin := pinOf(testPinPath, tt.pin)
			n.do(func() error {
				return errors.Join(os.Remove(pin), tt.put(spec.Maps[tt.pin], pin))
			})
			refusal := n.refused(opts)
			wrong, ok := errors.AsType[*PinError](refusal)
			if !ok || wrong.Path != pin || !strings.Contains(wrong.Found, tt.found) || wrong.Wanted != shape(spec.Maps[tt.pin]) {
				t.Errorf("got %v", refusal)
			}
			n.cleanup(opts)
			n.start(opts)
			n.stop()
			n.cleanup(opts)
		})
	}
}
