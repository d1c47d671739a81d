/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_ADDRESS_H
#define MASQ_ADDRESS_H

/* Choosing the outside address of a new flow. */

#include <linux/errno.h>

#include "maps.h"
#include "packet.h"

/* linux/bpf.h has it from 6.10 on, where the mark is that of smac. */
#define FIB_LOOKUP_MARK (1U << 5)

/* Asks for the route. Before 6.10 it is that of packets without a mark. */
static __always_inline long route_out(struct __sk_buff *skb,
				      struct bpf_fib_lookup *fib)
{
	__u32 mark = skb->mark;
	long ret;

	__builtin_memcpy(fib->smac, &mark, sizeof(mark));
	ret = bpf_fib_lookup(skb, fib, sizeof(*fib),
			     BPF_FIB_LOOKUP_OUTPUT | FIB_LOOKUP_MARK);
	if (ret != -EINVAL)
		return ret;
	return bpf_fib_lookup(skb, fib, sizeof(*fib), BPF_FIB_LOOKUP_OUTPUT);
}

/*
 * Where the packet goes next on this uplink. Without a route the destination
 * itself, as MASQUERADE's rt_nexthop() has it for a link without gateway.
 */
static __always_inline __be32 next_hop_v4(struct __sk_buff *skb,
					  const struct packet *pkt)
{
	struct bpf_fib_lookup fib;
	long ret;

	/* All of it: without PERFMON the verifier minds gaps and unions. */
	__builtin_memset(&fib, 0, sizeof(fib));
	fib.family = AF_INET;
	fib.l4_protocol = pkt->proto;
	fib.sport = pkt->tuple.v4.sport;
	fib.dport = pkt->tuple.v4.dport;
	fib.ifindex = skb->ifindex;
	fib.tos = pkt->dscp;
	fib.ipv4_src = pkt->tuple.v4.saddr;
	fib.ipv4_dst = pkt->tuple.v4.daddr;
	ret = route_out(skb, &fib);
	/* The neighbour and the MTU are somebody else's business. */
	if ((ret == BPF_FIB_LKUP_RET_SUCCESS ||
	     ret == BPF_FIB_LKUP_RET_NO_NEIGH ||
	     ret == BPF_FIB_LKUP_RET_FRAG_NEEDED) &&
	    fib.family == AF_INET) /* not an IPv6 gateway (RFC 5549) */
		return fib.ipv4_dst;
	return pkt->tuple.v4.daddr;
}

static __always_inline bool masquerade_address_v4(struct __sk_buff *skb,
						  const struct packet *pkt,
						  const struct uplink *uplink,
						  union address *addr)
{
	struct address_rule_v4 key = { .prefixlen = 64 };
	const __be32 *found;
	__be32 next_hop;

	if (uplink->flags & UPLINK_ONE_V4) {
		addr->v4 = uplink->addr_v4;
		return true;
	}
	next_hop = next_hop_v4(skb, pkt);
	key.ifindex = bpf_htonl(uplink->ifindex);
	__builtin_memcpy(key.addr, &next_hop, sizeof(key.addr));
	found = bpf_map_lookup_elem(&addresses_v4, &key);
	if (!found)
		return false;
	addr->v4 = *found;
	return true;
}

static __always_inline bool masquerade_address_v6(const struct packet *pkt,
						  const struct uplink *uplink,
						  union address *addr)
{
	struct address_rule_v6 key = { .prefixlen = 160 };
	const __be32 *found;

	if (uplink->flags & UPLINK_ONE_V6) {
		__builtin_memcpy(addr->v6, uplink->addr_v6, 16);
		return true;
	}
	key.ifindex = bpf_htonl(uplink->ifindex);
	__builtin_memcpy(key.addr, pkt->tuple.v6.daddr, sizeof(key.addr));
	found = bpf_map_lookup_elem(&addresses_v6, &key);
	if (!found)
		return false;
	__builtin_memcpy(addr->v6, found, 16);
	return true;
}

/*
 * The address that MASQUERADE would pick: by next hop as inet_select_addr(),
 * or by destination as ipv6_dev_get_saddr(). False: the uplink has none.
 */
static __always_inline bool masquerade_address(struct __sk_buff *skb,
					       const struct packet *pkt,
					       const enum family family,
					       const struct uplink *uplink,
					       union address *addr)
{
	return family == FAMILY_V4 ?
		       masquerade_address_v4(skb, pkt, uplink, addr) :
		       masquerade_address_v6(pkt, uplink, addr);
}

#endif
