// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

const inNamespace = "MASQ_TEST_NETWORK_NAMESPACE"

// TestMain moves the whole process into a network namespace of its own: the
// datapath looks at the sockets and routes of the node, which must be ours.
func TestMain(m *testing.M) {
	if os.Getenv(inNamespace) == "" {
		fmt.Fprintln(os.Stderr, "enter a network namespace:", enterNamespace())
		os.Exit(1)
	}
	if err := rlimit.RemoveMemlock(); err != nil {
		fmt.Fprintln(os.Stderr, "lift the limit on locked memory:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// enterNamespace only returns when it failed.
func enterNamespace() error {
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
	}
	return syscall.Exec("/proc/self/exe", os.Args, append(os.Environ(), inNamespace+"=1"))
}

const (
	egress  = MasqDirectionDIRECTION_EGRESS
	ingress = MasqDirectionDIRECTION_INGRESS

	actionPass = uint32(0xffffffff) // TC_ACT_UNSPEC
	actionDrop = 2                  // TC_ACT_SHOT

	loopbackIndex = 1
)

// config is what a test wants of the datapath. The zero value: both families,
// ports kept where they are free, invalid packets dropped.
type config struct {
	randomFully bool
	passInvalid bool
	strictTCP   bool // nf_conntrack_tcp_loose is off
	noIPv6      bool
	ctLookup    bool
	ctinfo      bool
	fastPath    bool // with ctinfo
	noDirect    bool // packets are read by helpers alone
	slot        uint32
	noHeader    bool // the uplink's frames begin with the IP header
	tagged      bool // the uplink's frames may have a VLAN tag
	noAddress   bool // the uplink has no address of its own
	byRule      bool // addresses come from the address rules
	ports       *MasqPortPool
	flows       uint32 // capacity, of the ways back too unless said
	reverses    uint32
}

// datapath is a fresh instance of the programs and maps.
type datapath struct {
	testing.TB
	MasqMaps
	programs [MasqDirectionDIRECTION_COUNT]*ebpf.Program
	coll     *ebpf.Collection
	counted  map[fate]MasqCounter
	ifindex  uint32 // of the device that packets cross
	summed   bool   // packets have a sum over all of them (CHECKSUM_COMPLETE)
	out      []byte
}

// fate is a place in the counters.
type fate struct {
	direction MasqDirection
	v6        bool
	verdict   MasqVerdict
}

func (f fate) String() string {
	family := "IPv4"
	if f.v6 {
		family = "IPv6"
	}
	direction := "egress"
	if f.direction == ingress {
		direction = "ingress"
	}
	return direction + " " + family + " " + verdictName(f.verdict)
}

// contract is the object file as it was read once.
var contract = sync.OnceValues(LoadMasq)

func verdictName(v MasqVerdict) string {
	spec, err := contract()
	if err != nil {
		return err.Error()
	}
	var enum *btf.Enum
	if err := spec.Types.TypeByName("verdict", &enum); err != nil {
		return err.Error()
	}
	for _, value := range enum.Values {
		if value.Value == uint64(v) {
			return value.Name
		}
	}
	return fmt.Sprintf("verdict %d", v)
}

func spec(t testing.TB, c config) *ebpf.CollectionSpec {
	t.Helper()
	loaded, err := contract()
	if err != nil {
		t.Fatal(err)
	}
	spec := loaded.Copy()
	for name, value := range map[string]any{
		MasqVarCfgSlot:        c.slot,
		MasqVarCfgIpv6:        !c.noIPv6,
		MasqVarCfgRandomFully: c.randomFully,
		MasqVarCfgDropInvalid: !c.passInvalid,
		MasqVarCfgTcpLoose:    !c.strictTCP,
		MasqVarCfgDirect:      !c.noDirect,
		MasqVarCfgCtinfo:      c.ctinfo,
		MasqVarCfgCtLookup:    c.ctLookup,
		MasqVarCfgFastPath:    c.fastPath,
		MasqVarCfgCoarseClock: c.ctinfo, // both are of newer kernels
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			t.Fatalf("set %s: %v", name, err)
		}
	}
	return spec
}

// borrowed are the datapaths that tests hand to each other, by what was asked.
var borrowed = map[string]*datapath{}

// borrow returns an empty datapath. Another test had it before: loading takes
// long.
func borrow(t testing.TB, c config, programs ...string) *datapath {
	t.Helper()
	key := fmt.Sprint(c, programs)
	d, ok := borrowed[key]
	if !ok {
		d = build(t, c, programs)
		borrowed[key] = d
	}
	d.forget(t, c)
	return d
}

// load returns a datapath that no test had or will have.
func load(t testing.TB, c config, programs ...string) *datapath {
	t.Helper()
	d := build(t, c, programs)
	t.Cleanup(func() {
		d.coll.Close()
		if err := d.Close(); err != nil {
			t.Error("close maps:", err)
		}
	})
	d.fill(c)
	return d
}

// build makes a datapath with the programs of an uplink and those named.
func build(t testing.TB, c config, programs []string) *datapath {
	t.Helper()
	s := spec(t, c)
	shrink(s, c)
	wanted := append([]string{MasqProgMasqEgress, MasqProgMasqIngress}, programs...)
	for name := range s.Programs {
		if !slices.Contains(wanted, name) {
			delete(s.Programs, name)
		}
	}
	coll, err := ebpf.NewCollection(s)
	if err != nil {
		if verifier, ok := errors.AsType[*ebpf.VerifierError](err); ok {
			t.Fatalf("load: %+v", verifier)
		}
		t.Fatalf("load: %v", err)
	}
	d := &datapath{
		TB:       t,
		programs: [...]*ebpf.Program{coll.Programs[MasqProgMasqEgress], coll.Programs[MasqProgMasqIngress]},
		coll:     coll,
		counted:  map[fate]MasqCounter{},
		ifindex:  loopbackIndex,
		out:      make([]byte, 4096),
	}
	if err := coll.Assign(&d.MasqMaps); err != nil {
		t.Fatalf("assign maps: %v", err)
	}
	return d
}

// shrink keeps tests quick: maps that are allocated beforehand cost most.
func shrink(s *ebpf.CollectionSpec, c config) {
	flows := cmp.Or(c.flows, 4096)
	reverses := cmp.Or(c.reverses, flows)
	s.Maps[MasqMapFlowsV4].MaxEntries, s.Maps[MasqMapFlowsV6].MaxEntries = flows, flows
	s.Maps[MasqMapReverseV4].MaxEntries, s.Maps[MasqMapReverseV6].MaxEntries = reverses, reverses
	for _, name := range []string{
		MasqMapInboundV4, MasqMapInboundV6, MasqMapFragmentsV4, MasqMapFragmentsV6,
		MasqMapNodeV4, MasqMapNodeV6, MasqMapTalkersV4, MasqMapTalkersV6, MasqMapWaysV4, MasqMapWaysV6,
	} {
		s.Maps[name].MaxEntries = 512
	}
}

func (d *datapath) put(m *ebpf.Map, key, value any) {
	d.Helper()
	if err := m.Put(key, value); err != nil {
		d.Fatalf("write %s: %v", m, err)
	}
}

// fill writes what the agent would: one uplink, the address of which is the
// node's, and everything behind it in the non-masquerade CIDRs.
func (d *datapath) fill(c config) {
	d.Helper()
	d.uplink(c.slot, c)
	for state, seconds := range kernelTimeouts {
		d.timeout(MasqFlowState(state), seconds)
	}
	pool := c.ports
	if pool == nil {
		pool = classPorts()
	}
	d.put(d.PortPool, uint32(0), pool)
	for _, h := range families {
		d.cidr(h.inside, MasqCidrVerdictCIDR_KEEP)
		d.nodeAddress(h.node, MasqNodeAddressNODE_ADDRESS_LOCAL)
		d.nodeAddress(h.secondary, MasqNodeAddressNODE_ADDRESS_LOCAL)
	}
	d.nodeAddress(v4.broadcast, MasqNodeAddressNODE_ADDRESS_BROADCAST)
}

// kernelTimeouts are the kernel's defaults by state, in seconds.
var kernelTimeouts = [MasqFlowStateFLOW_STATE_COUNT]uint32{
	MasqFlowStateFLOW_TCP_SYN_SENT:       120,
	MasqFlowStateFLOW_TCP_SYN_RECV:       60,
	MasqFlowStateFLOW_TCP_ESTABLISHED:    432000,
	MasqFlowStateFLOW_TCP_FIN_WAIT:       120,
	MasqFlowStateFLOW_TCP_CLOSE_WAIT:     60,
	MasqFlowStateFLOW_TCP_LAST_ACK:       30,
	MasqFlowStateFLOW_TCP_TIME_WAIT:      120,
	MasqFlowStateFLOW_TCP_CLOSE:          10,
	MasqFlowStateFLOW_TCP_UNACKNOWLEDGED: 300,
	MasqFlowStateFLOW_UDP:                30,
	MasqFlowStateFLOW_UDP_STREAM:         120,
	MasqFlowStateFLOW_ICMP:               30,
	MasqFlowStateFLOW_ICMPV6:             30,
	MasqFlowStateFLOW_SCTP:               210,
	MasqFlowStateFLOW_GENERIC:            600,
}

func (d *datapath) timeout(state MasqFlowState, seconds uint32) {
	d.Helper()
	d.put(d.Timeouts, uint32(state), seconds)
}

// uplink describes the device that packets cross.
func (d *datapath) uplink(slot uint32, c config) {
	d.Helper()
	value := MasqUplink{
		Ifindex: d.ifindex,
		Mac:     uplinkMAC,
		AddrV4:  be32(v4.node),
		AddrV6:  be128(v6.node),
	}
	if !c.noHeader {
		value.L2Len = ethernetLength
		value.Flags |= uint8(MasqUplinkFlagUPLINK_ETHERNET)
	}
	if c.tagged {
		value.Flags |= uint8(MasqUplinkFlagUPLINK_TAGGED)
	}
	if !c.noAddress && !c.byRule {
		value.Flags |= uint8(MasqUplinkFlagUPLINK_ONE_V4 | MasqUplinkFlagUPLINK_ONE_V6)
	}
	d.put(d.Uplinks, slot, &value)
}

func (d *datapath) cidr(p netip.Prefix, verdict MasqCidrVerdict) {
	d.Helper()
	if p.Addr().Is4() {
		d.put(d.NonmasqV4, &MasqCidrV4{Prefixlen: uint32(p.Bits()), Addr: p.Addr().As4()}, uint32(verdict))
		return
	}
	d.put(d.NonmasqV6, &MasqCidrV6{Prefixlen: uint32(p.Bits()), Addr: p.Addr().As16()}, uint32(verdict))
}

// draining keeps the open flows towards a prefix for some seconds.
func (d *datapath) draining(p netip.Prefix, seconds int64) {
	d.Helper()
	until := uint64(int64(monotonic()) + seconds*1e9)
	if p.Addr().Is4() {
		d.put(d.DrainingV4, &MasqCidrV4{Prefixlen: uint32(p.Bits()), Addr: p.Addr().As4()}, until)
		return
	}
	d.put(d.DrainingV6, &MasqCidrV6{Prefixlen: uint32(p.Bits()), Addr: p.Addr().As16()}, until)
}

func (d *datapath) nodeAddress(a netip.Addr, kind MasqNodeAddress) {
	d.Helper()
	if a.Is4() {
		d.put(d.NodeV4, be32(a), uint32(kind))
		return
	}
	d.put(d.NodeV6, be128(a), uint32(kind))
}

// addressRule lets packets to a next hop (IPv4) or destination (IPv6) leave
// with an address.
func (d *datapath) addressRule(to netip.Prefix, addr netip.Addr) {
	d.Helper()
	ifindex := htonl(d.ifindex)
	bits := 32 + uint32(to.Bits())
	if addr.Is4() {
		d.put(d.AddressesV4, &MasqAddressRuleV4{Prefixlen: bits, Ifindex: ifindex, Addr: to.Addr().As4()}, be32(addr))
		return
	}
	d.put(d.AddressesV6, &MasqAddressRuleV6{Prefixlen: bits, Ifindex: ifindex, Addr: to.Addr().As16()}, be128(addr))
}

// classPorts is the pool of a node that has no wishes.
func classPorts() *MasqPortPool {
	return portPool([MasqPortClassIdPORT_CLASS_COUNT][2]int{{1, 511}, {600, 1023}, {1024, 65535}})
}

// onlyPorts is the pool of a node with one range for ports of every class.
func onlyPorts(first, last int) *MasqPortPool {
	one := [2]int{first, last}
	return portPool([MasqPortClassIdPORT_CLASS_COUNT][2]int{one, one, one})
}

func portPool(ranges [MasqPortClassIdPORT_CLASS_COUNT][2]int) *MasqPortPool {
	pool, next, known := &MasqPortPool{}, 0, map[[2]int]uint32{}
	for class, r := range ranges {
		first, ok := known[r]
		if !ok {
			first = uint32(next)
			known[r] = first
			for port := r[0]; port <= r[1]; port++ {
				pool.Ports[next] = uint16(port)
				pool.Allowed[port>>6] |= 1 << (port & 63)
				next++
			}
		}
		pool.Classes[class].First = first
		pool.Classes[class].Count = uint32(r[1] - r[0] + 1)
	}
	return pool
}
