/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_CONNTRACK_H
#define MASQ_CONNTRACK_H

/* What the kernel's conntrack knows, and what we note where it cannot tell. */

#include "kernel.h"
#include "maps.h"
#include "nat.h"
#include "parse.h"
#include "policy.h"

/* The low bits of _nfct: enum ip_conntrack_info. The rest is the entry. */
#define CTINFO_MASK 7UL
#define CTINFO_NEW 2
#define CTINFO_REPLY 3 /* also 4, RELATED_REPLY */
#define CTINFO_RELATED_REPLY 4

/* bpf_ct_opts.dir of a tuple in reply direction: IP_CT_DIR_REPLY. */
#define CT_DIRECTION_REPLY 1

enum conntrack_view {
	CONNTRACK_UNKNOWN, /* no conntrack, or a packet it calls invalid */
	CONNTRACK_NEW,
	CONNTRACK_ORIGINAL, /* original direction of a known connection */
	CONNTRACK_REPLY,
};

#define CURRENT_NETNS (-1)

static __always_inline __u32 sock_tuple_size(const enum family family)
{
	struct bpf_sock_tuple *t;

	return family == FAMILY_V4 ? sizeof(t->ipv4) : sizeof(t->ipv6);
}

/* The MAC that the device has now. The agent's copy may be a moment late. */
static __always_inline bool device_mac(struct __sk_buff *skb, __u8 *mac)
{
	struct sk_buff *kernel;

	if (!cfg_ctinfo)
		return false;
	kernel = bpf_cast_to_kern_ctx(skb);
	return !bpf_probe_read_kernel(mac, ETH_ALEN, kernel->dev->dev_addr);
}

/* The frame's source. Not 0: it has none. */
static __always_inline int read_mac(struct __sk_buff *skb, __u8 *mac)
{
	const __u32 offset = offsetof(struct ethhdr, h_source);
	const void *from = linear(skb, offset, ETH_ALEN);

	if (!from)
		return bpf_skb_load_bytes(skb, offset, mac, ETH_ALEN);
	__builtin_memcpy(mac, __builtin_assume_aligned(from, 2), ETH_ALEN);
	return 0;
}

static __always_inline bool same_mac(const __u8 *a, const __u8 *b)
{
	return !__builtin_memcmp(a, b, ETH_ALEN);
}

/*
 * macvlan children of an uplink send through its egress hook, past the node's
 * netfilter: their frames have a MAC of their own.
 */
static __always_inline bool foreign_source_mac(struct __sk_buff *skb,
					       const struct uplink *uplink)
{
	__u8 mac[ETH_ALEN], now[ETH_ALEN];

	if (!(uplink->flags & UPLINK_ETHERNET))
		return false;
	if (read_mac(skb, mac))
		return false;
	if (same_mac(mac, uplink->mac))
		return false;
	return !device_mac(skb, now) || !same_mac(mac, now);
}

static __always_inline enum conntrack_view ctinfo_view(struct __sk_buff *skb)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);
	unsigned long nfct = kernel->_nfct;

	if (!(nfct & ~CTINFO_MASK))
		return CONNTRACK_UNKNOWN;
	switch (nfct & CTINFO_MASK) {
	case CTINFO_NEW:
		return CONNTRACK_NEW;
	case CTINFO_REPLY:
	case CTINFO_RELATED_REPLY:
		return CONNTRACK_REPLY;
	}
	return CONNTRACK_ORIGINAL;
}

/* Whether conntrack has an entry for a tuple, and in which direction. */
static __always_inline enum conntrack_view
conntrack_lookup(struct __sk_buff *skb, union tuple *tuple, __u8 proto,
		 const enum family family)
{
	struct bpf_ct_opts opts = {
		.netns_id = CURRENT_NETNS,
		.l4proto = proto,
	};
	struct nf_conn *ct;

	if (proto != IPPROTO_TCP && proto != IPPROTO_UDP)
		return CONNTRACK_UNKNOWN;
	/* A tuple begins like struct bpf_sock_tuple. */
	ct = bpf_skb_ct_lookup(skb, (struct bpf_sock_tuple *)tuple,
			       sock_tuple_size(family), &opts, sizeof(opts));
	if (!ct)
		return CONNTRACK_UNKNOWN;
	bpf_ct_release(ct);
	return opts.dir == CT_DIRECTION_REPLY ? CONNTRACK_REPLY :
						CONNTRACK_ORIGINAL;
}

/* How conntrack sees the packet, as far as this kernel lets us know. */
static __always_inline enum conntrack_view
conntrack_view(struct __sk_buff *skb, struct packet *pkt,
	       const enum family family)
{
	if (cfg_ctinfo)
		return ctinfo_view(skb);
	if (cfg_ct_lookup && pkt->flags & PACKET_PORTS)
		return conntrack_lookup(skb, &pkt->tuple, pkt->proto, family);
	return CONNTRACK_UNKNOWN;
}

static __always_inline struct inbound *find_inbound(const union tuple *tuple,
						    const enum family family)
{
	return family == FAMILY_V4 ?
		       bpf_map_lookup_elem(&inbound_v4, &tuple->v4) :
		       bpf_map_lookup_elem(&inbound_v6, &tuple->v6);
}

static __always_inline bool inbound_alive(const struct inbound *inbound,
					  __u8 proto, __u64 now)
{
	__u32 state = proto == IPPROTO_TCP ? FLOW_TCP_ESTABLISHED :
		      proto == IPPROTO_UDP ? FLOW_UDP_STREAM :
					     FLOW_GENERIC;
	const __u32 *seconds = bpf_map_lookup_elem(&timeouts, &state);

	return seconds && (__s64)(now - inbound->last_seen) <
				  (__s64)(*seconds * NSEC_PER_SEC);
}

/*
 * Whether a packet, as it leaves, answers a connection that was opened from
 * outside: by our own notes, for want of better. An ICMP error answers the
 * packet that it quotes.
 */
static __always_inline bool answers_inbound(struct scratch *s,
					    const enum family family, __u64 now)
{
	const struct packet *pkt = &s->packet, *quote = &s->quote;
	struct inbound *inbound;
	union tuple tuple;
	__u8 proto;

	if (pkt->flags & PACKET_ERROR) {
		if (!(quote->flags & PACKET_PORTS))
			return false;
		mirror(&quote->tuple, &tuple, family);
	} else {
		/*
		 * A question of ICMP is no answer. Where its identifier happens
		 * to be its type, its tuple is that of one.
		 */
		if (!(pkt->flags & PACKET_PORTS) || pkt->flags & PACKET_QUERY)
			return false;
		tuple = pkt->tuple;
	}
	proto = family == FAMILY_V4 ? tuple.v4.proto : tuple.v6.proto;
	inbound = find_inbound(&tuple, family);
	if (!inbound || !inbound_alive(inbound, proto, now))
		return false;
	if ((__s64)(now - inbound->last_seen) >= (__s64)NSEC_PER_SEC)
		inbound->last_seen = now;
	return true;
}

/*
 * Notes a connection that a packet from outside opens, by the tuple of its
 * replies. Only SYNs, datagrams and queries open one: a stray FIN noted here
 * would later make an outgoing connection look like a reply.
 */
static __always_inline bool note_inbound(const struct packet *pkt,
					 const enum family family, __u64 now)
{
	struct inbound inbound = { .last_seen = now };
	struct inbound *known;
	union tuple reply;

	if (!(pkt->flags & PACKET_PORTS) ||
	    pkt->flags & (PACKET_REPLY | PACKET_UNDERWAY))
		return false;
	if (pkt->proto == IPPROTO_TCP && !opens_tcp(pkt))
		return false;
	mirror(&pkt->tuple, &reply, family);
	known = find_inbound(&reply, family);
	if (known) {
		if ((__s64)(now - known->last_seen) >= (__s64)NSEC_PER_SEC)
			known->last_seen = now;
		return true;
	}
	if (family == FAMILY_V4)
		bpf_map_update_elem(&inbound_v4, &reply.v4, &inbound, BPF_ANY);
	else
		bpf_map_update_elem(&inbound_v6, &reply.v6, &inbound, BPF_ANY);
	return true;
}

#endif
