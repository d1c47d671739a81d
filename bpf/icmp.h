/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_ICMP_H
#define MASQ_ICMP_H

/*
 * ICMP errors: the packet that they quote says whose they are, and is
 * translated back with them (RFC 5508 section 4).
 */

#include "checksum.h"
#include "clock.h"
#include "nat.h"
#include "parse.h"
#include "rewrite.h"

#define ICMP_HEADER_LEN 8

/* Reads the quoted packet. False: it does not tell which flow it is of. */
static __always_inline bool parse_quote(struct __sk_buff *skb,
					const struct packet *outer,
					struct packet *quote,
					const enum family family)
{
	__be16 ports[2];

	__builtin_memset(quote, 0, sizeof(*quote));
	quote->l3 = outer->l4 + ICMP_HEADER_LEN;
	if (family == FAMILY_V4 ? parse_v4(skb, quote) : parse_v6(skb, quote))
		return false;
	if (quote->flags & (PACKET_LATER | PACKET_MALFORMED))
		return false;
	if (is_icmp(quote, family)) {
		parse_icmp(skb, quote, family);
	} else if (has_ports(quote->proto)) {
		/* 8 bytes may be all there is (RFC 792). */
		if (bpf_skb_load_bytes(skb, quote->l4, ports, sizeof(ports)))
			return false;
		set_ports(quote, family, ports[0], ports[1]);
	} else {
		quote->flags |= PACKET_PORTS;
	}
	return quote->flags & PACKET_PORTS;
}

static __always_inline __u32 port_difference(__be16 old, __be16 port)
{
	__be32 from = old, to = port;

	return bpf_csum_diff(&from, sizeof(from), &to, sizeof(to), 0);
}

/* Writes two bytes of the quoted packet, under the checksum of the outer one.
 */
static __always_inline int store_quoted(struct __sk_buff *skb,
					const struct packet *outer,
					__u32 offset, __be16 old, __be16 new)
{
	int err;

	if (old == new)
		return 0;
	err = bpf_l4_csum_replace(
		skb, outer->l4 + offsetof(struct icmp_head, checksum), old, new,
		sizeof(new));
	if (err)
		return err;
	return bpf_skb_store_bytes(skb, offset, &new, sizeof(new), 0);
}

/* Corrects a checksum of the quoted packet, if that much of it is there. */
static __always_inline int adjust_quoted(struct __sk_buff *skb,
					 const struct packet *outer,
					 __u32 offset, __u32 diff,
					 bool zero_is_none)
{
	__sum16 old, new;

	if (bpf_skb_load_bytes(skb, offset, &old, sizeof(old)))
		return 0;
	if (zero_is_none && !old)
		return 0;
	new = adjust(old, diff);
	if (zero_is_none && !new)
		new = 0xffff;
	return store_quoted(skb, outer, offset, old, new);
}

static __always_inline int
rewrite_quote_address(struct __sk_buff *skb, const struct packet *outer,
		      const struct packet *quote, const enum family family,
		      const enum side side, const union address *addr,
		      __u32 diff)
{
	__u32 size = family == FAMILY_V4 ? 4 : 16;
	__u32 offset;
	int err;

	if (family == FAMILY_V4) {
		offset = side == SIDE_SOURCE ? offsetof(struct iphdr, saddr) :
					       offsetof(struct iphdr, daddr);
		err = adjust_quoted(skb, outer,
				    quote->l3 + offsetof(struct iphdr, check),
				    diff, false);
		if (err)
			return err;
	} else {
		offset = side == SIDE_SOURCE ? offsetof(struct ipv6hdr, saddr) :
					       offsetof(struct ipv6hdr, daddr);
	}
	err = bpf_l4_csum_replace(
		skb, outer->l4 + offsetof(struct icmp_head, checksum), 0, diff,
		0);
	if (err)
		return err;
	return bpf_skb_store_bytes(skb, quote->l3 + offset, addr, size, 0);
}

/* Gives one side of the quoted packet another address and port. */
static __always_inline int
rewrite_quote(struct __sk_buff *skb, const struct packet *outer,
	      const struct packet *quote, const enum family family,
	      const enum side side, const union address *addr, __be16 port)
{
	__be16 old_port = port_of(&quote->tuple, family, side);
	__u32 check = checksum_offset(quote->proto, family);
	__u32 size = family == FAMILY_V4 ? 4 : 16;
	__u32 address_diff, diff;
	union address old;
	int err;

	if (side == SIDE_SOURCE)
		source(quote, family, &old);
	else
		destination(quote, family, &old);
	address_diff =
		bpf_csum_diff((__be32 *)&old, size, (__be32 *)addr, size, 0);
	if (check != CHECKSUM_NONE) {
		diff = port_difference(old_port, port);
		if (covers_addresses(quote->proto, family))
			diff = bpf_csum_diff((__be32 *)&old, size,
					     (__be32 *)addr, size, diff);
		err = adjust_quoted(skb, outer, quote->l4 + check, diff,
				    zero_is_none(quote->proto));
		if (err)
			return err;
	}
	err = store_quoted(skb, outer,
			   quote->l4 + port_offset(quote, family, side),
			   old_port, port);
	if (err)
		return err;
	return rewrite_quote_address(skb, outer, quote, family, side, addr,
				     address_diff);
}

/* The address of an error, outside of what it quotes. */
static __always_inline int rewrite_outer(struct __sk_buff *skb,
					 const struct packet *outer,
					 const enum family family,
					 const enum side side,
					 const union address *addr)
{
	return family == FAMILY_V4 ?
		       rewrite_address_v4(skb, outer, side, addr->v4) :
		       rewrite_address_v6(skb, outer, side, addr->v6);
}

/*
 * An error that leaves, about a packet that came to the pod behind a flow:
 * from the pod itself, or from the node, say when the pod's MTU is smaller.
 * VERDICT_UNDECIDED: it is about no flow of ours.
 */
static __always_inline enum verdict icmp_error_egress(struct __sk_buff *skb,
						      const enum family family)
{
	struct scratch *s = this_scratch();
	__u64 now = clock_ns();
	union tuple tuple;
	struct flow *flow;

	if (!s || !parse_quote(skb, &s->packet, &s->quote, family))
		return VERDICT_UNDECIDED;
	/* What asked the pod came from outside, not behind a flow. */
	if (s->quote.flags & PACKET_QUERY)
		return VERDICT_UNDECIDED;
	mirror(&s->quote.tuple, &tuple, family);
	flow = find_flow(&tuple, family);
	if (!flow || !alive(flow, now))
		return VERDICT_UNDECIDED;
	nat_address(flow, family, &s->addr);
	if (rewrite_quote(skb, &s->packet, &s->quote, family, SIDE_DESTINATION,
			  &s->addr, flow->nat_port) ||
	    rewrite_outer(skb, &s->packet, family, SIDE_SOURCE, &s->addr))
		return VERDICT_DROP_UNSUPPORTED;
	return VERDICT_ICMP_ERROR;
}

/*
 * An error that comes in, about a packet that a flow sent. VERDICT_UNDECIDED:
 * it is about no flow of ours.
 */
static __always_inline enum verdict icmp_error_ingress(struct __sk_buff *skb,
						       const enum family family)
{
	struct scratch *s = this_scratch();
	__u64 now = clock_ns();
	struct flow *flow;

	if (!s || !parse_quote(skb, &s->packet, &s->quote, family))
		return VERDICT_UNDECIDED;
	if (s->quote.flags & PACKET_REPLY)
		return VERDICT_UNDECIDED;
	mirror(&s->quote.tuple, &s->reply, family);
	flow = flow_of_reply(&s->reply, &s->origin, family, now);
	if (!flow)
		return VERDICT_UNDECIDED;
	/* Pods must not be talked out of their route (nf_nat_core.c). */
	if (family == FAMILY_V4 && s->packet.icmp_type == ICMP_REDIRECT)
		return VERDICT_DROP_UNSUPPORTED;
	tuple_source(&s->origin, family, &s->addr);
	if (rewrite_quote(skb, &s->packet, &s->quote, family, SIDE_SOURCE,
			  &s->addr, port_of(&s->origin, family, SIDE_SOURCE)) ||
	    rewrite_outer(skb, &s->packet, family, SIDE_DESTINATION, &s->addr))
		return VERDICT_DROP_UNSUPPORTED;
	return VERDICT_ICMP_ERROR;
}

#endif
