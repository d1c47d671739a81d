//go:build ignore
// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/*
 * The source NAT of the eBPF datapath: one program for each direction of an
 * uplink. Read egress_verdict() and ingress_verdict() first.
 */

#include "masq.h"
#include "maps.h"
#include "parse.h"
#include "policy.h"
#include "nat.h"
#include "rewrite.h"
#include "conntrack.h"
#include "alloc.h"
#include "frag.h"
#include "icmp.h"
#include "stats.h"

/* Keeps the enums that no map mentions in the BTF, where bpf2go finds them. */
const volatile struct {
	enum limit limit;
	enum family family;
	enum direction direction;
	enum verdict verdict;
	enum flow_state flow_state;
	enum uplink_flag uplink_flag;
	enum port_class_id port_class_id;
	struct sweep_request sweep_request;
} contract;

/* Gives the packet what its flow has. */
static __always_inline enum verdict
translate_source(struct __sk_buff *skb, const struct packet *pkt,
		 const enum family family, const union address *addr,
		 __be16 port, enum verdict verdict)
{
	if (rewrite(skb, pkt, family, SIDE_SOURCE, addr, port))
		return VERDICT_DROP_UNSUPPORTED;
	return verdict;
}

/*
 * A flow that was there keeps what it got, whatever the configuration says
 * today. A flow that now leaves through another uplink does not: its address
 * would be wrong there (nf_nat_oif_changed()).
 */
static __always_inline enum verdict existing_flow(struct __sk_buff *skb,
						  const struct packet *pkt,
						  const enum family family,
						  __u64 now)
{
	union address addr;
	struct flow *flow;
	__be16 port;

	if (!(pkt->flags & PACKET_PORTS) || pkt->flags & PACKET_REPLY)
		return VERDICT_UNDECIDED;
	flow = find_flow(&pkt->tuple, family);
	if (!flow)
		return VERDICT_UNDECIDED;
	if (!alive(flow, now) || flow->ifindex != skb->ifindex) {
		end_flow(flow, flow->last_seen, &pkt->tuple, family);
		return VERDICT_UNDECIDED;
	}
	refresh(flow, pkt, now, DIRECTION_EGRESS);
	nat_address(flow, family, &addr);
	port = flow->nat_port;
	return translate_source(skb, pkt, family, &addr, port,
				VERDICT_TRANSLATED);
}

/*
 * Whether a packet of the node's own has an outside tuple that a pod's flow
 * holds: then it is moved, as netfilter does.
 */
static __always_inline bool clashes(const struct packet *pkt,
				    const enum family family, __u64 now)
{
	struct origin origin;
	struct flow *flow;
	union tuple reply;

	if (!(pkt->flags & PACKET_PORTS) || pkt->flags & PACKET_REPLY)
		return false;
	mirror(&pkt->tuple, &reply, family);
	if (!find_origin(&reply, family, &origin))
		return false;
	flow = find_flow(&origin.tuple, family);
	return flow && alive(flow, now);
}

/*
 * A packet that cannot open a flow, towards a masqueraded destination, that no
 * flow and no connection accounts for. The node's own are left alone.
 */
static __always_inline enum verdict stray(const struct packet *pkt,
					  const enum family family)
{
	const enum node_address *kind;
	union address addr;

	source(pkt, family, &addr);
	kind = node_address(&addr, family);
	if (kind && *kind == NODE_ADDRESS_LOCAL)
		return VERDICT_KEEP_NODE;
	if (pkt->flags & PACKET_LATER)
		return VERDICT_DROP_FRAGMENT;
	return cfg_drop_invalid ? VERDICT_DROP_INVALID : VERDICT_PASS_INVALID;
}

static __always_inline bool is_broadcast(const union address *addr,
					 const enum family family)
{
	const enum node_address *kind = node_address(addr, family);

	return kind && *kind == NODE_ADDRESS_BROADCAST;
}

/*
 * A reply of a connection from outside, or a packet of an open flow whose CIDR
 * was exempt until recently. conntrack proves replies and nothing else: an
 * established flow in original direction may be one whose translation died.
 * Our notes do not excuse the node's own packets: those need no excuse but when
 * they clash with a pod's flow.
 */
static __always_inline enum verdict
older_than_us(struct __sk_buff *skb, struct scratch *s,
	      const union address *dst, bool own, const enum family family,
	      __u64 now)
{
	struct packet *pkt = &s->packet;
	enum conntrack_view view;
	bool first;

	if (opens_tcp(pkt))
		return VERDICT_UNDECIDED;
	view = conntrack_view(skb, pkt, family);
	if (view == CONNTRACK_REPLY)
		return VERDICT_KEEP_REPLY;
	if (!own && view != CONNTRACK_NEW && answers_inbound(s, family, now))
		return VERDICT_KEEP_REPLY;
	first = view == CONNTRACK_NEW ||
		(view == CONNTRACK_UNKNOWN && pkt->proto != IPPROTO_TCP);
	if (!first && cidr_drains(dst, family, now))
		return VERDICT_KEEP_DRAINING;
	return VERDICT_UNDECIDED;
}

/*
 * A packet towards a masqueraded destination that no flow accounts for, with a
 * source that is not what it should be, or is but clashes: the last questions,
 * then a new flow.
 */
static __always_inline enum verdict unknown_flow(struct __sk_buff *skb,
						 const enum family family)
{
	const struct uplink *uplink = this_uplink();
	struct scratch *s = this_scratch();
	__u64 now = bpf_ktime_get_ns();
	union address src, dst;
	enum verdict verdict;
	struct packet *pkt;
	bool usable, own;

	if (!s || !uplink)
		return VERDICT_NOT_IP;
	pkt = &s->packet;
	source(pkt, family, &src);
	destination(pkt, family, &dst);
	usable = masquerade_address(skb, pkt, family, uplink, &s->addr);
	own = usable && same_address(&src, &s->addr, family);
	verdict = older_than_us(skb, s, &dst, own, family, now);
	if (verdict)
		return verdict;
	if (!(pkt->flags & PACKET_PORTS) || !may_open(pkt, family))
		return stray(pkt, family);
	if (is_broadcast(&dst, family))
		return VERDICT_EXEMPT;
	if (!usable)
		return VERDICT_DROP_NO_ADDRESS;
	verdict = open_flow(skb, s, family, now);
	if (verdict >= VERDICT_DROP_FIRST)
		return verdict;
	return translate_source(skb, pkt, family, &s->addr, s->port, verdict);
}

/* Global functions: the verifier looks at each once, not once a call. */
__noinline int unknown_flow_v4(struct __sk_buff *skb)
{
	return unknown_flow(skb, FAMILY_V4);
}

__noinline int unknown_flow_v6(struct __sk_buff *skb)
{
	return unknown_flow(skb, FAMILY_V6);
}

__noinline int error_leaves_v4(struct __sk_buff *skb)
{
	return icmp_error_egress(skb, FAMILY_V4);
}

__noinline int error_leaves_v6(struct __sk_buff *skb)
{
	return icmp_error_egress(skb, FAMILY_V6);
}

__noinline int error_arrives_v4(struct __sk_buff *skb)
{
	return icmp_error_ingress(skb, FAMILY_V4);
}

__noinline int error_arrives_v6(struct __sk_buff *skb)
{
	return icmp_error_ingress(skb, FAMILY_V6);
}

/* The node's own packets that have the address they should have. */
static __always_inline bool nodes_own(struct __sk_buff *skb,
				      const struct packet *pkt,
				      const enum family family,
				      const struct uplink *uplink, __u64 now)
{
	union address src, addr;

	source(pkt, family, &src);
	return masquerade_address(skb, pkt, family, uplink, &addr) &&
	       same_address(&src, &addr, family) && !clashes(pkt, family, now);
}

/* Reads the packet. VERDICT_UNDECIDED: it is one for us. */
static __always_inline enum verdict
read_packet(struct __sk_buff *skb, struct packet *pkt, const enum family family,
	    const struct uplink *uplink, const enum direction direction,
	    __u64 now)
{
	enum verdict verdict;

	if (of_vlan(skb))
		return VERDICT_FOREIGN;
	__builtin_memset(pkt, 0, sizeof(*pkt));
	verdict = parse(skb, pkt, family, uplink->l2_len);
	if (verdict)
		return verdict;
	if (exempt(pkt, family))
		return VERDICT_EXEMPT;
	if (direction == DIRECTION_EGRESS && foreign_source_mac(skb, uplink))
		return VERDICT_FOREIGN;
	fragment_ports(pkt, family, direction, now);
	return VERDICT_UNDECIDED;
}

static __always_inline enum verdict egress_verdict(struct __sk_buff *skb,
						   const enum family family)
{
	const struct uplink *uplink = this_uplink();
	struct scratch *s = this_scratch();
	__u64 now = bpf_ktime_get_ns();
	enum verdict verdict;
	struct packet *pkt;
	union address dst;

	if (!uplink || !s)
		return VERDICT_NOT_IP;
	pkt = &s->packet;
	verdict = read_packet(skb, pkt, family, uplink, DIRECTION_EGRESS, now);
	if (verdict)
		return verdict;
	if (pkt->flags & PACKET_ERROR)
		verdict = family == FAMILY_V4 ? error_leaves_v4(skb) :
						error_leaves_v6(skb);
	else
		verdict = existing_flow(skb, pkt, family, now);
	if (verdict)
		return verdict;
	destination(pkt, family, &dst);
	if (cidr_keeps(&dst, family))
		return VERDICT_KEEP_CIDR;
	if (nodes_own(skb, pkt, family, uplink, now))
		return VERDICT_KEEP_NODE;
	return family == FAMILY_V4 ? unknown_flow_v4(skb) :
				     unknown_flow_v6(skb);
}

/* Gives a reply the address and port of the pod that it is for. */
static __always_inline enum verdict reply_of_flow(struct __sk_buff *skb,
						  const struct packet *pkt,
						  const enum family family,
						  __u64 now)
{
	struct origin origin;
	union address addr;
	struct flow *flow;

	if (!(pkt->flags & PACKET_PORTS) || pkt->flags & PACKET_QUERY)
		return VERDICT_UNDECIDED;
	if (!find_origin(&pkt->tuple, family, &origin))
		return VERDICT_UNDECIDED;
	flow = find_flow(&origin.tuple, family);
	if (!flow || !alive(flow, now))
		return VERDICT_UNDECIDED;
	refresh(flow, pkt, now, DIRECTION_INGRESS);
	tuple_source(&origin.tuple, family, &addr);
	if (rewrite(skb, pkt, family, SIDE_DESTINATION, &addr,
		    port_of(&origin.tuple, family, SIDE_SOURCE)))
		return VERDICT_DROP_UNSUPPORTED;
	return VERDICT_TRANSLATED;
}

/* Whether replies from addr leave with it as the node's own, and need no note.
 */
static __always_inline bool is_only_address(const struct uplink *uplink,
					    const union address *addr,
					    const enum family family)
{
	union address only;

	if (family == FAMILY_V4) {
		only.v4 = uplink->addr_v4;
		return uplink->flags & UPLINK_ONE_V4 &&
		       same_address(addr, &only, family);
	}
	__builtin_memcpy(only.v6, uplink->addr_v6, 16);
	return uplink->flags & UPLINK_ONE_V6 &&
	       same_address(addr, &only, family);
}

/*
 * A packet that is no reply of ours. If its answers would be masqueraded, note
 * what it opens: a connection to a pod, to an address that the node passes on,
 * or to one of the node's that MASQUERADE would not pick.
 */
static __always_inline enum verdict from_outside(const struct packet *pkt,
						 const enum family family,
						 const struct uplink *uplink,
						 __u64 now)
{
	union address src, dst;

	destination(pkt, family, &dst);
	source(pkt, family, &src);
	if (is_only_address(uplink, &dst, family) ||
	    is_broadcast(&dst, family) || cidr_keeps(&src, family))
		return VERDICT_NO_FLOW;
	return note_inbound(pkt, family, now) ? VERDICT_INBOUND :
						VERDICT_NO_FLOW;
}

static __always_inline enum verdict ingress_verdict(struct __sk_buff *skb,
						    const enum family family)
{
	const struct uplink *uplink = this_uplink();
	struct scratch *s = this_scratch();
	__u64 now = bpf_ktime_get_ns();
	enum verdict verdict;
	struct packet *pkt;

	if (!uplink || !s)
		return VERDICT_NOT_IP;
	pkt = &s->packet;
	verdict = read_packet(skb, pkt, family, uplink, DIRECTION_INGRESS, now);
	if (verdict)
		return verdict;
	if (pkt->flags & PACKET_ERROR)
		verdict = family == FAMILY_V4 ? error_arrives_v4(skb) :
						error_arrives_v6(skb);
	else
		verdict = reply_of_flow(skb, pkt, family, now);
	if (verdict)
		return verdict;
	return from_outside(pkt, family, uplink, now);
}

SEC("tc")
int masq_egress(struct __sk_buff *skb)
{
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return finish(skb, DIRECTION_EGRESS, FAMILY_V4,
			      egress_verdict(skb, FAMILY_V4));
	if (cfg_ipv6 && skb->protocol == bpf_htons(ETH_P_IPV6))
		return finish(skb, DIRECTION_EGRESS, FAMILY_V6,
			      egress_verdict(skb, FAMILY_V6));
	return TC_ACT_UNSPEC;
}

SEC("tc")
int masq_ingress(struct __sk_buff *skb)
{
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return finish(skb, DIRECTION_INGRESS, FAMILY_V4,
			      ingress_verdict(skb, FAMILY_V4));
	if (cfg_ipv6 && skb->protocol == bpf_htons(ETH_P_IPV6))
		return finish(skb, DIRECTION_INGRESS, FAMILY_V6,
			      ingress_verdict(skb, FAMILY_V6));
	return TC_ACT_UNSPEC;
}

SEC("tc")
int sweep_v4(struct __sk_buff *skb)
{
	return sweep(skb, FAMILY_V4);
}

SEC("tc")
int sweep_v6(struct __sk_buff *skb)
{
	return sweep(skb, FAMILY_V6);
}

/* Loaded to learn whether the kernel lets us: see loader's probes. */
SEC("tc")
int probe_ctinfo(struct __sk_buff *skb)
{
	return ctinfo_view(skb);
}

SEC("tc")
int probe_ct_lookup(struct __sk_buff *skb)
{
	union tuple tuple = {};

	return conntrack_lookup(skb, &tuple, skb->mark, FAMILY_V4);
}

char _license[] SEC("license") = "Dual BSD/GPL";
