/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_REWRITE_H
#define MASQ_REWRITE_H

/*
 * Changing addresses and ports with the checksums over them. Where a helper
 * fails the packet is dropped: it never leaves half rewritten.
 */

#include "parse.h"
#include "policy.h"

/* A UDP checksum of 0 means none: it stays 0, and none becomes 0. */
static __always_inline bool zero_is_none(__u8 proto)
{
	return proto == IPPROTO_UDP || proto == IPPROTO_UDPLITE;
}

static __always_inline __u64 checksum_flags(__u8 proto)
{
	return zero_is_none(proto) ? BPF_F_MARK_MANGLED_0 : 0;
}

/* Only ICMP over IPv4 has a checksum without addresses in it. */
static __always_inline bool covers_addresses(__u8 proto,
					     const enum family family)
{
	return family == FAMILY_V6 || proto != IPPROTO_ICMP;
}

static __always_inline __u32 port_offset(const struct packet *pkt,
					 const enum family family,
					 const enum side side)
{
	if (is_icmp(pkt, family))
		return offsetof(struct icmp_head, id);
	return side == SIDE_SOURCE ? offsetof(struct udphdr, source) :
				     offsetof(struct udphdr, dest);
}

static __always_inline int rewrite_address_v4(struct __sk_buff *skb,
					      const struct packet *pkt,
					      const enum side side, __be32 addr)
{
	__be32 old = side == SIDE_SOURCE ? pkt->tuple.v4.saddr :
					   pkt->tuple.v4.daddr;
	__u32 offset = side == SIDE_SOURCE ? offsetof(struct iphdr, saddr) :
					     offsetof(struct iphdr, daddr);
	__u32 check = checksum_offset(pkt->proto, FAMILY_V4);
	int err;

	if (check != CHECKSUM_NONE && !(pkt->flags & PACKET_LATER) &&
	    covers_addresses(pkt->proto, FAMILY_V4)) {
		err = bpf_l4_csum_replace(skb, pkt->l4 + check, old, addr,
					  BPF_F_PSEUDO_HDR |
						  checksum_flags(pkt->proto) |
						  sizeof(addr));
		if (err)
			return err;
	}
	err = bpf_l3_csum_replace(skb, pkt->l3 + offsetof(struct iphdr, check),
				  old, addr, sizeof(addr));
	if (err)
		return err;
	return bpf_skb_store_bytes(skb, pkt->l3 + offset, &addr, sizeof(addr),
				   0);
}

static __always_inline int rewrite_address_v6(struct __sk_buff *skb,
					      const struct packet *pkt,
					      const enum side side,
					      const __be32 *addr)
{
	const __be32 *old = side == SIDE_SOURCE ? pkt->tuple.v6.saddr :
						  pkt->tuple.v6.daddr;
	__u32 offset = side == SIDE_SOURCE ? offsetof(struct ipv6hdr, saddr) :
					     offsetof(struct ipv6hdr, daddr);
	__u32 check = checksum_offset(pkt->proto, FAMILY_V6);
	__s64 diff;
	int err;

	if (check != CHECKSUM_NONE && !(pkt->flags & PACKET_LATER)) {
		diff = bpf_csum_diff((__be32 *)old, 16, (__be32 *)addr, 16, 0);
		err = bpf_l4_csum_replace(skb, pkt->l4 + check, 0, diff,
					  BPF_F_PSEUDO_HDR |
						  checksum_flags(pkt->proto));
		if (err)
			return err;
		/*
		 * The address and the checksum field change by the same amount
		 * and IPv6 has no header checksum, so a sum over the whole
		 * packet (CHECKSUM_COMPLETE) stays. The helper corrects it all
		 * the same; this takes that back, and does nothing to packets
		 * without such a sum.
		 */
		bpf_csum_update(skb, diff);
	}
	return bpf_skb_store_bytes(skb, pkt->l3 + offset, addr, 16, 0);
}

static __always_inline int rewrite_port(struct __sk_buff *skb,
					const struct packet *pkt,
					const enum family family,
					const enum side side, __be16 old,
					__be16 port)
{
	__u32 check = checksum_offset(pkt->proto, family);
	int err;

	if (old == port || pkt->flags & PACKET_LATER)
		return 0;
	if (check != CHECKSUM_NONE) {
		err = bpf_l4_csum_replace(skb, pkt->l4 + check, old, port,
					  checksum_flags(pkt->proto) |
						  sizeof(port));
		if (err)
			return err;
	}
	return bpf_skb_store_bytes(skb,
				   pkt->l4 + port_offset(pkt, family, side),
				   &port, sizeof(port), 0);
}

/* Gives one side of the packet another address and port (or identifier). */
static __always_inline int rewrite(struct __sk_buff *skb,
				   const struct packet *pkt,
				   const enum family family,
				   const enum side side,
				   const union address *addr, __be16 port)
{
	int err;

	err = rewrite_port(skb, pkt, family, side,
			   port_of(&pkt->tuple, family, side), port);
	if (err)
		return err;
	return family == FAMILY_V4 ?
		       rewrite_address_v4(skb, pkt, side, addr->v4) :
		       rewrite_address_v6(skb, pkt, side, addr->v6);
}

#endif
