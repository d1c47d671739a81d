/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_PACKET_H
#define MASQ_PACKET_H

/* A packet as the rules see it, and the flow that it shows. */

#include <linux/in.h>

#include <linux/bpf.h>
#include <linux/types.h>
#include <stddef.h>

#include <bpf/bpf_helpers.h>

#include "maps.h"

/* linux/socket.h has them for the kernel only. */
#define AF_INET 2
#define AF_INET6 10

enum packet_flag {
	PACKET_PORTS = 1, /* the tuple's ports are known */
	PACKET_FIRST = 2, /* first of several fragments: has the header */
	PACKET_LATER = 4, /* another fragment: has no header */
	PACKET_QUERY = 8, /* ICMP that asks */
	PACKET_REPLY = 16, /* ICMP that answers */
	PACKET_ERROR = 32, /* ICMP that quotes another packet */
	PACKET_MALFORMED = 64, /* transport header cut short or nonsense */
	PACKET_UNDERWAY = 128, /* SCTP that is no association's first */
};

union tuple {
	struct tuple_v4 v4;
	struct tuple_v6 v6;
};

union address {
	__be32 v4;
	__be32 v6[4];
};

struct packet {
	union tuple tuple;
	__u32 l3; /* offsets of the headers in the packet */
	__u32 l4;
	__be32 fragment_id;
	__u32 tcp_seq; /* of this segment */
	__u32 tcp_end; /* after it */
	__u32 tcp_ack; /* 0: it acknowledges nothing */
	__u8 proto; /* of the transport header */
	__u8 fragment_proto; /* behind the fragment header */
	__u8 flags; /* enum packet_flag */
	__u8 tcp_flags;
	__u8 icmp_type;
	__u8 dscp; /* IPv4 TOS, for the route lookup */
};

/*
 * Where a packet's data is while we look at it. Not on the stack: functions
 * that are verified on their own (so that the verifier's work adds up instead
 * of multiplying) can share it, and the stack stays within its 512 bytes.
 * Nothing interrupts a program on its CPU that would use it too: the hooks run
 * with bottom halves disabled.
 */
struct scratch {
	struct packet packet;
	struct packet quote; /* what an ICMP error quotes */
	union tuple reply; /* of the packet, or of a flow to be */
	union tuple origin; /* what a pod sends that has this reply */
	union address addr; /* masquerade address */
	__be16 port;
	bool usable; /* there is a masquerade address */
	bool ended; /* the packet found its flow dead, or ended it */
	__u32 redirect; /* the link that VERDICT_FAST_PATH sends it to */
	struct way way; /* there */
	__u32 index; /* see opaque() */
	__u64 told[VERDICT_COUNT]; /* when this CPU last sent such an event */
};

/* One element a CPU. All but told means nothing to the next packet. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct scratch);
} scratch SEC(".maps");

static __always_inline struct scratch *this_scratch(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&scratch, &zero);
}

/*
 * The same number, of which the verifier has no opinion. Without PERFMON it
 * takes no index that it knows on one path and not, or otherwise, on another.
 */
static __always_inline __u32 opaque(struct scratch *s, __u32 n)
{
	volatile __u32 *index = &s->index;

	*index = n;
	return *index;
}

static __always_inline bool is_icmp(const struct packet *pkt,
				    const enum family family)
{
	return pkt->proto ==
	       (family == FAMILY_V4 ? IPPROTO_ICMP : IPPROTO_ICMPV6);
}

/* Octets from the transport header to the end of the packet. */
static __always_inline __u32 transport_len(const struct __sk_buff *skb,
					   const struct packet *pkt)
{
	return skb->len - pkt->l4;
}

static __always_inline void set_ports(struct packet *pkt,
				      const enum family family, __be16 sport,
				      __be16 dport)
{
	if (family == FAMILY_V4) {
		pkt->tuple.v4.sport = sport;
		pkt->tuple.v4.dport = dport;
	} else {
		pkt->tuple.v6.sport = sport;
		pkt->tuple.v6.dport = dport;
	}
	pkt->flags |= PACKET_PORTS;
}

/* The tuple of the replies to a tuple. */
static __always_inline void mirror(const union tuple *from, union tuple *to,
				   const enum family family)
{
	if (family == FAMILY_V4) {
		to->v4.saddr = from->v4.daddr;
		to->v4.daddr = from->v4.saddr;
		to->v4.sport = from->v4.dport;
		to->v4.dport = from->v4.sport;
		to->v4.proto = from->v4.proto;
		__builtin_memset(to->v4.pad, 0, sizeof(to->v4.pad));
		return;
	}
	__builtin_memcpy(to->v6.saddr, from->v6.daddr, 16);
	__builtin_memcpy(to->v6.daddr, from->v6.saddr, 16);
	to->v6.sport = from->v6.dport;
	to->v6.dport = from->v6.sport;
	to->v6.proto = from->v6.proto;
	__builtin_memset(to->v6.pad, 0, sizeof(to->v6.pad));
}

enum side {
	SIDE_SOURCE,
	SIDE_DESTINATION,
};

static __always_inline void tuple_source(const union tuple *tuple,
					 const enum family family,
					 union address *addr)
{
	if (family == FAMILY_V4)
		addr->v4 = tuple->v4.saddr;
	else
		__builtin_memcpy(addr->v6, tuple->v6.saddr, 16);
}

static __always_inline void
source(const struct packet *pkt, const enum family family, union address *addr)
{
	tuple_source(&pkt->tuple, family, addr);
}

static __always_inline void destination(const struct packet *pkt,
					const enum family family,
					union address *addr)
{
	if (family == FAMILY_V4)
		addr->v4 = pkt->tuple.v4.daddr;
	else
		__builtin_memcpy(addr->v6, pkt->tuple.v6.daddr, 16);
}

static __always_inline bool same_address(const union address *a,
					 const union address *b,
					 const enum family family)
{
	if (family == FAMILY_V4)
		return a->v4 == b->v4;
	return !((a->v6[0] ^ b->v6[0]) | (a->v6[1] ^ b->v6[1]) |
		 (a->v6[2] ^ b->v6[2]) | (a->v6[3] ^ b->v6[3]));
}

static __always_inline __be16 port_of(const union tuple *tuple,
				      const enum family family,
				      const enum side side)
{
	if (family == FAMILY_V4)
		return side == SIDE_SOURCE ? tuple->v4.sport : tuple->v4.dport;
	return side == SIDE_SOURCE ? tuple->v6.sport : tuple->v6.dport;
}

/* Farther in than any header that we walk to: the verifier wants a bound. */
#define HEADER_OFFSET_MAX 0x7fff

/*
 * Where the bytes at an offset are, if they are in the packet's linear part.
 * NULL: they are not, or the verifier lets nobody compute where; only the
 * helpers reach them.
 */
static __always_inline void *linear(const struct __sk_buff *skb, __u32 offset,
				    const __u32 len)
{
	void *data = (void *)(long)skb->data;
	__u64 at = offset;

	if (!cfg_direct)
		return NULL;
	barrier_var(at); /* or the bound is checked on another copy of it */
	if (at > HEADER_OFFSET_MAX ||
	    data + at + len > (void *)(long)skb->data_end)
		return NULL;
	return data + at;
}

/*
 * Copies a header, whose length is a multiple of 4, out of the packet: without
 * a call where it is in the linear part. Not 0: the packet is shorter.
 */
static __always_inline int read_header(const struct __sk_buff *skb,
				       __u32 offset, void *to, const __u32 len)
{
	const void *from = linear(skb, offset, len);

	if (!from)
		return bpf_skb_load_bytes(skb, offset, to, len);
	__builtin_memcpy(to, __builtin_assume_aligned(from, 4), len);
	return 0;
}

#endif
