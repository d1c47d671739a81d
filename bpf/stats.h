/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_STATS_H
#define MASQ_STATS_H

#include <linux/pkt_cls.h>

#include "maps.h"

static __always_inline __u32 counter_index(const enum direction direction,
					   const enum family family,
					   enum verdict verdict)
{
	return (direction * FAMILY_COUNT + family) * VERDICT_COUNT + verdict;
}

/*
 * Ends a packet's way through us: counts its fate and says what becomes of it.
 * Programs after ours see what passes: the chain is never ended, but by a drop.
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

#endif
