// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/api"
)

// family is what one IP version has of maps and programs.
type family struct {
	is6       bool
	flows     *ebpf.Map
	reverse   *ebpf.Map
	nonmasq   *ebpf.Map
	draining  *ebpf.Map
	addresses *ebpf.Map
	node      *ebpf.Map
	sweep     *ebpf.Program
	sticky    *sticky
	left      familyLeft
}

// newFamilies gives the families that are translated, IPv4 first. With an error
// it gives those whose programs are loaded.
func newFamilies(spec *ebpf.CollectionSpec, m *maps, ipv6 bool) ([]*family, error) {
	families := []*family{{
		flows: m.FlowsV4, reverse: m.ReverseV4, nonmasq: m.NonmasqV4,
		draining: m.DrainingV4, addresses: m.AddressesV4, node: m.NodeV4,
		sticky: newSticky(m, bpf.MasqFamilyFAMILY_V4),
	}}
	names := []string{bpf.MasqProgSweepV4}
	if ipv6 {
		families = append(families, &family{
			is6: true, flows: m.FlowsV6, reverse: m.ReverseV6, nonmasq: m.NonmasqV6,
			draining: m.DrainingV6, addresses: m.AddressesV6, node: m.NodeV6,
			sticky: newSticky(m, bpf.MasqFamilyFAMILY_V6),
		})
		names = append(names, bpf.MasqProgSweepV6)
	}
	for i, f := range families {
		programs, err := loadPrograms(spec, m, nil, names[i])
		if err != nil {
			return families[:i], err
		}
		f.sweep = programs[names[i]]
	}
	return families, nil
}

func (f *family) String() string {
	if f.is6 {
		return "IPv6"
	}
	return "IPv4"
}

// number is the family's in the datapath.
func (f *family) number() bpf.MasqFamily {
	if f.is6 {
		return bpf.MasqFamilyFAMILY_V6
	}
	return bpf.MasqFamilyFAMILY_V4
}

// table is the family's part of nat.
func (f *family) table(nat *api.NAT) *api.Table {
	if f.is6 {
		return &nat.V6
	}
	return &nat.V4
}

// has reports whether a is of the family.
func (f *family) has(a netip.Addr) bool { return a.Is6() == f.is6 }

// addressRuleKey is a rule's prefix on an uplink as a key of the trie.
func addressRuleKey(ifindex int, p netip.Prefix) any {
	length, index := uint32(32+p.Bits()), be32(uint32(ifindex))
	if p.Addr().Is4() {
		return bpf.MasqAddressRuleV4{Prefixlen: length, Ifindex: index, Addr: p.Addr().As4()}
	}
	return bpf.MasqAddressRuleV6{Prefixlen: length, Ifindex: index, Addr: p.Addr().As16()}
}

// addressValue is an address as the datapath compares it.
func addressValue(a netip.Addr) any {
	if a.Is4() {
		return addr4(a)
	}
	return addr6(a)
}

func addr4(a netip.Addr) uint32 {
	b := a.As4()
	return binary.NativeEndian.Uint32(b[:])
}

func addr6(a netip.Addr) (words [4]uint32) {
	b := a.As16()
	for i := range words {
		words[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return words
}

func fromAddr4(word uint32) netip.Addr {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], word)
	return netip.AddrFrom4(b)
}

func fromAddr6(words [4]uint32) netip.Addr {
	var b [16]byte
	for i, word := range words {
		binary.NativeEndian.PutUint32(b[4*i:], word)
	}
	return netip.AddrFrom16(b)
}

// be16 turns a port from host to network byte order, or back.
func be16(port uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], port)
	return binary.NativeEndian.Uint16(b[:])
}

func be32(n uint32) uint32 {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], n)
	return binary.NativeEndian.Uint32(b[:])
}

// flow is one entry of the flow maps, whatever its family.
type flow struct {
	key4     bpf.MasqTupleV4
	key6     bpf.MasqTupleV6
	natAddr4 uint32
	natAddr6 [4]uint32
	natPort  uint16 // network byte order
	created  uint64
	lastSeen uint64
	ifindex  uint32
	state    bpf.MasqFlowState
	dying    bool
	replied  bool
}

// natAddr is the masquerade address of f, which is of the family is6 says.
func (f *flow) natAddr(is6 bool) netip.Addr {
	if is6 {
		return fromAddr6(f.natAddr6)
	}
	return fromAddr4(f.natAddr4)
}

// dst is where f goes.
func (f *flow) dst(is6 bool) netip.Addr {
	if is6 {
		return fromAddr6(f.key6.Daddr)
	}
	return fromAddr4(f.key4.Daddr)
}

// isMoved reports whether f is the node's own, moved out of a pod's way: only
// its port is another.
func (f *flow) isMoved(is6 bool) bool {
	if is6 {
		return f.key6.Saddr == f.natAddr6 && f.key6.Sport != f.natPort
	}
	return f.key4.Saddr == f.natAddr4 && f.key4.Sport != f.natPort
}

// eachFlow visits all flows. The flow is overwritten after each visit. Flows
// that come or go meanwhile may be missed.
func (f *family) eachFlow(visit func(*flow)) error {
	var e flow
	if f.is6 {
		return scan(f.flows, func(k *bpf.MasqTupleV6, v *bpf.MasqMappingV6) {
			e.key6, e.natAddr6 = *k, v.NatAddr
			e.natPort, e.created, e.lastSeen, e.ifindex = v.Flow.NatPort, v.Flow.Created, v.Flow.LastSeen, v.Flow.Ifindex
			e.state, e.dying = bpf.MasqFlowState(v.Flow.State), v.Flow.Dying != 0
			e.replied = v.Flow.Replied != 0
			visit(&e)
		})
	}
	return scan(f.flows, func(k *bpf.MasqTupleV4, v *bpf.MasqMappingV4) {
		e.key4, e.natAddr4 = *k, v.NatAddr
		e.natPort, e.created, e.lastSeen, e.ifindex = v.Flow.NatPort, v.Flow.Created, v.Flow.LastSeen, v.Flow.Ifindex
		e.state, e.dying = bpf.MasqFlowState(v.Flow.State), v.Flow.Dying != 0
		e.replied = v.Flow.Replied != 0
		visit(&e)
	})
}

// scanBatch is how many entries one system call reads.
const scanBatch = 4096

// scan visits all entries of a map in batches. The error is
// ebpf.ErrNotSupported where the kernel has none for the map's type.
func scan[K, V any](m *ebpf.Map, visit func(*K, *V)) error {
	size := min(scanBatch, int(m.MaxEntries()))
	keys, values := make([]K, size), make([]V, size)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		for i := range n {
			visit(&keys[i], &values[i])
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read map: %w", err)
		}
	}
}
