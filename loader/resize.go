// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
)

// natMaps are the two maps of a family's flows.
type natMaps struct {
	is6            bool
	flows, reverse *ebpf.Map
	format         format // of flows
}

func flowMaps(is6 bool) (flows, reverse string) {
	if is6 {
		return bpf.MasqMapFlowsV6, bpf.MasqMapReverseV6
	}
	return bpf.MasqMapFlowsV4, bpf.MasqMapReverseV4
}

// natMaps are those that flows of the family are kept in now.
func (m *maps) natMaps(is6 bool) *natMaps {
	flows, reverse := flowMaps(is6)
	return &natMaps{is6: is6, flows: m.byName[flows], reverse: m.byName[reverse]}
}

// Close gives up the handles.
func (n *natMaps) Close() error { return errors.Join(n.flows.Close(), n.reverse.Close()) }

// resizeAll makes the pinned maps of flows as large as wanted, and tells spec. It
// returns those that were replaced: the programs that run use them until others
// are attached.
func resizeAll(spec *ebpf.CollectionSpec, dir string, opts Options) (before []*natMaps, err error) {
	for _, is6 := range []bool{false, true} {
		old, err := resize(spec, dir, uint32(opts.NATTableSize), is6)
		if err != nil {
			for _, old := range before {
				err = errors.Join(err, old.Close())
			}
			return nil, fmt.Errorf("change the size of the translation table: %w", err)
		}
		if old != nil {
			before = append(before, old)
		}
		flows, _ := flowMaps(is6)
		if kept := spec.Maps[flows].MaxEntries; kept != uint32(opts.NATTableSize) {
			opts.Log.Warn("the translation table keeps its size, its flows do not fit the configured one",
				"table", flows, "size", kept, "configured", opts.NATTableSize)
		}
	}
	return before, nil
}

// resize replaces the maps of a family by copies of another size, if they are
// there and have not that size. If what they hold does not fit, they stay and
// spec gets their size: no live flow dies for a smaller table.
func resize(spec *ebpf.CollectionSpec, dir string, size uint32, is6 bool) (*natMaps, error) {
	flows, reverse := flowMaps(is6)
	spec.Maps[flows].MaxEntries, spec.Maps[reverse].MaxEntries = size, size
	if err := finishPublish(dir, is6); err != nil {
		return nil, err
	}
	old, err := openNATMaps(dir, is6)
	if err != nil || old == nil {
		return nil, err
	}
	if old.flows.MaxEntries() == size && old.reverse.MaxEntries() == size {
		return nil, old.Close()
	}
	err = replace(spec, dir, old)
	if errors.Is(err, unix.E2BIG) {
		spec.Maps[flows].MaxEntries, spec.Maps[reverse].MaxEntries = old.flows.MaxEntries(), old.reverse.MaxEntries()
		return nil, old.Close()
	}
	if err != nil {
		return nil, errors.Join(err, old.Close())
	}
	return old, nil
}

// replace pins copies of the maps, as spec has them, in their place.
func replace(spec *ebpf.CollectionSpec, dir string, old *natMaps) error {
	flows, reverse := flowMaps(old.is6)
	resized := &natMaps{is6: old.is6}
	var err error
	if resized.flows, err = ebpf.NewMap(spec.Maps[flows]); err != nil {
		return fmt.Errorf("make %s: %w", flows, err)
	}
	defer resized.flows.Close()
	if resized.reverse, err = ebpf.NewMap(spec.Maps[reverse]); err != nil {
		return fmt.Errorf("make %s: %w", reverse, err)
	}
	defer resized.reverse.Close()
	if err := resized.takeOver(old, 0); err != nil {
		return err
	}
	return resized.publish(dir)
}

// openNATMaps opens the pinned maps of a family. nil: one of them is not there.
func openNATMaps(dir string, is6 bool) (*natMaps, error) {
	flowsName, reverseName := flowMaps(is6)
	flows, err := ebpf.LoadPinnedMap(filepath.Join(dir, flowsName), nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", flowsName, err)
	}
	reverse, err := ebpf.LoadPinnedMap(filepath.Join(dir, reverseName), nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, flows.Close()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", reverseName, err), flows.Close())
	}
	return &natMaps{is6: is6, flows: flows, reverse: reverse, format: currentFormat()}, nil
}

// nextSuffix is of the pins of maps that are to take the place of others. bpffs
// allows no dots.
const nextSuffix = "_next"

// publish pins the maps where those are that they replace. What it does in which
// order is what finishPublish relies on.
func (n *natMaps) publish(dir string) error {
	flows, reverse := flowMaps(n.is6)
	if err := n.flows.Pin(filepath.Join(dir, flows+nextSuffix)); err != nil {
		return fmt.Errorf("pin %s: %w", flows, err)
	}
	if err := n.reverse.Pin(filepath.Join(dir, reverse+nextSuffix)); err != nil {
		return fmt.Errorf("pin %s: %w", reverse, err)
	}
	if err := rename(dir, flows); err != nil {
		return err
	}
	return rename(dir, reverse)
}

func rename(dir, name string) error {
	return os.Rename(filepath.Join(dir, name+nextSuffix), filepath.Join(dir, name))
}

// finishPublish ends what an agent began that was killed while it published:
// once the first map is in its place the other follows, before that neither.
func finishPublish(dir string, is6 bool) error {
	flows, reverse := flowMaps(is6)
	if _, err := os.Lstat(filepath.Join(dir, flows+nextSuffix)); errors.Is(err, os.ErrNotExist) {
		if err := rename(dir, reverse); !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return nil
	}
	for _, name := range []string{reverse, flows} {
		if err := os.Remove(filepath.Join(dir, name+nextSuffix)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// takeOver copies the flows that n does not have, or has in an older state, pair
// by pair: all, or those opened since then. A flow whose outside tuple is
// another's in n is left out.
func (n *natMaps) takeOver(from *natMaps, since uint64) error {
	if n.is6 {
		return takeOver(n, from.flows, from.format.v6, func(k *bpf.MasqTupleV6, m *bpf.MasqMappingV6) (pair6, bool) {
			return pair6{
				tuple: *k, mapping: *m, way: bpf.MasqReverseV6{Addr: k.Saddr, Port: k.Sport},
				reply: bpf.MasqTupleV6{Saddr: k.Daddr, Daddr: m.NatAddr, Sport: k.Dport, Dport: m.Flow.NatPort, Proto: k.Proto},
				newer: func(known *bpf.MasqMappingV6) bool { return m.Flow.LastSeen > known.Flow.LastSeen },
			}, m.Flow.Dying == 0 && m.Flow.Created >= since
		})
	}
	return takeOver(n, from.flows, from.format.v4, func(k *bpf.MasqTupleV4, m *bpf.MasqMappingV4) (pair4, bool) {
		return pair4{
			tuple: *k, mapping: *m, way: bpf.MasqReverseV4{Addr: k.Saddr, Port: k.Sport},
			reply: bpf.MasqTupleV4{Saddr: k.Daddr, Daddr: m.NatAddr, Sport: k.Dport, Dport: m.Flow.NatPort, Proto: k.Proto},
			newer: func(known *bpf.MasqMappingV4) bool { return m.Flow.LastSeen > known.Flow.LastSeen },
		}, m.Flow.Dying == 0 && m.Flow.Created >= since
	})
}

// pair is a flow as both maps have it: tuples T, reverse entries R, mappings M.
type pair[T any, R comparable, M any] struct {
	tuple   T
	mapping M
	reply   T
	way     R
	newer   func(known *M) bool
}

type (
	pair4 = pair[bpf.MasqTupleV4, bpf.MasqReverseV4, bpf.MasqMappingV4]
	pair6 = pair[bpf.MasqTupleV6, bpf.MasqReverseV6, bpf.MasqMappingV6]
)

func takeOver[T any, R comparable, M any](
	to *natMaps, flows *ebpf.Map, each func(*ebpf.Map, func(*T, *M)) error, read func(*T, *M) (pair[T, R, M], bool),
) error {
	var failed error
	err := each(flows, func(tuple *T, mapping *M) {
		if p, wanted := read(tuple, mapping); wanted && failed == nil {
			failed = p.insert(to)
		}
	})
	if failed != nil {
		failed = fmt.Errorf("take a flow over: %w", failed)
	}
	return errors.Join(err, failed)
}

func (p *pair[T, R, M]) insert(to *natMaps) error {
	err := to.reverse.Update(&p.reply, &p.way, ebpf.UpdateNoExist)
	taken := errors.Is(err, ebpf.ErrKeyExist)
	if err != nil && !taken {
		return err
	}
	if taken && !p.owns(to) {
		return nil
	}
	err = to.flows.Update(&p.tuple, &p.mapping, ebpf.UpdateNoExist)
	switch {
	case err == nil:
		return nil
	case taken && errors.Is(err, ebpf.ErrKeyExist):
		return p.freshen(to)
	case taken:
		return err
	case errors.Is(err, ebpf.ErrKeyExist): // it has been opened again
		return to.reverse.Delete(&p.reply)
	}
	return errors.Join(err, to.reverse.Delete(&p.reply))
}

// owns reports whether the outside tuple is the flow's: a copy may have ended
// between its two halves.
func (p *pair[T, R, M]) owns(to *natMaps) bool {
	var owner R
	return to.reverse.Lookup(&p.reply, &owner) == nil && owner == p.way
}

// freshen gives a flow that is there the newer state.
func (p *pair[T, R, M]) freshen(to *natMaps) error {
	var known M
	if to.flows.Lookup(&p.tuple, &known) != nil || !p.newer(&known) {
		return nil
	}
	err := to.flows.Update(&p.tuple, &p.mapping, ebpf.UpdateExist)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}

// insertTime is longer than the datapath needs from the time that it notes as a
// flow's beginning, which may be that of the last tick, until the flow is in the
// map.
const insertTime = uint64(time.Second)

// takeOver copies what programs of before have opened since then. Between the
// last copy and the change of programs it can miss a flow, for as long as that
// takes: until the next copy. A flow that does not fit any more is lost.
func (d *Datapath) takeOver(since uint64) error {
	for _, old := range d.maps.before {
		err := d.maps.natMaps(old.is6).takeOver(old, max(since, insertTime)-insertTime)
		if errors.Is(err, unix.E2BIG) {
			d.log.Warn("the translation table is full, flows that were opened while its size changed are lost")
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// goOnTakingOver copies again and again until the function that it gives is
// called: an attachment may have to wait for others' changes of links, and as
// long as only one of the programs is new, each flow that opens needs its copy
// before its reply comes.
func (d *Datapath) goOnTakingOver(since uint64) (end func() error) {
	if len(d.maps.before) == 0 {
		return func() error { return nil }
	}
	ctx, cancel := context.WithCancel(context.Background())
	failed := make(chan error, 1)
	go func() {
		var err error
		for last := false; err == nil && !last; {
			last = !sleep(ctx, time.Millisecond)
			begin := monotonic()
			err = d.takeOver(since)
			since = begin
		}
		failed <- err
	}()
	return func() error {
		cancel()
		return <-failed
	}
}

// endTakeover copies for the last time, when no program of before runs.
func (d *Datapath) endTakeover() error {
	if err := d.takeOver(0); err != nil {
		return err
	}
	var errs []error
	for _, old := range d.maps.before {
		errs = append(errs, old.Close())
	}
	d.maps.before = nil
	return errors.Join(append(errs, d.removeOlder())...)
}
