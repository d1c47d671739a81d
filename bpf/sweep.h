/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_SWEEP_H
#define MASQ_SWEEP_H

/* Taking away what has ended: run by the agent, not by packets. */

#include "clock.h"
#include "nat.h"

/* A sweep waits longer than a lookup: see mark_dying(). */
#define SWEEP_GRACE NSEC_PER_SEC

static __always_inline bool sweepable(const struct flow *flow, __u64 last_seen,
				      __u64 now)
{
	return (__s64)(now - last_seen) >=
	       (__s64)(timeout(flow) + LAST_SEEN_GRANULARITY + SWEEP_GRACE);
}

/*
 * Whether somebody would miss a flow: both sides have talked, and it is neither
 * opening nor closing nor a single question. As IPS_ASSURED and
 * tcp_can_early_drop(), but half-closed connections and protocols without
 * states are spared.
 */
static __always_inline bool assured(const struct flow *flow)
{
	switch (flow->state) {
	case FLOW_TCP_SYN_SENT:
	case FLOW_TCP_SYN_RECV:
	case FLOW_TCP_LAST_ACK:
	case FLOW_TCP_TIME_WAIT:
	case FLOW_TCP_CLOSE:
	case FLOW_UDP:
	case FLOW_ICMP:
	case FLOW_ICMPV6:
		return false;
	}
	return flow->replied;
}

static __always_inline bool sweep_flow(const union tuple *tuple, __u32 mode,
				       const enum family family)
{
	struct flow *flow = find_flow(tuple, family);
	__u64 now = clock_ns(), last_seen;

	if (!flow)
		return false;
	last_seen = flow->last_seen;
	if (mode == SWEEP_ALL)
		last_seen = LAST_SEEN_ANY;
	else if (mode == SWEEP_UNASSURED ? assured(flow) :
					   !sweepable(flow, last_seen, now))
		return false;
	return end_flow(last_seen, tuple, family);
}

/* Where a sweep notes that an outside tuple has no flow. NULL: no tuple. */
static __always_inline __u16 *suspicion(const union tuple *reply,
					const enum family family)
{
	struct reverse_v4 *v4;
	struct reverse_v6 *v6;

	if (family == FAMILY_V4) {
		v4 = bpf_map_lookup_elem(&reverse_v4, &reply->v4);
		return v4 ? &v4->suspect : NULL;
	}
	v6 = bpf_map_lookup_elem(&reverse_v6, &reply->v6);
	return v6 ? &v6->suspect : NULL;
}

/*
 * Gives back an outside tuple that no flow has, but that was left behind. A
 * flow that is being opened looks the same for a moment, so it takes two sweeps
 * that find the same entry without one.
 */
static __always_inline bool sweep_orphan(const union tuple *reply,
					 const enum family family)
{
	__u16 *suspect = suspicion(reply, family);
	union tuple origin;
	struct flow *flow;

	if (!suspect || !find_origin(reply, family, &origin))
		return false;
	flow = find_flow(&origin, family);
	if (flow && owns(flow, reply, family)) {
		*suspect = 0;
		return false;
	}
	if (!*suspect) {
		*suspect = 1;
		return false;
	}
	delete_reverse(reply, family);
	return true;
}

/* Sweeps the tuple at an offset of the request. 1: it is gone. */
static __always_inline int sweep_one(struct __sk_buff *skb, __u32 offset,
				     __u32 mode, const enum family family)
{
	__u32 size = family == FAMILY_V4 ? sizeof(struct tuple_v4) :
					   sizeof(struct tuple_v6);
	union tuple tuple;

	if (bpf_skb_load_bytes(skb, offset, &tuple, size))
		return 0;
	return mode == SWEEP_ORPHANS ? sweep_orphan(&tuple, family) :
				       sweep_flow(&tuple, mode, family);
}

/* Global functions: see egress.h. */
__noinline int sweep_one_v4(struct __sk_buff *skb, __u32 offset, __u32 mode)
{
	return sweep_one(skb, offset, mode, FAMILY_V4);
}

__noinline int sweep_one_v6(struct __sk_buff *skb, __u32 offset, __u32 mode)
{
	return sweep_one(skb, offset, mode, FAMILY_V6);
}

/* Sweeps what a request names. Returns how much of it is gone. */
static __always_inline int sweep(struct __sk_buff *skb,
				 const enum family family)
{
	__u32 size = family == FAMILY_V4 ? sizeof(struct tuple_v4) :
					   sizeof(struct tuple_v6);
	__u32 offset = sizeof(struct sweep_request);
	struct sweep_request request;
	int ended = 0;

	if (bpf_skb_load_bytes(skb, 0, &request, sizeof(request)))
		return 0;
	/*
	 * Unrolled: without PERFMON the verifier also goes where a branch does
	 * not lead, and would never find out of a loop.
	 */
#pragma unroll
	for (__u32 i = 0; i < LIMIT_SWEEP; i++) {
		if (i < request.count)
			ended +=
				family == FAMILY_V4 ?
					sweep_one_v4(skb, offset,
						     request.mode) :
					sweep_one_v6(skb, offset, request.mode);
		offset += size;
	}
	return ended;
}

#endif
