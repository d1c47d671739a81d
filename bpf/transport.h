/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_TRANSPORT_H
#define MASQ_TRANSPORT_H

/*
 * Transport headers: what they say of the flow, and whether they can be true.
 * What conntrack would call invalid for its lengths is malformed here too: it
 * is of no flow and opens none.
 */

#include <linux/icmpv6.h>
#include <linux/in.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <stddef.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "masq.h"
#include "packet.h"
#include "sctp.h"

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

	if (read_header(skb, pkt->l4, &icmp, sizeof(icmp))) {
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
	__u8 flags;

	if (read_header(skb, pkt->l4, &tcp, sizeof(tcp)) || tcp.doff < 5 ||
	    pkt->l4 + tcp.doff * 4 > skb->len) {
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

struct udp_head {
	__be16 source;
	__be16 dest;
	__be16 len; /* UDP-Lite: octets under the checksum, 0: all */
	__sum16 check;
};

/*
 * Whether a length that the header names is that of a datagram: at least its
 * header's, and no more than there is. A first fragment has only a part of it.
 */
static __always_inline bool plausible_len(const struct __sk_buff *skb,
					  const struct packet *pkt, __u32 len)
{
	if (len < sizeof(struct udp_head))
		return false;
	return pkt->flags & PACKET_FIRST || len <= transport_len(skb, pkt);
}

static __always_inline void parse_udp(struct __sk_buff *skb, struct packet *pkt,
				      const enum family family)
{
	struct udp_head udp;

	if (read_header(skb, pkt->l4, &udp, sizeof(udp)) ||
	    !plausible_len(skb, pkt, bpf_ntohs(udp.len))) {
		pkt->flags |= PACKET_MALFORMED;
		return;
	}
	set_ports(pkt, family, udp.source, udp.dest);
}

/* RFC 3828 section 3.1; there is always a checksum. */
static __always_inline void parse_udplite(struct __sk_buff *skb,
					  struct packet *pkt,
					  const enum family family)
{
	struct udp_head udp;

	if (read_header(skb, pkt->l4, &udp, sizeof(udp)) || !udp.check ||
	    (udp.len && !plausible_len(skb, pkt, bpf_ntohs(udp.len)))) {
		pkt->flags |= PACKET_MALFORMED;
		return;
	}
	set_ports(pkt, family, udp.source, udp.dest);
}

/* The generic header with short sequence numbers, RFC 4340 section 5.1. */
struct dccp_head {
	__be16 source;
	__be16 dest;
	__u8 doff; /* in units of four octets */
	__u8 coverage;
	__sum16 check;
	__be32 rest;
};

static __always_inline void
parse_dccp(struct __sk_buff *skb, struct packet *pkt, const enum family family)
{
	struct dccp_head dccp;

	if (bpf_skb_load_bytes(skb, pkt->l4, &dccp, sizeof(dccp)) ||
	    dccp.doff * 4 < (int)sizeof(dccp) ||
	    dccp.doff * 4 > transport_len(skb, pkt)) {
		pkt->flags |= PACKET_MALFORMED;
		return;
	}
	set_ports(pkt, family, dccp.source, dccp.dest);
}

/* Whether the transport header begins with two ports. */
static __always_inline bool has_ports(__u8 proto)
{
	return proto == IPPROTO_TCP || proto == IPPROTO_UDP ||
	       proto == IPPROTO_SCTP || proto == IPPROTO_UDPLITE ||
	       proto == IPPROTO_DCCP;
}

#define CHECKSUM_NONE 0

/* Protocols that linux/in.h does not have. */
#define IPPROTO_OSPF 89
#define IPPROTO_MOBILITY 135
#define IPPROTO_HIP 139

/*
 * Where the checksum stands in the transport header. CHECKSUM_NONE: there is
 * none that we could or must correct (SCTP's CRC covers no address).
 */
static __always_inline __u32 checksum_offset(__u8 proto,
					     const enum family family)
{
	const bool v6 = family == FAMILY_V6;

	switch (proto) {
	case IPPROTO_TCP:
		return offsetof(struct tcphdr, check);
	case IPPROTO_UDP:
	case IPPROTO_UDPLITE:
		return offsetof(struct udp_head, check);
	case IPPROTO_DCCP:
		return offsetof(struct dccp_head, check);
	case IPPROTO_ICMP:
		return v6 ? CHECKSUM_NONE :
			    offsetof(struct icmp_head, checksum);
	case IPPROTO_ICMPV6:
		return v6 ? offsetof(struct icmp_head, checksum) :
			    CHECKSUM_NONE;
	case IPPROTO_HIP: /* RFC 7401 section 5.1.1 */
		return 4;
	case IPPROTO_MOBILITY: /* RFC 6275 section 6.1.1 */
		return v6 ? 4 : CHECKSUM_NONE;
	case IPPROTO_OSPF: /* RFC 5340 section 4.1.2 */
		return v6 ? 12 : CHECKSUM_NONE;
	case IPPROTO_PIM: /* RFC 7761 section 4.9 */
		return v6 ? 2 : CHECKSUM_NONE;
	}
	return CHECKSUM_NONE;
}

/*
 * Flows of a protocol without ports are told apart by their addresses alone:
 * their ports are known, as 0. A checksum over addresses has to be there.
 */
static __always_inline void
parse_other(struct __sk_buff *skb, struct packet *pkt, const enum family family)
{
	__u32 check = checksum_offset(pkt->proto, family);
	__sum16 sum;

	if (check != CHECKSUM_NONE &&
	    bpf_skb_load_bytes(skb, pkt->l4 + check, &sum, sizeof(sum)))
		pkt->flags |= PACKET_MALFORMED;
	else
		pkt->flags |= PACKET_PORTS;
}

/* Fills in what the transport header tells. */
static __always_inline void parse_transport(struct __sk_buff *skb,
					    struct packet *pkt,
					    const enum family family)
{
	if (pkt->flags & (PACKET_LATER | PACKET_MALFORMED))
		return;
	if (is_icmp(pkt, family)) {
		parse_icmp(skb, pkt, family);
		return;
	}
	switch (pkt->proto) {
	case IPPROTO_TCP:
		parse_tcp(skb, pkt, family);
		break;
	case IPPROTO_UDP:
		parse_udp(skb, pkt, family);
		break;
	case IPPROTO_SCTP:
		parse_sctp(skb, pkt, family);
		break;
	case IPPROTO_UDPLITE:
		parse_udplite(skb, pkt, family);
		break;
	case IPPROTO_DCCP:
		parse_dccp(skb, pkt, family);
		break;
	default:
		parse_other(skb, pkt, family);
	}
}

#endif
