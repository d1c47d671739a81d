/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_REWRITE_H
#define MASQ_REWRITE_H

/*
 * Changing addresses and ports with the checksums over them. Where a helper
 * fails the packet is dropped: it never leaves half rewritten.
 */

#include <linux/errno.h>

#include "checksum.h"
#include "kernel.h"
#include "parse.h"
#include "policy.h"

static __always_inline __u32 port_offset(const struct packet *pkt,
					 const enum family family,
					 const enum side side)
{
	if (is_icmp(pkt, family))
		return offsetof(struct icmp_head, id);
	return side == SIDE_SOURCE ? offsetof(struct udphdr, source) :
				     offsetof(struct udphdr, dest);
}

/* Whether the packet has a checksum that has to follow what changes. */
static __always_inline bool checksummed(const struct packet *pkt,
					const enum family family)
{
	return checksum_offset(pkt->proto, family) != CHECKSUM_NONE &&
	       !(pkt->flags & PACKET_LATER);
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

	if (checksummed(pkt, FAMILY_V4) &&
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

	diff = bpf_csum_diff((__be32 *)old, 16, (__be32 *)addr, 16, 0);
	if (checksummed(pkt, FAMILY_V6)) {
		err = bpf_l4_csum_replace(skb, pkt->l4 + check, 0, diff,
					  BPF_F_PSEUDO_HDR |
						  checksum_flags(pkt->proto));
		if (err)
			return err;
	}
	/*
	 * A sum over the whole packet (CHECKSUM_COMPLETE) changes with the
	 * address: IPv6 has no header checksum that would make up for it. Where
	 * a transport checksum does, the helper has corrected the sum for it,
	 * and this takes that back. It does nothing to packets without a sum.
	 */
	bpf_csum_update(skb, diff);
	return bpf_skb_store_bytes(skb, pkt->l3 + offset, addr, 16, 0);
}

/* Whether the packet's transport checksum is there, and none of 0. */
static __always_inline bool has_checksum(struct __sk_buff *skb,
					 const struct packet *pkt, __u32 check)
{
	__sum16 value;

	if (check == CHECKSUM_NONE)
		return false;
	return !zero_is_none(pkt->proto) ||
	       bpf_skb_load_bytes(skb, pkt->l4 + check, &value,
				  sizeof(value)) ||
	       value;
}

static __always_inline int rewrite_port(struct __sk_buff *skb,
					const struct packet *pkt,
					const enum family family,
					const enum side side, __be16 old,
					__be16 port)
{
	__u32 check = checksum_offset(pkt->proto, family);
	/* No checksum makes up for the change in a sum over the packet. */
	__u64 flags = BPF_F_RECOMPUTE_CSUM;
	int err;

	if (old == port || pkt->flags & PACKET_LATER)
		return 0;
	if (has_checksum(skb, pkt, check)) {
		flags = 0;
		err = bpf_l4_csum_replace(skb, pkt->l4 + check, old, port,
					  checksum_flags(pkt->proto) |
						  sizeof(port));
		if (err)
			return err;
	}
	return bpf_skb_store_bytes(skb,
				   pkt->l4 + port_offset(pkt, family, side),
				   &port, sizeof(port), flags);
}

/* The transport checksum when addresses and a port change. */
static __always_inline __sum16 corrected(__sum16 check, __u8 proto,
					 enum ip_summed summed, __u64 addresses,
					 __u32 port)
{
	if (zero_is_none(proto) && !check)
		return 0;
	if (summed == IP_SUMMED_PARTIAL)
		check = ~adjust(~check, addresses);
	else
		check = adjust(check, addresses + port);
	return zero_is_none(proto) && !check ? 0xffff : check;
}

/*
 * Writes the port and the checksum over it and the addresses into the packet.
 * False: it is not in the linear part, and nothing has changed.
 */
static __always_inline bool transport_in_place(struct __sk_buff *skb,
					       const struct packet *pkt,
					       const enum family family,
					       const enum side side,
					       __be16 port, __u32 addresses)
{
	__be16 old_port = port_of(&pkt->tuple, family, side);
	__u32 offset = checksum_offset(pkt->proto, family);
	__u32 ports = short_change(old_port, port), covered = 0;
	enum ip_summed summed = ip_summed(skb);
	__sum16 *check, old, new;
	__be16 *at;

	at = linear(skb, pkt->l4 + port_offset(pkt, family, side), sizeof(*at));
	check = linear(skb, pkt->l4 + offset, sizeof(*check));
	if (!at || !check)
		return false;
	if (covers_addresses(pkt->proto, family))
		covered = addresses;
	old = *check;
	new = corrected(old, pkt->proto, summed, covered, ports);
	*check = new;
	if (old_port != port)
		*at = port;
	/* IPv4's own checksum makes up for the address. */
	if (summed == IP_SUMMED_COMPLETE)
		bpf_csum_update(
			skb,
			fold_to_word((family == FAMILY_V4 ? 0ULL : addresses) +
				     ports + short_change(old, new)));
	return true;
}

/*
 * Rewrites a packet where it is, without a call for each field: if the kernel
 * lets us see how its checksum stands. False: nothing has changed.
 */
static __always_inline bool
rewrite_in_place(struct __sk_buff *skb, const struct packet *pkt,
		 const enum family family, const enum side side,
		 const union address *addr, __be16 port)
{
	union address old;
	struct ipv6hdr *v6;
	struct iphdr *v4;
	__u32 change;

	if (!cfg_ctinfo)
		return false;
	if (side == SIDE_SOURCE)
		source(pkt, family, &old);
	else
		destination(pkt, family, &old);
	change = address_change(&old, addr, family);
	v4 = linear(skb, pkt->l3, sizeof(*v4));
	v6 = linear(skb, pkt->l3, sizeof(*v6));
	if (family == FAMILY_V4 ? !v4 : !v6)
		return false;
	if (checksummed(pkt, family)) {
		if (!transport_in_place(skb, pkt, family, side, port, change))
			return false;
	} else if (family == FAMILY_V6) {
		/* As in rewrite_address_v6(). */
		bpf_csum_update(skb, change);
	}
	if (family == FAMILY_V6) {
		__builtin_memcpy(side == SIDE_SOURCE ? &v6->saddr : &v6->daddr,
				 addr->v6, sizeof(v6->saddr));
		return true;
	}
	v4->check = adjust(v4->check, change);
	*(side == SIDE_SOURCE ? &v4->saddr : &v4->daddr) = addr->v4;
	return true;
}

static __always_inline int rewrite_side(struct __sk_buff *skb,
					const enum family family,
					const enum side side)
{
	const struct scratch *s = this_scratch();
	const struct packet *pkt;
	int err;

	if (!s)
		return -EINVAL;
	pkt = &s->packet;
	if (rewrite_in_place(skb, pkt, family, side, &s->addr, s->port))
		return 0;
	err = rewrite_port(skb, pkt, family, side,
			   port_of(&pkt->tuple, family, side), s->port);
	if (err)
		return err;
	return family == FAMILY_V4 ?
		       rewrite_address_v4(skb, pkt, side, s->addr.v4) :
		       rewrite_address_v6(skb, pkt, side, s->addr.v6);
}

/*
 * Global functions: see egress.h. Each has one side, since without PERFMON the
 * verifier takes no pointer that was chosen at run time.
 */
__noinline int rewrite_source_v4(struct __sk_buff *skb)
{
	return rewrite_side(skb, FAMILY_V4, SIDE_SOURCE);
}

__noinline int rewrite_source_v6(struct __sk_buff *skb)
{
	return rewrite_side(skb, FAMILY_V6, SIDE_SOURCE);
}

__noinline int rewrite_destination_v4(struct __sk_buff *skb)
{
	return rewrite_side(skb, FAMILY_V4, SIDE_DESTINATION);
}

__noinline int rewrite_destination_v6(struct __sk_buff *skb)
{
	return rewrite_side(skb, FAMILY_V6, SIDE_DESTINATION);
}

/* Gives one side of the packet scratch.addr and port (or identifier). */
static __always_inline int
rewrite(struct __sk_buff *skb, const enum family family, const enum side side)
{
	if (side == SIDE_SOURCE)
		return family == FAMILY_V4 ? rewrite_source_v4(skb) :
					     rewrite_source_v6(skb);
	return family == FAMILY_V4 ? rewrite_destination_v4(skb) :
				     rewrite_destination_v6(skb);
}

#endif
