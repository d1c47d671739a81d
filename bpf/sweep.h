/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_SWEEP_H
#define MASQ_SWEEP_H

/* Taking away what has ended: run by the agent, not by packets. */

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
 * Ends the flows that a request names: those past their time, or all of them.
 * Returns how many it ended.
 */
static __always_inline int sweep(struct __sk_buff *skb,
				 const enum family family)
{
	__u32 size = family == FAMILY_V4 ? sizeof(struct tuple_v4) :
					   sizeof(struct tuple_v6);
	__u32 offset = sizeof(struct sweep_request);
	__u64 now = bpf_ktime_get_ns(), last_seen;
	struct sweep_request request;
	union tuple tuple;
	struct flow *flow;
	int ended = 0;

	if (bpf_skb_load_bytes(skb, 0, &request, sizeof(request)))
		return 0;
	for (__u32 i = 0; i < LIMIT_SWEEP && i < request.count; i++) {
		if (bpf_skb_load_bytes(skb, offset, &tuple, size))
			break;
		offset += size;
		flow = find_flow(&tuple, family);
		if (!flow)
			continue;
		last_seen = flow->last_seen;
		if (request.all)
			ended += end_flow(flow, LAST_SEEN_ANY, &tuple, family);
		else if (sweepable(flow, last_seen, now))
			ended += end_flow(flow, last_seen, &tuple, family);
	}
	return ended;
}

#endif
