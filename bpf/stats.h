/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_STATS_H
#define MASQ_STATS_H

#include <linux/pkt_cls.h>

#include <bpf/bpf_endian.h>

#include "maps.h"
#include "packet.h"

static __always_inline __u32 counter_index(const enum direction direction,
					   const enum family family,
					   enum verdict verdict)
{
	return (direction * FAMILY_COUNT + family) * VERDICT_COUNT + verdict;
}

/*
 * Ends a packet's way through us: counts its fate and says what becomes of it.
 * Programs after ours see what passes: the chain is never ended, but by a drop
 * or where the fast path begins.
 */
static __always_inline int finish(struct __sk_buff *skb,
				  const enum direction direction,
				  const enum family family,
				  enum verdict verdict)
{
	__u32 index = counter_index(direction, family, verdict);
	struct counter *counter = bpf_map_lookup_elem(&counters, &index);

	if (counter) {
		counter->packets++;
		counter->bytes += skb->len;
	}
	return verdict >= VERDICT_DROP_FIRST ? TC_ACT_SHOT : TC_ACT_UNSPEC;
}

/* Sends a packet that has been counted, or will be, where it is to go. */
static __always_inline int redirect(void)
{
	const struct scratch *s = this_scratch();

	return s ? bpf_redirect(s->redirect, 0) : TC_ACT_SHOT;
}

/* Tells the agent of a drop that an operator should know of. */
static __always_inline void tell(struct __sk_buff *skb, struct scratch *s,
				 const enum family family, enum verdict verdict,
				 __u64 now)
{
	const struct packet *pkt = &s->packet;
	struct event event = {
		.proto = pkt->proto,
		.verdict = verdict,
		.ifindex = skb->ifindex,
	};
	__u32 index = opaque(s, verdict);

	if (index >= VERDICT_COUNT ||
	    (__s64)(now - s->told[index]) < (__s64)NSEC_PER_SEC)
		return;
	s->told[index] = now;
	if (family == FAMILY_V4) {
		event.daddr[2] = bpf_htonl(0xffff);
		event.daddr[3] = pkt->tuple.v4.daddr;
		event.dport = pkt->tuple.v4.dport;
	} else {
		__builtin_memcpy(event.daddr, pkt->tuple.v6.daddr, 16);
		event.dport = pkt->tuple.v6.dport;
	}
	bpf_ringbuf_output(&events, &event, sizeof(event), 0);
}

#endif
