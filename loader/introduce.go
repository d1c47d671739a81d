// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
)

// Attributes of ctnetlink (linux/netfilter/nfnetlink_conntrack.h) and bits of
// nf_conntrack_common.h and nf_conntrack_tcp.h that nl lacks.
const (
	ctaProtoICMPID   = 4 // type and code follow; those of ICMPv6 are three further
	ctaProtoICMPv6ID = 7

	tcpBeLiberal = 0x08 // IP_CT_TCP_FLAG_BE_LIBERAL

	statusSeenReply = 1 << 1
	statusAssured   = 1 << 2
	statusConfirmed = 1 << 3 // refused without: an entry is made confirmed
)

// Introduce makes conntrack know the live flows of a family, as connections that
// netfilter does not translate. It is for the moment before netfilter starts to
// translate: the first packet that conntrack saw of such a flow would open
// another one, with another outside tuple.
//
// nf_nat_setup_info() leaves alone what is confirmed, as these entries are, so
// that the programs go on translating them. Flows that conntrack knows stay as
// they are. It gives how many flows there are. Without pins there are none.
func Introduce(opts Options, ipv6 bool) (flows int, err error) {
	_, err = withPins(opts.PinPath, false, func(p *pins) error {
		f := p.family(ipv6)
		if f == nil {
			return nil
		}
		timeouts, err := readTimeouts(p.maps[bpf.MasqMapTimeouts])
		if err != nil {
			return err
		}
		ct, err := openConntrack()
		if err != nil {
			return err
		}
		defer ct.close()
		flows, err = f.introduce(ct, timeouts)
		return err
	})
	return flows, err
}

func (f *family) introduce(ct *conntrack, timeouts []time.Duration) (flows int, err error) {
	now := monotonic()
	var failed error
	err = f.eachFlow(func(e *flow) {
		left := e.left(timeouts, now)
		if left <= 0 || e.proto(f.is6) == unix.IPPROTO_SCTP {
			return // conntrack takes SCTP under way for invalid, which leaves it to us
		}
		flows++
		if err := ct.add(e.entry(f.is6, left)); err != nil && !errors.Is(err, fs.ErrExist) && failed == nil {
			failed = fmt.Errorf("tell conntrack of a flow: %w", err)
		}
	})
	return flows, errors.Join(err, failed)
}

// left is how long a flow has to live if no packet comes; not positive: it is
// dead.
func (e *flow) left(timeouts []time.Duration, now uint64) time.Duration {
	if e.dying {
		return 0
	}
	idle := max(0, time.Duration(int64(now)-int64(e.lastSeen)))
	return timeouts[e.state] + lastSeenGranularity - idle
}

// lastSeenGranularity is how old last_seen may be: see bpf/nat.h.
const lastSeenGranularity = time.Second

// conntrack is a connection to ctnetlink. Its errors are those of the kernel.
type conntrack struct{ sockets map[int]*nl.SocketHandle }

func openConntrack() (*conntrack, error) {
	socket, err := nl.Subscribe(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open ctnetlink: %w", err)
	}
	return &conntrack{map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: {Socket: socket}}}, nil
}

func (c *conntrack) close() { c.sockets[unix.NETLINK_NETFILTER].Close() }

// add makes an entry. fs.ErrExist: one of its two tuples is known.
func (c *conntrack) add(e ctEntry) error {
	attributes := []*nl.RtAttr{
		e.original.attribute(nl.CTA_TUPLE_ORIG),
		e.reply().attribute(nl.CTA_TUPLE_REPLY),
		nl.NewRtAttr(nl.CTA_STATUS, nl.BEUint32Attr(statusSeenReply|statusAssured|statusConfirmed)),
		nl.NewRtAttr(nl.CTA_TIMEOUT, nl.BEUint32Attr(uint32(max(1, e.left/time.Second)))),
	}
	if e.original.proto == unix.IPPROTO_TCP {
		attributes = append(attributes, e.tcp())
	}
	return c.execute(nl.IPCTNL_MSG_CT_NEW, unix.NLM_F_CREATE|unix.NLM_F_EXCL, e.original, attributes...)
}

// forget deletes the entry that a tuple is of, if there is one.
func (c *conntrack) forget(original ctTuple) error {
	err := c.execute(nl.IPCTNL_MSG_CT_DELETE, 0, original, original.attribute(nl.CTA_TUPLE_ORIG))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (c *conntrack) execute(message, flags int, of ctTuple, attributes ...*nl.RtAttr) error {
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|message, unix.NLM_F_ACK|flags)
	request.Sockets = c.sockets
	request.AddData(&nl.Nfgenmsg{NfgenFamily: of.family(), Version: nl.NFNETLINK_V0})
	for _, a := range attributes {
		request.AddData(a)
	}
	_, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	return err
}

// ctEntry is what conntrack is to know of a flow.
type ctEntry struct {
	original ctTuple
	state    bpf.MasqFlowState
	left     time.Duration
}

// ctTuple is a tuple as the datapath has it: for ICMP the identifier is the
// source port, and the question's type the other.
type ctTuple struct {
	src, dst     []byte // 4 or 16 octets
	sport, dport uint16
	proto        uint8
}

func (t ctTuple) family() uint8 {
	if len(t.src) == 4 {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// reply is the tuple of the answers, of ICMP the answer's type.
func (e ctEntry) reply() ctTuple {
	o := e.original
	r := ctTuple{src: o.dst, dst: o.src, sport: o.dport, dport: o.sport, proto: o.proto}
	switch o.proto {
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		r.sport, r.dport = o.sport, o.dport+1
		if o.proto == unix.IPPROTO_ICMP && o.dport == icmpEcho {
			r.dport = icmpEchoReply
		}
	}
	return r
}

const (
	icmpEcho      = 8
	icmpEchoReply = 0
)

// tcp has conntrack begin in the flow's state and, since it knows no windows,
// judge none. The states have the numbers of enum tcp_conntrack.
func (e ctEntry) tcp() *nl.RtAttr {
	state := e.state
	if state == bpf.MasqFlowStateFLOW_TCP_UNACKNOWLEDGED {
		state = bpf.MasqFlowStateFLOW_TCP_ESTABLISHED
	}
	info := nl.NewRtAttr(unix.NLA_F_NESTED|nl.CTA_PROTOINFO, nil)
	tcp := info.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_PROTOINFO_TCP, nil)
	tcp.AddRtAttr(nl.CTA_PROTOINFO_TCP_STATE, nl.Uint8Attr(uint8(state)))
	for _, side := range []int{nl.CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, nl.CTA_PROTOINFO_TCP_FLAGS_REPLY} {
		tcp.AddRtAttr(side, []byte{tcpBeLiberal, tcpBeLiberal}) // flags, mask
	}
	return info
}

func (t ctTuple) attribute(kind int) *nl.RtAttr {
	tuple := nl.NewRtAttr(unix.NLA_F_NESTED|kind, nil)
	src, dst := nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST
	if len(t.src) == 16 {
		src, dst = nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	}
	addresses := tuple.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_IP, nil)
	addresses.AddRtAttr(src, t.src)
	addresses.AddRtAttr(dst, t.dst)
	proto := tuple.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_PROTO, nil)
	proto.AddRtAttr(nl.CTA_PROTO_NUM, nl.Uint8Attr(t.proto))
	id := ctaProtoICMPID
	switch t.proto {
	case unix.IPPROTO_ICMPV6:
		id = ctaProtoICMPv6ID
		fallthrough
	case unix.IPPROTO_ICMP:
		proto.AddRtAttr(id, nl.BEUint16Attr(t.sport))
		proto.AddRtAttr(id+1, nl.Uint8Attr(uint8(t.dport)))
		proto.AddRtAttr(id+2, nl.Uint8Attr(0)) // the code
	default:
		proto.AddRtAttr(nl.CTA_PROTO_SRC_PORT, nl.BEUint16Attr(t.sport))
		proto.AddRtAttr(nl.CTA_PROTO_DST_PORT, nl.BEUint16Attr(t.dport))
	}
	return tuple
}

// entry is the flow for conntrack.
func (e *flow) entry(is6 bool, left time.Duration) ctEntry {
	return ctEntry{original: e.tuple(is6), state: e.state, left: left}
}

// tuple is what the pod sends.
func (e *flow) tuple(is6 bool) ctTuple {
	if is6 {
		k := &e.key6
		return ctTuple{fromAddr6(k.Saddr).AsSlice(), fromAddr6(k.Daddr).AsSlice(), be16(k.Sport), be16(k.Dport), k.Proto}
	}
	k := &e.key4
	return ctTuple{fromAddr4(k.Saddr).AsSlice(), fromAddr4(k.Daddr).AsSlice(), be16(k.Sport), be16(k.Dport), k.Proto}
}

func (e *flow) proto(is6 bool) uint8 {
	if is6 {
		return e.key6.Proto
	}
	return e.key4.Proto
}
