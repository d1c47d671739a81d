/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_NAT_H
#define MASQ_NAT_H

/* Life of a translated flow: finding, refreshing and ending it. */

#include "maps.h"
#include "parse.h"
#include "policy.h"
#include "tcp.h"

/* last_seen is up to a second old, so death comes a second late. */
#define LAST_SEEN_GRANULARITY NSEC_PER_SEC

/* A UDP flow is a stream once it is older than this (nf_conntrack_udp). */
#define UDP_STREAM_AGE (2 * NSEC_PER_SEC)

static __always_inline __u8 first_state(const struct packet *pkt,
					const enum family family)
{
	switch (pkt->proto) {
	case IPPROTO_TCP:
		return tcp_state(pkt, FLOW_NONE, DIRECTION_EGRESS);
	case IPPROTO_UDP:
	case IPPROTO_UDPLITE:
		return FLOW_UDP;
	case IPPROTO_SCTP:
		return FLOW_SCTP;
	}
	if (!is_icmp(pkt, family))
		return FLOW_GENERIC;
	return family == FAMILY_V4 ? FLOW_ICMP : FLOW_ICMPV6;
}

static __always_inline __u8 next_state(const struct flow *flow,
				       const struct packet *pkt, __u64 now,
				       const enum direction direction)
{
	if (pkt->proto == IPPROTO_TCP) {
		if (pkt->flags & PACKET_LATER ||
		    (direction == DIRECTION_INGRESS &&
		     !believable_end(flow, pkt)))
			return flow->state;
		return tcp_state(pkt, flow->state, direction);
	}
	if (flow->state == FLOW_UDP && flow->replied &&
	    (__s64)(now - flow->created) > (__s64)UDP_STREAM_AGE)
		return FLOW_UDP_STREAM;
	return flow->state;
}

/* How long a flow may be idle in its state, in nanoseconds. */
static __always_inline __u64 timeout(const struct flow *flow)
{
	__u32 state = flow->state;
	const __u32 *seconds = bpf_map_lookup_elem(&timeouts, &state);

	return seconds ? *seconds * NSEC_PER_SEC : 0;
}

/*
 * A flow past its time is dead at once, whether or not somebody came to take
 * it away: lookups ignore it and its outside tuple may be given to another.
 */
static __always_inline bool alive_since(const struct flow *flow,
					__u64 last_seen, __u64 now)
{
	__s64 idle = now - last_seen;

	if (flow->dying)
		return false;
	if (idle < (__s64)LAST_SEEN_GRANULARITY)
		return true;
	return idle < (__s64)(timeout(flow) + LAST_SEEN_GRANULARITY);
}

static __always_inline bool alive(const struct flow *flow, __u64 now)
{
	return alive_since(flow, flow->last_seen, now);
}

/*
 * A packet went through a flow. True at most once a second: time to write down
 * what need not be written for each packet.
 */
static __always_inline bool refresh(struct flow *flow, const struct packet *pkt,
				    __u64 now, const enum direction direction)
{
	bool due = (__s64)(now - flow->last_seen) >=
		   (__s64)LAST_SEEN_GRANULARITY;
	__u8 state;

	if (direction == DIRECTION_INGRESS && !flow->replied)
		flow->replied = 1;
	state = next_state(flow, pkt, now, direction);
	if (due || state != flow->state) {
		flow->state = state;
		flow->last_seen = now;
	}
	if (direction == DIRECTION_EGRESS && pkt->proto == IPPROTO_TCP &&
	    !(pkt->flags & PACKET_LATER))
		note_sequence(flow, pkt);
	return due;
}

/* The mapping of a tuple as the pod sends it. NULL: none. */
static __always_inline struct flow *find_flow(const union tuple *tuple,
					      const enum family family)
{
	struct mapping_v4 *v4;
	struct mapping_v6 *v6;

	if (family == FAMILY_V4) {
		v4 = bpf_map_lookup_elem(&flows_v4, &tuple->v4);
		return v4 ? &v4->flow : NULL;
	}
	v6 = bpf_map_lookup_elem(&flows_v6, &tuple->v6);
	return v6 ? &v6->flow : NULL;
}

/* Loads at an offset and no pointer to the mapping: see struct mapping_v4. */
static __always_inline void nat_address(const struct flow *flow,
					const enum family family,
					union address *addr)
{
	const __be32 *word = (const __be32 *)flow;

	if (family == FAMILY_V4)
		addr->v4 = word[-1];
	else
		__builtin_memcpy(addr->v6, word + sizeof(*flow) / 4, 16);
}

/*
 * The tuple that a pod sends, from the tuple of a reply. False: the outside
 * tuple is nobody's.
 */
static __always_inline bool find_origin(const union tuple *reply,
					const enum family family,
					union tuple *origin)
{
	mirror(reply, origin, family);
	if (family == FAMILY_V4) {
		const struct reverse_v4 *r =
			bpf_map_lookup_elem(&reverse_v4, &reply->v4);

		if (!r)
			return false;
		origin->v4.saddr = r->addr;
		origin->v4.sport = r->port;
	} else {
		const struct reverse_v6 *r =
			bpf_map_lookup_elem(&reverse_v6, &reply->v6);

		if (!r)
			return false;
		__builtin_memcpy(origin->v6.saddr, r->addr, 16);
		origin->v6.sport = r->port;
	}
	return true;
}

/* The tuple of the replies to a flow, as they come in from outside. */
static __always_inline void
reply_tuple(const union tuple *tuple, const union address *nat_addr,
	    __be16 nat_port, const enum family family, union tuple *reply)
{
	mirror(tuple, reply, family);
	if (family == FAMILY_V4) {
		reply->v4.daddr = nat_addr->v4;
		reply->v4.dport = nat_port;
	} else {
		__builtin_memcpy(reply->v6.daddr, nat_addr->v6, 16);
		reply->v6.dport = nat_port;
	}
}

/* Whether a flow has the outside tuple that replies come in with. */
static __always_inline bool owns(const struct flow *flow,
				 const union tuple *reply,
				 const enum family family)
{
	union address nat_addr, dst;

	nat_address(flow, family, &nat_addr);
	if (family == FAMILY_V4)
		dst.v4 = reply->v4.daddr;
	else
		__builtin_memcpy(dst.v6, reply->v6.daddr, 16);
	return flow->nat_port == port_of(reply, family, SIDE_DESTINATION) &&
	       same_address(&nat_addr, &dst, family);
}

/*
 * The live flow that a reply belongs to, and in origin the tuple that its pod
 * sends. NULL: none.
 */
static __always_inline struct flow *flow_of_reply(const union tuple *reply,
						  union tuple *origin,
						  const enum family family,
						  __u64 now)
{
	struct flow *flow;

	if (!find_origin(reply, family, origin))
		return NULL;
	flow = find_flow(origin, family);
	return flow && owns(flow, reply, family) && alive(flow, now) ? flow :
								       NULL;
}

static __always_inline void delete_reverse(const union tuple *reply,
					   const enum family family)
{
	if (family == FAMILY_V4)
		bpf_map_delete_elem(&reverse_v4, &reply->v4);
	else
		bpf_map_delete_elem(&reverse_v6, &reply->v6);
}

static __always_inline void delete_flow(const union tuple *tuple,
					const enum family family)
{
	if (family == FAMILY_V4)
		bpf_map_delete_elem(&flows_v4, &tuple->v4);
	else
		bpf_map_delete_elem(&flows_v6, &tuple->v6);
}

/* Ends a flow whenever it was last seen. */
#define LAST_SEEN_ANY (~0ULL)

/*
 * Marks the flow of a tuple as dying if its last_seen is still what the caller
 * judged it by. Not NULL for exactly one caller: it owns the deletion. This is
 * the whole use of the lock; a live flow is refreshed without it, which is safe
 * because sweeps wait longer than lookups before they call a flow dead.
 */
static __always_inline struct flow *mark_dying_v4(const struct tuple_v4 *tuple,
						  __u64 last_seen)
{
	struct mapping_v4 *m = bpf_map_lookup_elem(&flows_v4, tuple);
	bool mine;

	if (!m)
		return NULL;
	bpf_spin_lock(&m->lock);
	mine = !m->flow.dying &&
	       (last_seen == LAST_SEEN_ANY || m->flow.last_seen == last_seen);
	if (mine)
		m->flow.dying = 1;
	bpf_spin_unlock(&m->lock);
	return mine ? &m->flow : NULL;
}

static __always_inline struct flow *mark_dying_v6(const struct tuple_v6 *tuple,
						  __u64 last_seen)
{
	struct mapping_v6 *m = bpf_map_lookup_elem(&flows_v6, tuple);
	bool mine;

	if (!m)
		return NULL;
	bpf_spin_lock(&m->lock);
	mine = !m->flow.dying &&
	       (last_seen == LAST_SEEN_ANY || m->flow.last_seen == last_seen);
	if (mine)
		m->flow.dying = 1;
	bpf_spin_unlock(&m->lock);
	return mine ? &m->flow : NULL;
}

/*
 * Ends the flow of a tuple that the caller judged by last_seen: both halves,
 * the outside tuple first. Nobody can have put another flow in either place
 * meanwhile, since inserts are NOEXIST and only the one who marked it deletes.
 */
static __always_inline bool end_flow(__u64 last_seen, const union tuple *tuple,
				     const enum family family)
{
	struct flow *flow = family == FAMILY_V4 ?
				    mark_dying_v4(&tuple->v4, last_seen) :
				    mark_dying_v6(&tuple->v6, last_seen);
	union address nat_addr;
	union tuple reply;

	if (!flow)
		return false;
	nat_address(flow, family, &nat_addr);
	reply_tuple(tuple, &nat_addr, flow->nat_port, family, &reply);
	delete_reverse(&reply, family);
	delete_flow(tuple, family);
	return true;
}

#endif
