/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_FASTPATH_H
#define MASQ_FASTPATH_H

/*
 * The fast path (--fast-path): packets of flows that are well under way go from
 * the pod's link to the uplink, and back, without the stack between the two.
 *
 * The stack teaches the ways. A packet that it has taken from a pod's link to
 * an uplink shows, there, the frame that it made; the next packets of the flow
 * get the same one, for a second. Then the next one takes the stack's way
 * again. So the fast path forgets within a second what has become wrong (a
 * route, a neighbour, a rule in FORWARD), with or without an agent, and
 * conntrack hears of each flow as long as it lives.
 */

#include "kernel.h"
#include "nat.h"
#include "packet.h"
#include "parse.h"
#include "policy.h"
#include "rewrite.h"
#include "ways.h"

/* A reply is fast only while what the pod sends may be, or could be again. */
#define WAY_GRACE NSEC_PER_SEC

#define PACKET_HOST 0 /* linux/if_packet.h: it is for us */

/* The length of the packet on the wire, or of the segments that it becomes. */
static __always_inline __u32 wire_len(const struct __sk_buff *skb,
				      const struct packet *pkt)
{
	__u32 len = skb->len - pkt->l3, payload;

	if (!skb->gso_size)
		return len;
	payload = pkt->proto == IPPROTO_TCP ?
			  pkt->tcp_end - pkt->tcp_seq :
			  skb->len - pkt->l4 - sizeof(struct udp_head);
	return len - payload + skb->gso_size;
}

/*
 * Whether there is as much of the packet as its header says (more can be an
 * Ethernet frame's padding), and it may go on from here.
 */
static __always_inline bool outlives_hop(const struct __sk_buff *skb,
					 const struct packet *pkt,
					 const enum family family)
{
	__u32 len = skb->len - pkt->l3;
	const struct ipv6hdr *v6;
	const struct iphdr *v4;

	if (family == FAMILY_V4) {
		v4 = linear(skb, pkt->l3, sizeof(*v4));
		return v4 && bpf_ntohs(v4->tot_len) <= len && v4->ttl > 1;
	}
	v6 = linear(skb, pkt->l3, sizeof(*v6));
	return v6 && bpf_ntohs(v6->payload_len) + sizeof(*v6) <= len &&
	       v6->hop_limit > 1;
}

/* Whether the packet may take a way, as it is. */
static __always_inline bool passes(const struct __sk_buff *skb,
				   const struct packet *pkt,
				   const enum family family,
				   const struct way *way, __u64 now)
{
	return (__s64)(way->until - now) > 0 && skb->pkt_type == PACKET_HOST &&
	       wire_len(skb, pkt) <= way->mtu && outlives_hop(skb, pkt, family);
}

/* What forwarding does to a header: ip_decrease_ttl(). */
static __always_inline bool age(struct __sk_buff *skb, const struct packet *pkt,
				const enum family family)
{
	struct ipv6hdr *v6;
	struct iphdr *v4;
	__be16 *hops, old;

	if (family == FAMILY_V4) {
		v4 = linear(skb, pkt->l3, sizeof(*v4));
		if (!v4)
			return false;
		v4->ttl--;
		v4->check =
			adjust(v4->check, short_change(bpf_htons(0x0100), 0));
		return true;
	}
	v6 = linear(skb, pkt->l3, sizeof(*v6));
	if (!v6)
		return false;
	hops = (__be16 *)&v6->nexthdr;
	old = *hops;
	v6->hop_limit--;
	if (ip_summed(skb) == IP_SUMMED_COMPLETE)
		bpf_csum_update(skb, short_change(old, *hops));
	return true;
}

static __always_inline void copy_macs(void *to, const void *from)
{
	__builtin_memcpy(__builtin_assume_aligned(to, 2),
			 __builtin_assume_aligned(from, 2), 2 * ETH_ALEN);
}

static __always_inline bool set_macs(struct __sk_buff *skb,
				     const struct way *way)
{
	void *frame = linear(skb, 0, 2 * ETH_ALEN);

	if (!frame)
		return false;
	copy_macs(frame, way->macs);
	return true;
}

/*
 * Decides about a reply, before it is rewritten. 1: it takes the way that is in
 * scratch then. One that comes in by another uplink than its flow leaves by is
 * for the stack to judge (rp_filter).
 */
static __always_inline int choose_way_back(struct __sk_buff *skb,
					   const enum family family)
{
	const struct fast_path_config *fast = fast_path_now();
	struct scratch *s = this_scratch();
	__u64 now = bpf_ktime_get_ns();
	const struct ways *ways;

	if (!cfg_fast_path || !fast || !s || !(fast->flags & FAST_PATH_ON))
		return 0;
	ways = find_ways(&s->origin, family);
	if (!ways || ways->generation != fast->generation ||
	    ways->uplink != skb->ifindex ||
	    (__s64)(ways->out.until + WAY_GRACE - now) <= 0)
		return 0;
	if ((__s64)(ways->back.until - now) <= 0) {
		learn_way_back(skb, s, family, ways, fast, now);
		return 0;
	}
	if (!passes(skb, &s->packet, family, &ways->back, now))
		return 0;
	s->redirect = ways->pod_link;
	s->way = ways->back;
	return 1;
}

__noinline int choose_way_back_v4(struct __sk_buff *skb)
{
	return choose_way_back(skb, FAMILY_V4);
}

__noinline int choose_way_back_v6(struct __sk_buff *skb)
{
	return choose_way_back(skb, FAMILY_V6);
}

static __always_inline bool has_way_back(struct __sk_buff *skb,
					 const struct flow *flow,
					 const struct packet *pkt,
					 const enum family family)
{
	if (!cfg_fast_path || !is_settled(flow) || !is_plain(pkt, family) ||
	    pkt->l3 != ETH_HLEN)
		return false;
	return family == FAMILY_V4 ? choose_way_back_v4(skb) :
				     choose_way_back_v6(skb);
}

/* The rest of forwarding, once a packet has been rewritten. */
static __always_inline enum verdict forward(struct __sk_buff *skb,
					    const struct scratch *s,
					    const enum family family)
{
	if (!age(skb, &s->packet, family) || !set_macs(skb, &s->way))
		return VERDICT_DROP_UNSUPPORTED;
	return VERDICT_FAST_PATH;
}

/*
 * Whether the frame was translated where it came in. It has the token where
 * nobody else could have put it: the stack did not touch it meanwhile.
 */
static __always_inline bool came_fast(struct __sk_buff *skb)
{
	const struct fast_path_config *fast;

	if (!cfg_fast_path || !skb->cb[0])
		return false;
	fast = fast_path_now();
	if (!fast || skb->cb[0] != (__u32)fast->token ||
	    skb->cb[1] != (__u32)(fast->token >> 32))
		return false;
	skb->cb[0] = 0;
	skb->cb[1] = 0;
	return true;
}

static __always_inline bool
read_plain(struct __sk_buff *skb, struct packet *pkt, const enum family family)
{
	__builtin_memset(pkt, 0, sizeof(*pkt));
	pkt->l3 = ETH_HLEN;
	if (family == FAMILY_V4 ? parse_v4(skb, pkt) : parse_v6(skb, pkt))
		return false;
	if (pkt->flags)
		return false;
	if (pkt->proto == IPPROTO_TCP)
		parse_tcp(skb, pkt, family);
	else if (pkt->proto == IPPROTO_UDP)
		parse_udp(skb, pkt, family);
	return is_plain(pkt, family);
}

/* The flow that a packet from a pod's link belongs to, if it has a way out. */
static __always_inline struct flow *
flow_with_way(struct __sk_buff *skb, struct scratch *s,
	      const enum family family, const struct fast_path_config *fast,
	      __u64 now)
{
	const struct ways *ways;
	struct flow *flow;

	flow = find_flow(&s->packet.tuple, family);
	if (!flow || !is_settled(flow) || !alive(flow, now))
		return NULL;
	ways = find_ways(&s->packet.tuple, family);
	if (!ways || ways->generation != fast->generation ||
	    ways->pod_link != skb->ifindex || ways->uplink != flow->ifindex ||
	    !passes(skb, &s->packet, family, &ways->out, now))
		return NULL;
	s->redirect = ways->uplink;
	s->way = ways->out;
	return flow;
}

/*
 * A packet from a pod's link. VERDICT_UNDECIDED: it takes the stack's way, as
 * it came.
 */
static __always_inline enum verdict leave_fast(struct __sk_buff *skb,
					       const enum family family)
{
	const struct fast_path_config *fast = fast_path_now();
	struct scratch *s = this_scratch();
	__u64 now = bpf_ktime_get_ns();
	struct flow *flow;

	if (!fast || !s || !(fast->flags & FAST_PATH_ON) || skb->vlan_present)
		return VERDICT_UNDECIDED;
	if (!read_plain(skb, &s->packet, family))
		return VERDICT_UNDECIDED;
	flow = flow_with_way(skb, s, family, fast, now);
	if (!flow)
		return VERDICT_UNDECIDED;
	refresh(flow, &s->packet, now, DIRECTION_EGRESS);
	nat_address(flow, family, &s->addr);
	s->port = flow->nat_port;
	if (rewrite(skb, family, SIDE_SOURCE))
		return VERDICT_DROP_UNSUPPORTED;
	skb->cb[0] = (__u32)fast->token;
	skb->cb[1] = (__u32)(fast->token >> 32);
	return forward(skb, s, family);
}

#endif
