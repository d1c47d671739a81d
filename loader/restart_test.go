// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/lab"
)

// What an agent leaves goes on, and the next one goes on with it.
func TestRestart(t *testing.T) {
	for attach, noTCX := range attachments() {
		t.Run(attach, func(t *testing.T) {
			t.Parallel()
			opts := testOptions(t)
			opts.noTCX = noTCX
			n := newNode(t, lab.Options{}, opts)
			open := []*lab.Conn{
				n.dial("tcp", n.serve("tcp", n.Remote.V4)), n.dial("udp", n.serve("udp", n.Remote.V4)),
				n.dial("tcp", n.serve("tcp", n.Remote.V6)),
			}
			pinned := n.pins()
			attached := n.filters() // with the programs' ids
			n.stop()
			if got := n.pins(); got != pinned {
				t.Errorf("pins before\n%s\nafter\n%s", pinned, got)
			}
			for _, c := range open {
				n.goesOn(c)
			}
			alone := n.dial("tcp", n.serve("tcp", n.Remote2.V4))
			if lab.IsPod(alone.Seen.Addr()) {
				t.Errorf("without agent: seen from %s", alone.Seen)
			}

			opts.DropInvalid = false // the new agent has other programs
			n.start(opts)
			for _, c := range append(open, alone) {
				n.goesOn(c)
			}
			n.translates("tcp", false)
			if got := n.pins(); got != pinned {
				t.Errorf("pins before\n%s\nafter\n%s", pinned, got)
			}
			if noTCX && n.filters() == attached {
				t.Error("the programs are those of before")
			}
		})
	}
}

// filters lists the TC filters of the uplink.
func (n *node) filters() string {
	n.t.Helper()
	return n.run("tc", "filter", "show", "dev", "eth0", "ingress") + n.run("tc", "filter", "show", "dev", "eth0", "egress")
}

// No connection fails and none loses its address while agents come and go. Where
// the size of the table changes, the one may that is opened in the instant in which
// the programs do.
func TestRestartUnderLoad(t *testing.T) {
	for name, tt := range map[string]struct {
		sizes    []int
		mayBreak int // one a change, since one is opened at a time
	}{
		"same size":   {[]int{4096, 4096}, 0},
		"other sizes": {[]int{8192, 4096}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, lab.Options{}, testOptions4(t))
			held := n.dial("tcp", n.serve("tcp", n.Remote.V4))
			load := n.load()
			for _, size := range tt.sizes {
				n.stop()
				opts := testOptions4(t)
				opts.NATTableSize = size
				n.start(opts)
				n.goesOn(held)
			}
			opened, broken := load()
			if len(broken) > tt.mayBreak {
				t.Errorf("%d of %d connections broke: %v", len(broken), opened, broken)
			}
			t.Logf("%d connections, %d broke", opened, len(broken))
			n.wholePairs()
		})
	}
}

// load opens connections one after the other until the function that it gives is
// called, which tells what became of them. Some are open for a while.
func (n *node) load() (end func() (opened int, broken []error)) {
	n.t.Helper()
	server := n.serve("tcp", n.Remote2.V4)
	ctx, cancel := context.WithCancel(n.t.Context())
	var all sync.WaitGroup
	var mu sync.Mutex
	var broken []error
	note := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		broken = append(broken, err)
	}
	opened := 0
	all.Go(func() {
		for ; ctx.Err() == nil; opened++ {
			conn, err := n.Pods[0].Dial(n.t.Context(), "tcp", netip.AddrPort{}, server)
			if err != nil {
				note(err)
				continue
			}
			stays := time.Duration(opened%5) * 100 * time.Millisecond
			all.Go(func() {
				time.Sleep(stays)
				if seen, err := conn.Ask(); err != nil || lab.IsPod(seen.Addr()) {
					note(fmt.Errorf("seen from %s: %w", seen, err))
				}
				_ = conn.Close()
			})
		}
	})
	return func() (int, []error) {
		cancel()
		all.Wait()
		return opened, broken
	}
}

func TestTableSize(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{}, testOptions(t))
	var open []*lab.Conn
	for _, remote := range []netip.Addr{n.Remote.V4, n.Remote.V6} {
		for _, network := range []string{"tcp", "udp"} {
			server := n.serve(network, remote)
			for range 3 {
				open = append(open, n.dial(network, server))
			}
		}
	}
	for _, tt := range []struct {
		name       string
		size, want int
	}{
		{"grows", 8192, 8192},
		{"shrinks", 20, 20},
		{"is too small for what is there", 2, 20},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n.t = t
			n.stop()
			opts := testOptions(t)
			opts.NATTableSize = tt.size
			n.start(opts)
			nat := n.status().NAT
			if nat.V4.Capacity != tt.want || nat.V6.Capacity != tt.want {
				t.Errorf("capacity %+v, want %d", nat, tt.want)
			}
			if nat.V4.Entries != 6 || nat.V6.Entries != 6 {
				t.Errorf("entries %+v, want 6 of each family", nat)
			}
			for _, c := range open {
				n.goesOn(c)
			}
			n.wholePairs()
			n.stop()
		})
	}
}

// wholePairs checks that every flow has its reverse entry, and no other is there.
func (n *node) wholePairs() {
	n.t.Helper()
	for _, f := range n.d.families {
		flows, entries := 0, 0
		if err := f.eachFlow(func(*flow) { flows++ }); err != nil {
			n.t.Fatal(err)
		}
		var key, value []byte
		for all := f.reverse.Iterate(); all.Next(&key, &value); {
			entries++
		}
		if flows != entries {
			n.t.Errorf("%s: %d flows, %d reverse entries", f, flows, entries)
		}
	}
}

// An agent that is killed while it changes the size leaves maps that go together.
func TestKilledWhilePublishing(t *testing.T) {
	const oldSize, newSize = 16, 32
	for _, tt := range []struct {
		name string
		pins map[string]uint32 // that are there when it is killed
		want uint32
	}{
		{"before", map[string]uint32{"flows_v4": oldSize, "reverse_v4": oldSize}, oldSize},
		{"one is pinned", map[string]uint32{"flows_v4": oldSize, "reverse_v4": oldSize, "flows_v4_next": newSize}, oldSize},
		{"both are pinned", map[string]uint32{"flows_v4": oldSize, "reverse_v4": oldSize, "flows_v4_next": newSize, "reverse_v4_next": newSize}, oldSize},
		{"one is in its place", map[string]uint32{"flows_v4": newSize, "reverse_v4": oldSize, "reverse_v4_next": newSize}, newSize},
		{"after", map[string]uint32{"flows_v4": newSize, "reverse_v4": newSize}, newSize},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := &node{Lab: lab.New(t, lab.Options{Pods: -1, RoutedPods: -1}), t: t}
			n.do(func() error {
				spec, err := bpf.LoadMasq()
				if err != nil {
					return err
				}
				const dir = testPinPath
				if err := os.Mkdir(dir, 0o700); err != nil {
					return err
				}
				for name, size := range tt.pins {
					s := spec.Maps[bpf.MasqMapFlowsV4].Copy()
					s.MaxEntries = size
					m, err := ebpf.NewMap(s)
					if err != nil {
						return err
					}
					if err := errors.Join(m.Pin(filepath.Join(dir, name)), m.Close()); err != nil {
						return err
					}
				}
				if err := finishPublish(dir, false); err != nil {
					return err
				}
				maps, err := openNATMaps(dir, false)
				if err != nil {
					return err
				}
				if f, r := maps.flows.MaxEntries(), maps.reverse.MaxEntries(); f != tt.want || r != tt.want {
					t.Errorf("sizes %d and %d, want %d", f, r, tt.want)
				}
				left, err := filepath.Glob(dir + "/*")
				if len(left) != 2 {
					t.Errorf("left: %v", left)
				}
				return errors.Join(err, maps.Close())
			})
		})
	}
}

// A flow that two tables have: the newer state wins, and one whose outside tuple
// is somebody else's now is left out.
func TestTakeOver(t *testing.T) {
	lab.RequireRoot(t)
	spec, err := bpf.LoadMasq()
	if err != nil {
		t.Fatal(err)
	}
	newMaps := func(size uint32) *natMaps {
		t.Helper()
		n := &natMaps{format: currentFormat()}
		for name, to := range map[string]**ebpf.Map{bpf.MasqMapFlowsV4: &n.flows, bpf.MasqMapReverseV4: &n.reverse} {
			s := spec.Maps[name].Copy()
			s.MaxEntries = size
			m, err := ebpf.NewMap(s)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { m.Close() })
			*to = m
		}
		return n
	}
	const remote, nat, podA, podB = 1, 2, 3, 4
	put := func(n *natMaps, pod uint32, sport, natPort uint16, lastSeen uint64) {
		t.Helper()
		key := bpf.MasqTupleV4{Saddr: pod, Daddr: remote, Sport: sport, Dport: 53, Proto: unix.IPPROTO_UDP}
		mapping := bpf.MasqMappingV4{NatAddr: nat}
		mapping.Flow.NatPort, mapping.Flow.LastSeen = natPort, lastSeen
		reply := bpf.MasqTupleV4{Saddr: remote, Daddr: nat, Sport: 53, Dport: natPort, Proto: unix.IPPROTO_UDP}
		if err := errors.Join(n.flows.Put(key, mapping), n.reverse.Put(reply, bpf.MasqReverseV4{Addr: pod, Port: sport})); err != nil {
			t.Fatal(err)
		}
	}
	type flow struct {
		pod            uint32
		sport, natPort uint16
		lastSeen       uint64
	}
	all := func(n *natMaps) map[flow]bool {
		t.Helper()
		found := make(map[flow]bool)
		err := scan(n.flows, func(k *bpf.MasqTupleV4, m *bpf.MasqMappingV4) {
			found[flow{k.Saddr, k.Sport, m.Flow.NatPort, m.Flow.LastSeen}] = true
		})
		if err != nil {
			t.Fatal(err)
		}
		return found
	}

	from, to := newMaps(16), newMaps(16)
	put(from, podA, 1, 101, 10) // only there
	put(from, podA, 2, 102, 20) // newer there
	put(to, podA, 2, 102, 10)
	put(from, podA, 3, 103, 10) // older there
	put(to, podA, 3, 103, 20)
	put(from, podA, 4, 104, 30) // its tuple is podB's now
	put(to, podB, 4, 104, 10)
	put(from, podA, 5, 105, 30) // opened again since, with another port
	put(to, podA, 5, 115, 10)
	put(from, podA, 6, 106, 30) // both
	put(to, podA, 6, 116, 10)
	put(to, podB, 6, 106, 10)
	put(from, podA, 7, 107, 10) // a copy ended between its halves
	put(to, podA, 7, 107, 10)
	if err := to.flows.Delete(bpf.MasqTupleV4{Saddr: podA, Daddr: remote, Sport: 7, Dport: 53, Proto: unix.IPPROTO_UDP}); err != nil {
		t.Fatal(err)
	}
	if err := to.takeOver(from, 0); err != nil {
		t.Fatal(err)
	}
	want := map[flow]bool{
		{podA, 1, 101, 10}: true, {podA, 2, 102, 20}: true, {podA, 3, 103, 20}: true,
		{podB, 4, 104, 10}: true, {podA, 5, 115, 10}: true, {podA, 6, 116, 10}: true, {podB, 6, 106, 10}: true,
		{podA, 7, 107, 10}: true,
	}
	got := all(to)
	for f := range want {
		if !got[f] {
			t.Errorf("%+v is missing", f)
		}
	}
	if len(got) != len(want) {
		t.Errorf("got %v", got)
	}
	var key, value []byte
	entries := 0
	for reverse := to.reverse.Iterate(); reverse.Next(&key, &value); {
		entries++
	}
	if entries != len(want) {
		t.Errorf("%d reverse entries, want %d", entries, len(want))
	}

	if err := newMaps(3).takeOver(from, 0); !errors.Is(err, unix.E2BIG) {
		t.Errorf("too many for the table: %v", err)
	}
}
