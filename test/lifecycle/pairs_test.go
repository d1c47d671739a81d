// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"

	"ip-masq-agent/bpf"
)

// wholePairs checks that every flow of the node has its reverse entry, and every
// reverse entry its flow.
func (n *node) wholePairs() {
	n.t.Helper()
	var flows, entries int
	n.do(func() (err error) {
		flows, entries, err = pairs()
		return err
	})
	if flows != entries {
		n.t.Errorf("%d flows, %d reverse entries", flows, entries)
	}
}

// pairs counts both halves, and fails for a flow without its reverse entry.
func pairs() (flows, entries int, err error) {
	flowsMap, reverseMap, err := natMaps()
	if err != nil {
		return 0, 0, err
	}
	defer flowsMap.Close()
	defer reverseMap.Close()
	var key bpf.MasqTupleV4
	var mapping bpf.MasqMappingV4
	all := flowsMap.Iterate()
	for all.Next(&key, &mapping) {
		flows++
		reply := bpf.MasqTupleV4{Saddr: key.Daddr, Daddr: mapping.NatAddr, Sport: key.Dport, Dport: mapping.Flow.NatPort, Proto: key.Proto}
		want, way := (bpf.MasqReverseV4{Addr: key.Saddr, Port: key.Sport}), bpf.MasqReverseV4{}
		if err := reverseMap.Lookup(&reply, &way); err != nil {
			return 0, 0, fmt.Errorf("the way back of %+v: %w", key, err)
		}
		if way != want {
			return 0, 0, fmt.Errorf("the way back of %+v leads to %+v", key, way)
		}
	}
	var value bpf.MasqReverseV4
	back := reverseMap.Iterate()
	for back.Next(&key, &value) {
		entries++
	}
	return flows, entries, errors.Join(all.Err(), back.Err())
}

func natMaps() (flows, reverse *ebpf.Map, err error) {
	if flows, err = ebpf.LoadPinnedMap(layoutPin(bpf.MasqMapFlowsV4), nil); err != nil {
		return nil, nil, err
	}
	if reverse, err = ebpf.LoadPinnedMap(layoutPin(bpf.MasqMapReverseV4), nil); err != nil {
		return nil, nil, errors.Join(err, flows.Close())
	}
	return flows, reverse, nil
}

// layoutPin is where a map of the layout is pinned.
func layoutPin(name string) string { return filepath.Join(pinPath, "v1", name) }
