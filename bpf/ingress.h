/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_INGRESS_H
#define MASQ_INGRESS_H

/* The rules for packets that come in. */

#include "conntrack.h"
#include "fastpath.h"
#include "icmp.h"
#include "nat.h"
#include "packet.h"
#include "policy.h"
#include "rewrite.h"
#include "talker.h"

/* Global functions: see egress.h. */
__noinline int error_arrives_v4(struct __sk_buff *skb)
{
	return icmp_error_ingress(skb, FAMILY_V4);
}

__noinline int error_arrives_v6(struct __sk_buff *skb)
{
	return icmp_error_ingress(skb, FAMILY_V6);
}

/* Gives a fragment whose ports are not known yet to the one it can be for. */
static __always_inline enum verdict early_fragment(struct __sk_buff *skb,
						   struct scratch *s,
						   const enum family family,
						   __u64 now)
{
	enum verdict verdict;

	verdict = only_talker(&s->packet, family, now, &s->addr);
	if (verdict != VERDICT_TRANSLATED)
		return verdict;
	if (rewrite(skb, family, SIDE_DESTINATION))
		return VERDICT_DROP_UNSUPPORTED;
	return verdict;
}

/* Gives a reply the address and port of the pod that it is for. */
static __always_inline enum verdict reply_of_flow(struct __sk_buff *skb,
						  struct scratch *s,
						  const enum family family,
						  __u64 now)
{
	const struct packet *pkt = &s->packet;
	struct flow *flow;
	union address dst;
	bool fast;

	if (pkt->flags & PACKET_QUERY)
		return VERDICT_UNDECIDED;
	if (!(pkt->flags & PACKET_PORTS))
		return pkt->flags & PACKET_LATER ?
			       early_fragment(skb, s, family, now) :
			       VERDICT_UNDECIDED;
	flow = flow_of_reply(&pkt->tuple, &s->origin, family, now);
	if (!flow)
		return VERDICT_UNDECIDED;
	refresh(flow, pkt, now, DIRECTION_INGRESS);
	tuple_source(&s->origin, family, &s->addr);
	s->port = port_of(&s->origin, family, SIDE_SOURCE);
	destination(pkt, family, &dst);
	/* The node's own: see has_sockets(). */
	if (same_address(&dst, &s->addr, family) &&
	    s->port == port_of(&pkt->tuple, family, SIDE_DESTINATION))
		return VERDICT_NO_FLOW;
	fast = has_way_back(skb, flow, pkt, family);
	if (rewrite(skb, family, SIDE_DESTINATION))
		return VERDICT_DROP_UNSUPPORTED;
	return fast ? forward(skb, s, family) : VERDICT_TRANSLATED;
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

	note_node_talks(pkt, family, now);
	destination(pkt, family, &dst);
	source(pkt, family, &src);
	if (is_only_address(uplink, &dst, family) ||
	    is_broadcast(&dst, family) || cidr_keeps(&src, family))
		return VERDICT_NO_FLOW;
	return note_inbound(pkt, family, now) ? VERDICT_INBOUND :
						VERDICT_NO_FLOW;
}

#endif
