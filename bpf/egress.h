/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_EGRESS_H
#define MASQ_EGRESS_H

/* The rules for packets that leave, in the order in which they are asked. */

#include "alloc.h"
#include "clock.h"
#include "conntrack.h"
#include "fastpath.h"
#include "icmp.h"
#include "nat.h"
#include "packet.h"
#include "policy.h"
#include "rewrite.h"
#include "stats.h"
#include "sticky.h"
#include "talker.h"

/*
 * Gives the packet scratch.addr and port, those of its flow: the node's own may
 * have them already.
 */
static __always_inline enum verdict translate_source(struct __sk_buff *skb,
						     const struct scratch *s,
						     const enum family family,
						     enum verdict verdict)
{
	const struct packet *pkt = &s->packet;
	union address src;

	source(pkt, family, &src);
	if (same_address(&src, &s->addr, family) &&
	    s->port == port_of(&pkt->tuple, family, SIDE_SOURCE))
		return verdict == VERDICT_OPENED ? VERDICT_NODE_OPENED :
						   VERDICT_KEEP_NODE;
	if (rewrite(skb, family, SIDE_SOURCE))
		return VERDICT_DROP_UNSUPPORTED;
	return verdict;
}

/*
 * A flow that was there keeps what it got, whatever the configuration says
 * today. A flow that now leaves through another uplink does not: its address
 * would be wrong there (nf_nat_oif_changed()).
 */
static __always_inline enum verdict
existing_flow(struct __sk_buff *skb, struct scratch *s,
	      const struct uplink *uplink, const enum family family, __u64 now)
{
	const struct packet *pkt = &s->packet;
	struct flow *flow;
	__u64 last_seen;

	if (!(pkt->flags & PACKET_PORTS) || pkt->flags & PACKET_REPLY)
		return VERDICT_UNDECIDED;
	flow = find_flow(&pkt->tuple, family);
	if (!flow)
		return VERDICT_UNDECIDED;
	last_seen = flow->last_seen;
	if (!alive_since(flow, last_seen, now)) {
		end_flow(last_seen, &pkt->tuple, family);
		s->ended = true;
		return VERDICT_UNDECIDED;
	}
	if (flow->ifindex != skb->ifindex) {
		end_flow(last_seen, &pkt->tuple, family);
		s->ended = true;
		return VERDICT_UNDECIDED;
	}
	nat_address(flow, family, &s->addr);
	s->port = flow->nat_port;
	if (refresh(flow, pkt, now, DIRECTION_EGRESS))
		note_talker(pkt, &s->addr, family, now);
	note_way_out(skb, flow, pkt, uplink, family);
	return translate_source(skb, s, family, VERDICT_TRANSLATED);
}

/*
 * Whether a packet of the node's own has an outside tuple that a pod's flow
 * holds: then it is moved, as netfilter does.
 */
static __always_inline bool clashes(struct scratch *s, const enum family family,
				    __u64 now)
{
	const struct packet *pkt = &s->packet;

	if (!(pkt->flags & PACKET_PORTS) || pkt->flags & PACKET_REPLY)
		return false;
	mirror(&pkt->tuple, &s->reply, family);
	return flow_of_reply(&s->reply, &s->origin, family, now);
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
	      const union address *dst, const enum family family, __u64 now)
{
	struct packet *pkt = &s->packet;
	enum conntrack_view view;
	bool first;

	if (opens_tcp(pkt))
		return VERDICT_UNDECIDED;
	view = conntrack_view(skb, pkt, family);
	if (view == CONNTRACK_REPLY)
		return VERDICT_KEEP_REPLY;
	if (view != CONNTRACK_NEW && !has_own_address(s, family) &&
	    answers_inbound(s, family, now))
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
	struct scratch *s = this_scratch();
	__u64 now = clock_ns();
	enum verdict verdict;
	struct packet *pkt;
	union address dst;

	if (!s)
		return VERDICT_NOT_IP;
	pkt = &s->packet;
	destination(pkt, family, &dst);
	verdict = older_than_us(skb, s, &dst, family, now);
	if (verdict)
		return verdict;
	if (!(pkt->flags & PACKET_PORTS) || !may_open(pkt, family))
		return stray(pkt, family);
	if (is_broadcast(&dst, family))
		return VERDICT_EXEMPT;
	verdict = s->usable ? open_flow(skb, s, family, now) :
			      VERDICT_DROP_NO_ADDRESS;
	if (verdict >= VERDICT_DROP_FIRST) {
		tell(skb, s, family, verdict, now);
		return verdict;
	}
	note_talker(pkt, &s->addr, family, now);
	return translate_source(skb, s, family, verdict);
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

/*
 * Whether a tuple of the node's own is safe from pods without an entry: ports
 * of TCP and UDP are looked up among its sockets. Anything else of the node's
 * has to take its place like a pod's, or a pod could have it.
 */
static __always_inline bool has_sockets(const struct packet *pkt,
					const enum family family)
{
	return pkt->proto == IPPROTO_TCP || pkt->proto == IPPROTO_UDP ||
	       !(pkt->flags & PACKET_PORTS) || !may_open(pkt, family);
}

/* The node's own packets that have the address they should have. */
static __always_inline bool nodes_own(struct __sk_buff *skb, struct scratch *s,
				      const enum family family,
				      const struct uplink *uplink, __u64 now)
{
	s->usable =
		masquerade_address(skb, &s->packet, family, uplink, &s->addr);
	return has_own_address(s, family) && has_sockets(&s->packet, family) &&
	       !clashes(s, family, now);
}

/*
 * What an uplink that opens no flows any more does not touch: netfilter has
 * translated it, or decided not to. But a packet that has a pod's outside tuple
 * is moved as ever, and one whose flow has just ended is given another:
 * netfilter knows that flow as one that it does not translate.
 */
static __always_inline bool
left_to_others(struct __sk_buff *skb, struct scratch *s,
	       const enum family family, const struct uplink *uplink, __u64 now)
{
	if (s->ended)
		return false;
	s->usable =
		masquerade_address(skb, &s->packet, family, uplink, &s->addr);
	return !has_own_address(s, family) || !clashes(s, family, now);
}

/*
 * The node's own packets that can be of no flow. With one address on the uplink
 * they are known without their route. A connection that is under way has not
 * been moved, as none has, and no pod has got its port since: it has a socket.
 */
static __always_inline bool plainly_nodes_own(struct __sk_buff *skb,
					      struct scratch *s,
					      const enum family family,
					      const struct uplink *uplink,
					      __u64 now)
{
	const struct packet *pkt = &s->packet;
	union address src;

	source(pkt, family, &src);
	if (is_closed(uplink, family) ||
	    !is_only_address(uplink, &src, family) ||
	    pkt->flags & PACKET_ERROR || flows_moved(family))
		return false;
	if (pkt->proto == IPPROTO_TCP && !opens_tcp(pkt))
		return true;
	return nodes_own(skb, s, family, uplink, now);
}

#endif
