/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_PARSE_H
#define MASQ_PARSE_H

#include <linux/icmpv6.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <stddef.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "masq.h"
#include "packet.h"

#ifndef IPPROTO_SCTP
#define IPPROTO_SCTP 132
#endif

#define IP_FLAG_MF 0x2000
#define IP_OFFSET_MASK 0x1fff
#define IP6_FLAG_MF 0x0001
#define IP6_OFFSET_MASK 0xfff8

#define TCP_FLAG_FIN_BIT 0x01
#define TCP_FLAG_SYN_BIT 0x02
#define TCP_FLAG_RST_BIT 0x04
#define TCP_FLAG_ACK_BIT 0x10
/* The flags that open and close; PSH, URG, ECE and CWR say nothing of that. */
#define TCP_FLAG_STATE_BITS                                                    \
	(TCP_FLAG_FIN_BIT | TCP_FLAG_SYN_BIT | TCP_FLAG_RST_BIT |              \
	 TCP_FLAG_ACK_BIT)

/* linux/icmp.h has these too, but draws in the C library's headers. */
enum icmp_type {
	ICMP_ECHOREPLY = 0,
	ICMP_DEST_UNREACH = 3,
	ICMP_SOURCE_QUENCH = 4,
	ICMP_REDIRECT = 5,
	ICMP_ECHO = 8,
	ICMP_TIME_EXCEEDED = 11,
	ICMP_PARAMETERPROB = 12,
	ICMP_TIMESTAMP = 13,
	ICMP_TIMESTAMPREPLY = 14,
	ICMP_INFO_REQUEST = 15,
	ICMP_INFO_REPLY = 16,
	ICMP_ADDRESS = 17,
	ICMP_ADDRESSREPLY = 18,
};

/* ICMPv6 node information, RFC 4620. */
#define ICMP_NODE_QUERY 139
#define ICMP_NODE_REPLY 140

/*
 * The type of the question that an ICMP message asks or answers, in the place
 * of a port: identifiers of different questions are different spaces, as in
 * nf_conntrack_proto_icmp.c. 0 if the message is neither.
 */
static __always_inline __be16 icmp_query_port(struct packet *pkt)
{
	__u8 type = pkt->icmp_type;

	switch (type) {
	case ICMP_ECHO:
	case ICMP_TIMESTAMP:
	case ICMP_INFO_REQUEST:
	case ICMP_ADDRESS:
		pkt->flags |= PACKET_QUERY;
		return bpf_htons(type);
	case ICMP_ECHOREPLY:
		pkt->flags |= PACKET_REPLY;
		return bpf_htons(ICMP_ECHO);
	case ICMP_TIMESTAMPREPLY:
	case ICMP_INFO_REPLY:
	case ICMP_ADDRESSREPLY:
		pkt->flags |= PACKET_REPLY;
		return bpf_htons(type - 1);
	}
	return 0;
}

static __always_inline __be16 icmpv6_query_port(struct packet *pkt)
{
	switch (pkt->icmp_type) {
	case ICMPV6_ECHO_REQUEST:
	case ICMP_NODE_QUERY:
		pkt->flags |= PACKET_QUERY;
		return bpf_htons(pkt->icmp_type);
	case ICMPV6_ECHO_REPLY:
	case ICMP_NODE_REPLY:
		pkt->flags |= PACKET_REPLY;
		return bpf_htons(pkt->icmp_type - 1);
	}
	return 0;
}

static __always_inline bool icmp_quotes(__u8 type, const enum family family)
{
	if (family == FAMILY_V6)
		return type >= ICMPV6_DEST_UNREACH && type <= ICMPV6_PARAMPROB;
	return type == ICMP_DEST_UNREACH || type == ICMP_SOURCE_QUENCH ||
	       type == ICMP_REDIRECT || type == ICMP_TIME_EXCEEDED ||
	       type == ICMP_PARAMETERPROB;
}

struct icmp_head {
	__u8 type;
	__u8 code;
	__be16 checksum;
	__be16 id;
	__be16 sequence;
};

static __always_inline void
parse_icmp(struct __sk_buff *skb, struct packet *pkt, const enum family family)
{
	struct icmp_head icmp;
	__be16 query;

	if (bpf_skb_load_bytes(skb, pkt->l4, &icmp, sizeof(icmp))) {
		pkt->flags |= PACKET_MALFORMED;
		return;
	}
	pkt->icmp_type = icmp.type;
	if (icmp_quotes(icmp.type, family)) {
		pkt->flags |= PACKET_ERROR;
		return;
	}
	query = family == FAMILY_V4 ? icmp_query_port(pkt) :
				      icmpv6_query_port(pkt);
	if (pkt->flags & PACKET_QUERY)
		set_ports(pkt, family, icmp.id, query);
	else if (pkt->flags & PACKET_REPLY)
		set_ports(pkt, family, query, icmp.id);
}

static __always_inline void parse_tcp(struct __sk_buff *skb, struct packet *pkt,
				      const enum family family)
{
	struct tcphdr tcp;
	__u8 flags, last;

	if (bpf_skb_load_bytes(skb, pkt->l4, &tcp, sizeof(tcp)) ||
	    tcp.doff < 5 ||
	    bpf_skb_load_bytes(skb, pkt->l4 + tcp.doff * 4 - 1, &last, 1)) {
		pkt->flags |= PACKET_MALFORMED;
		return;
	}
	flags = ((__u8 *)&tcp)[13];
	pkt->tcp_flags = flags & TCP_FLAG_STATE_BITS;
	pkt->tcp_seq = bpf_ntohl(tcp.seq);
	pkt->tcp_ack = tcp.ack ? bpf_ntohl(tcp.ack_seq) : 0;
	pkt->tcp_end = pkt->tcp_seq + tcp.syn + tcp.fin + skb->len - pkt->l4 -
		       tcp.doff * 4;
	set_ports(pkt, family, tcp.source, tcp.dest);
}

/* UDP and SCTP begin with their ports. */
static __always_inline void
parse_ports(struct __sk_buff *skb, struct packet *pkt, const enum family family)
{
	__be16 ports[4];
	__u32 min = pkt->proto == IPPROTO_SCTP ? 12 : 8;
	__u8 last;

	if (bpf_skb_load_bytes(skb, pkt->l4, ports, sizeof(ports)) ||
	    bpf_skb_load_bytes(skb, pkt->l4 + min - 1, &last, 1)) {
		pkt->flags |= PACKET_MALFORMED;
		return;
	}
	set_ports(pkt, family, ports[0], ports[1]);
}

/*
 * Fills in what the transport header tells. Flows of a protocol that we do not
 * know are told apart by their addresses alone: their ports are known, as 0.
 */
static __always_inline void parse_transport(struct __sk_buff *skb,
					    struct packet *pkt,
					    const enum family family)
{
	if (pkt->flags & PACKET_LATER)
		return;
	if (is_icmp(pkt, family))
		parse_icmp(skb, pkt, family);
	else if (pkt->proto == IPPROTO_TCP)
		parse_tcp(skb, pkt, family);
	else if (pkt->proto == IPPROTO_UDP || pkt->proto == IPPROTO_SCTP)
		parse_ports(skb, pkt, family);
	else
		pkt->flags |= PACKET_PORTS;
}

/* Both return VERDICT_UNDECIDED, or VERDICT_NOT_IP for what is none. */
static __always_inline enum verdict parse_v4(struct __sk_buff *skb,
					     struct packet *pkt)
{
	struct iphdr ip;
	__u16 fragment;

	if (bpf_skb_load_bytes(skb, pkt->l3, &ip, sizeof(ip)) ||
	    ip.version != 4 || ip.ihl < 5)
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

	if (bpf_skb_load_bytes(skb, pkt->l3, &ip, sizeof(ip)) ||
	    ip.version != 6)
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

static __always_inline enum verdict parse(struct __sk_buff *skb,
					  struct packet *pkt,
					  const enum family family,
					  __u32 l2_len)
{
	enum verdict verdict;

	pkt->l3 = l2_len;
	verdict = family == FAMILY_V4 ? parse_v4(skb, pkt) : parse_v6(skb, pkt);
	if (verdict)
		return verdict;
	if (!(pkt->flags & PACKET_MALFORMED))
		parse_transport(skb, pkt, family);
	return VERDICT_UNDECIDED;
}

#endif
