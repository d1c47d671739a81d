// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/route"
)

// IsPinned reports whether there is anything under a pin path, without asking
// for rights.
func IsPinned(path string) bool {
	entries, err := os.ReadDir(path)
	return err == nil && len(entries) > 0
}

// closed are the flags of an uplink that opens no flows of either family.
const closed = uint8(bpf.MasqUplinkFlagUPLINK_CLOSED_V4 | bpf.MasqUplinkFlagUPLINK_CLOSED_V6)

// Drain is one step of the datapath's retreat, once netfilter translates: the
// programs open no flows any more, and those whose time or address is over end.
// It gives the number of flows that go on, for which it is to be called again.
// With none left, all that the datapath made is taken away, as by Cleanup.
//
// It loads no program, so that from Linux 6.1 on, where maps can be opened
// without CAP_BPF, it works with the rights of the iptables datapath. Where it
// does not, the error is os.ErrPermission.
func Drain(opts Options, network *route.Snapshot) (flows int, err error) {
	found, err := withPins(opts.PinPath, false, func(p *pins) error {
		if err := p.closeUplinks(); err != nil {
			return err
		}
		if p.maps[bpf.MasqMapTimeouts] == nil {
			return nil // no flow lives without
		}
		timeouts, err := readTimeouts(p.maps[bpf.MasqMapTimeouts])
		if err != nil {
			return err
		}
		usable := usableByNode(network)
		for _, f := range p.families {
			n, err := f.drainFlows(timeouts, usable)
			if err != nil {
				return fmt.Errorf("%s: %w", f, err)
			}
			flows += n
		}
		return nil
	})
	if err != nil || !found || flows > 0 {
		return flows, err
	}
	return 0, Cleanup(opts)
}

// closeUplinks has the programs open no more flows.
func (p *pins) closeUplinks() error {
	uplinks := p.maps[bpf.MasqMapUplinks]
	if uplinks == nil {
		return nil // so the programs' own: they pass everything
	}
	var err error
	readErr := readSlots(uplinks, func(slot uint32, value bpf.MasqUplink) {
		if value.Flags&closed == closed || err != nil {
			return
		}
		value.Flags |= closed
		err = uplinks.Put(slot, value)
	})
	if err != nil {
		err = fmt.Errorf("close uplink: %w", err)
	}
	return errors.Join(readErr, err)
}

// usableByNode tells where flows can go on: at addresses that the node has, on
// links that are up, whether or not they are uplinks by today's flags.
func usableByNode(network *route.Snapshot) func(outside) bool {
	known := make(map[outside]bool)
	return func(o outside) bool {
		is, asked := known[o]
		if !asked {
			l, err := net.InterfaceByIndex(int(o.ifindex))
			is = err == nil && l.Flags&net.FlagUp != 0 && slices.Contains(network.Addresses, o.addr)
			known[o] = is
		}
		return is
	}
}

// drainFlows ends the flows that are past their time or whose address is gone,
// and counts the others. What the node itself has noted of its own needs nobody
// to serve it, and does not count.
func (f *family) drainFlows(timeouts []time.Duration, usable func(outside) bool) (live int, err error) {
	var over []flow
	now := monotonic()
	err = f.eachFlow(func(e *flow) {
		switch {
		case e.dying, e.left(timeouts, now) <= -lastSeenGranularity, !usable(outside{e.ifindex, e.natAddr(f.is6)}):
			over = append(over, *e)
		case !e.isNodes(f.is6):
			live++
		}
	})
	if err != nil {
		return live, err
	}
	return live, f.forget(over)
}

// isNodes reports whether the flow only notes a tuple that the node itself
// sends, and translates nothing.
func (e *flow) isNodes(is6 bool) bool {
	if is6 {
		return e.key6.Saddr == e.natAddr6 && e.key6.Sport == e.natPort
	}
	return e.key4.Saddr == e.natAddr4 && e.key4.Sport == e.natPort
}

// forget ends flows. conntrack forgets them first, all of them: what it knew as
// not translated would leave with the pod's address once we know it no more, and
// a packet that it has passed may be on its way. What began anew since flows were
// read is left alone.
func (f *family) forget(flows []flow) error {
	if len(flows) == 0 {
		return nil
	}
	ct, err := openConntrack()
	if err != nil {
		return err
	}
	defer ct.close()
	err = f.eachUnchanged(flows, func(e *flow) error { return ct.forget(e.tuple(f.is6)) })
	if err != nil {
		return fmt.Errorf("have conntrack forget a flow: %w", err)
	}
	if err := f.eachUnchanged(flows, f.remove); err != nil {
		return fmt.Errorf("end a flow: %w", err)
	}
	return nil
}

// eachUnchanged visits those of flows that are still the ones in the map.
func (f *family) eachUnchanged(flows []flow, visit func(*flow) error) error {
	for i := range flows {
		e := &flows[i]
		created, err := f.created(e)
		if errors.Is(err, ebpf.ErrKeyNotExist) || err == nil && created != e.created {
			continue
		}
		if err != nil {
			return err
		}
		if err := visit(e); err != nil {
			return err
		}
	}
	return nil
}

// created is when the flow that the map has now for e's tuple was opened.
func (f *family) created(e *flow) (uint64, error) {
	if f.is6 {
		var m bpf.MasqMappingV6
		err := f.flows.Lookup(&e.key6, &m)
		return m.Flow.Created, err
	}
	var m bpf.MasqMappingV4
	err := f.flows.Lookup(&e.key4, &m)
	return m.Flow.Created, err
}

// remove deletes both halves of a flow, the outside tuple first.
func (f *family) remove(e *flow) error {
	reply, key := any(&bpf.MasqTupleV4{
		Saddr: e.key4.Daddr, Daddr: e.natAddr4, Sport: e.key4.Dport, Dport: e.natPort, Proto: e.key4.Proto,
	}), any(&e.key4)
	if f.is6 {
		reply, key = &bpf.MasqTupleV6{
			Saddr: e.key6.Daddr, Daddr: e.natAddr6, Sport: e.key6.Dport, Dport: e.natPort, Proto: e.key6.Proto,
		}, &e.key6
	}
	return errors.Join(
		ignoreMissing(f.reverse.Delete(reply)),
		ignoreMissing(f.flows.Delete(key)),
	)
}

func ignoreMissing(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}
