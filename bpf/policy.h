/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_POLICY_H
#define MASQ_POLICY_H

/* Which packets are for us, and what the configuration says of them. */

#include "maps.h"
#include "parse.h"

#define DHCP_SERVER_PORT 67
#define DHCP_CLIENT_PORT 68

static __always_inline struct uplink *this_uplink(void)
{
	__u32 slot = cfg_slot;

	return bpf_map_lookup_elem(&uplinks, &slot);
}

/* Whether an uplink leaves new flows to others: see left_to_others(). */
static __always_inline bool is_closed(const struct uplink *uplink,
				      const enum family family)
{
	return uplink->flags &
	       (family == FAMILY_V4 ? UPLINK_CLOSED_V4 : UPLINK_CLOSED_V6);
}

/* Addresses that are never touched, in either direction. */
static __always_inline bool exempt_v4(const struct packet *pkt)
{
	const struct tuple_v4 *t = &pkt->tuple.v4;

	if (!t->saddr || t->daddr == bpf_htonl(INADDR_BROADCAST))
		return true;
	/* Multicast, 224.0.0.0/4. */
	if ((t->daddr & bpf_htonl(0xf0000000)) == bpf_htonl(0xe0000000))
		return true;
	return false;
}

/*
 * The node's own DHCP client renews from its address and port 68, and would
 * not know another (RFC 2131 section 4.4.5).
 */
static __always_inline bool dhcp_client(const struct packet *pkt)
{
	const struct tuple_v4 *t = &pkt->tuple.v4;
	const enum node_address *kind;

	if (pkt->proto != IPPROTO_UDP ||
	    t->sport != bpf_htons(DHCP_CLIENT_PORT) ||
	    t->dport != bpf_htons(DHCP_SERVER_PORT))
		return false;
	kind = bpf_map_lookup_elem(&node_v4, &t->saddr);
	return kind && *kind == NODE_ADDRESS_LOCAL;
}

/* Neighbour and multicast listener discovery: RFC 4861, 3810, 4286. */
static __always_inline bool neighbour_message(__u8 type)
{
	return (type >= 130 && type <= 137) || type == 143 ||
	       (type >= 151 && type <= 153);
}

static __always_inline bool link_scope_v6(const __be32 *addr)
{
	/* fe80::/10 */
	return (addr[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000);
}

static __always_inline bool exempt_v6(const struct packet *pkt)
{
	const struct tuple_v6 *t = &pkt->tuple.v6;

	if (!(t->saddr[0] | t->saddr[1] | t->saddr[2] | t->saddr[3]))
		return true;
	/* Multicast, ff00::/8. */
	if ((t->daddr[0] & bpf_htonl(0xff000000)) == bpf_htonl(0xff000000))
		return true;
	return link_scope_v6(t->saddr) || link_scope_v6(t->daddr);
}

static __always_inline bool exempt_address(const struct packet *pkt,
					   const enum family family)
{
	return family == FAMILY_V4 ? exempt_v4(pkt) : exempt_v6(pkt);
}

/* Messages that are never touched, in either direction. */
static __always_inline bool exempt_message(const struct packet *pkt,
					   const enum family family)
{
	if (family == FAMILY_V4)
		return dhcp_client(pkt);
	return pkt->proto == IPPROTO_ICMPV6 &&
	       neighbour_message(pkt->icmp_type);
}

#define VLAN_ID_MASK 0x0fff
#define VLAN_HLEN 4

static __always_inline bool is_vlan_protocol(__be16 proto)
{
	return proto == bpf_htons(ETH_P_8021Q) ||
	       proto == bpf_htons(ETH_P_8021AD);
}

/*
 * Packets of a VLAN cross its parent with the tag beside them. They are the
 * business of the VLAN's own programs. Tag 0 is a priority only.
 */
static __always_inline bool of_vlan(const struct __sk_buff *skb)
{
	return skb->vlan_present && skb->vlan_tci & VLAN_ID_MASK;
}

/*
 * What the frame carries. A VLAN that keeps its tag (reorder_hdr off) has it in
 * the frames that arrive, and in those that leave if the device below cannot
 * put it there. 0: a VLAN's that only crosses.
 */
static __always_inline __be16 network_protocol(struct __sk_buff *skb)
{
	const struct uplink *uplink;
	__be16 proto = skb->protocol;

	if (!is_vlan_protocol(proto))
		return proto;
	uplink = this_uplink();
	if (!uplink || !(uplink->flags & UPLINK_TAGGED) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN + VLAN_HLEN - sizeof(proto),
			       &proto, sizeof(proto)))
		return 0;
	return proto;
}

/* The length of the link's header, with its tag if that is there. */
static __always_inline __u32 link_header_len(struct __sk_buff *skb,
					     const struct uplink *uplink)
{
	__be16 proto;

	if (!(uplink->flags & UPLINK_TAGGED) ||
	    bpf_skb_load_bytes(skb, offsetof(struct ethhdr, h_proto), &proto,
			       sizeof(proto)) ||
	    !is_vlan_protocol(proto))
		return uplink->l2_len;
	return uplink->l2_len + VLAN_HLEN;
}

/* Whether addr lies in a non-masquerade CIDR. */
static __always_inline bool cidr_keeps(const union address *addr,
				       const enum family family)
{
	const enum cidr_verdict *verdict;

	if (family == FAMILY_V4) {
		struct cidr_v4 key = { .prefixlen = 32 };

		__builtin_memcpy(key.addr, &addr->v4, sizeof(key.addr));
		verdict = bpf_map_lookup_elem(&nonmasq_v4, &key);
	} else {
		struct cidr_v6 key = { .prefixlen = 128 };

		__builtin_memcpy(key.addr, addr->v6, sizeof(key.addr));
		verdict = bpf_map_lookup_elem(&nonmasq_v6, &key);
	}
	return verdict && *verdict == CIDR_KEEP;
}

/* Whether addr lies in a CIDR that was exempt until recently. */
static __always_inline bool cidr_drains(const union address *addr,
					const enum family family, __u64 now)
{
	const __u64 *until;

	if (family == FAMILY_V4) {
		struct cidr_v4 key = { .prefixlen = 32 };

		__builtin_memcpy(key.addr, &addr->v4, sizeof(key.addr));
		until = bpf_map_lookup_elem(&draining_v4, &key);
	} else {
		struct cidr_v6 key = { .prefixlen = 128 };

		__builtin_memcpy(key.addr, addr->v6, sizeof(key.addr));
		until = bpf_map_lookup_elem(&draining_v6, &key);
	}
	return until && (__s64)(*until - now) > 0;
}

/* What addr is to the node: NULL if it is not the node's at all. */
static __always_inline const enum node_address *
node_address(const union address *addr, const enum family family)
{
	if (family == FAMILY_V4)
		return bpf_map_lookup_elem(&node_v4, &addr->v4);
	return bpf_map_lookup_elem(&node_v6, addr->v6);
}

/* Whether addr is the one that everything leaves an uplink with. */
static __always_inline bool is_only_address(const struct uplink *uplink,
					    const union address *addr,
					    const enum family family)
{
	union address only;

	if (family == FAMILY_V4) {
		only.v4 = uplink->addr_v4;
		return uplink->flags & UPLINK_ONE_V4 &&
		       same_address(addr, &only, family);
	}
	__builtin_memcpy(only.v6, uplink->addr_v6, 16);
	return uplink->flags & UPLINK_ONE_V6 &&
	       same_address(addr, &only, family);
}

/*
 * Whether the packet can be a flow's first, as conntrack has it (tcp_new()): a
 * bare ACK picks up a connection in the middle, if that is wanted.
 */
static __always_inline bool may_open(const struct packet *pkt,
				     const enum family family)
{
	if (pkt->flags & (PACKET_MALFORMED | PACKET_UNDERWAY))
		return false;
	if (pkt->proto == IPPROTO_TCP)
		return pkt->tcp_flags == TCP_FLAG_SYN_BIT ||
		       (cfg_tcp_loose && pkt->tcp_flags == TCP_FLAG_ACK_BIT);
	return !is_icmp(pkt, family) || pkt->flags & PACKET_QUERY;
}

/* A SYN opens: it is never a reply, whatever any table says. */
static __always_inline bool opens_tcp(const struct packet *pkt)
{
	return pkt->proto == IPPROTO_TCP &&
	       (pkt->tcp_flags & (TCP_FLAG_SYN_BIT | TCP_FLAG_ACK_BIT)) ==
		       TCP_FLAG_SYN_BIT;
}

/* Whether the packet's source is what MASQUERADE would pick. */
static __always_inline bool has_own_address(const struct scratch *s,
					    const enum family family)
{
	union address src;

	source(&s->packet, family, &src);
	return s->usable && same_address(&src, &s->addr, family);
}

#endif
