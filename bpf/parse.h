/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_PARSE_H
#define MASQ_PARSE_H

#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include "transport.h"

#define IP_FLAG_MF 0x2000
#define IP_OFFSET_MASK 0x1fff
#define IP6_FLAG_MF 0x0001
#define IP6_OFFSET_MASK 0xfff8

/* Both return VERDICT_UNDECIDED, or VERDICT_NOT_IP for what is none. */
static __always_inline enum verdict parse_v4(struct __sk_buff *skb,
					     struct packet *pkt)
{
	struct iphdr ip;
	__u16 fragment;

	if (read_header(skb, pkt->l3, &ip, sizeof(ip)) || ip.version != 4 ||
	    ip.ihl < 5)
		return VERDICT_NOT_IP;
	pkt->l4 = pkt->l3 + ip.ihl * 4;
	pkt->proto = ip.protocol;
	pkt->dscp = ip.tos;
	pkt->tuple.v4.saddr = ip.saddr;
	pkt->tuple.v4.daddr = ip.daddr;
	pkt->tuple.v4.proto = ip.protocol;

	fragment = bpf_ntohs(ip.frag_off);
	if (fragment & (IP_FLAG_MF | IP_OFFSET_MASK)) {
		pkt->flags |= fragment & IP_OFFSET_MASK ? PACKET_LATER :
							  PACKET_FIRST;
		pkt->fragment_id = ip.id;
		pkt->fragment_proto = ip.protocol;
	}
	return VERDICT_UNDECIDED;
}

struct ipv6_extension {
	__u8 nexthdr;
	__u8 len;
	__be16 offset;
	__be32 id;
};

/* Headers that say where they end; AH and ESP are protocols for us. */
static __always_inline bool is_extension(__u8 proto)
{
	return proto == IPPROTO_HOPOPTS || proto == IPPROTO_ROUTING ||
	       proto == IPPROTO_DSTOPTS || proto == IPPROTO_FRAGMENT;
}

/*
 * Steps over one extension header (RFC 8200 section 4). False at what is none,
 * or is a later fragment's.
 */
static __always_inline bool step_over(struct __sk_buff *skb, struct packet *pkt)
{
	struct ipv6_extension ext;
	__u16 fragment;

	if (!is_extension(pkt->proto))
		return false;
	if (bpf_skb_load_bytes(skb, pkt->l4, &ext, sizeof(ext))) {
		pkt->flags |= PACKET_MALFORMED;
		return false;
	}
	if (pkt->proto == IPPROTO_FRAGMENT) {
		fragment = bpf_ntohs(ext.offset);
		if (fragment & (IP6_FLAG_MF | IP6_OFFSET_MASK)) {
			pkt->flags |= fragment & IP6_OFFSET_MASK ?
					      PACKET_LATER :
					      PACKET_FIRST;
			pkt->fragment_id = ext.id;
			pkt->fragment_proto = ext.nexthdr;
		}
		pkt->l4 += 8;
	} else {
		pkt->l4 += (ext.len + 1) * 8;
	}
	pkt->proto = ext.nexthdr;
	/* What follows in a later fragment is its payload. */
	return !(pkt->flags & PACKET_LATER);
}

static __always_inline enum verdict parse_v6(struct __sk_buff *skb,
					     struct packet *pkt)
{
	struct ipv6hdr ip;
	int i;

	if (read_header(skb, pkt->l3, &ip, sizeof(ip)) || ip.version != 6)
		return VERDICT_NOT_IP;
	pkt->l4 = pkt->l3 + sizeof(ip);
	pkt->proto = ip.nexthdr;
	__builtin_memcpy(pkt->tuple.v6.saddr, &ip.saddr, 16);
	__builtin_memcpy(pkt->tuple.v6.daddr, &ip.daddr, 16);

	for (i = 0; i < LIMIT_IPV6_HEADERS; i++)
		if (!step_over(skb, pkt))
			break;
	/* What is behind still more headers is not known to be ours to change.
	 */
	if (i == LIMIT_IPV6_HEADERS && is_extension(pkt->proto))
		pkt->flags |= PACKET_MALFORMED;
	pkt->tuple.v6.proto = pkt->proto;
	return VERDICT_UNDECIDED;
}

static __always_inline enum verdict parse_network(struct __sk_buff *skb,
						  struct packet *pkt,
						  const enum family family,
						  __u32 l2_len)
{
	pkt->l3 = l2_len;
	return family == FAMILY_V4 ? parse_v4(skb, pkt) : parse_v6(skb, pkt);
}

#endif
