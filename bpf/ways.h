/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_WAYS_H
#define MASQ_WAYS_H

/*
 * What the fast path learns of the stack (see fastpath.h): the ways that
 * packets of a flow take between their pod's link and the uplink.
 */

#include "conntrack.h"
#include "kernel.h"
#include "maps.h"
#include "nat.h"
#include "packet.h"
#include "parse.h"

#define WAY_LIFETIME NSEC_PER_SEC

/* linux/netfilter/nf_conntrack_common.h: somebody changes the flow as well. */
#define IPS_SRC_NAT (1 << 4)
#define IPS_DST_NAT (1 << 5)
#define IPS_SEQ_ADJUST (1 << 6)
#define IPS_HELPER (1 << 13)
#define IPS_CHANGED (IPS_SRC_NAT | IPS_DST_NAT | IPS_SEQ_ADJUST | IPS_HELPER)

static __always_inline const struct fast_path_config *fast_path_now(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&fast_path, &zero);
}

static __always_inline struct ways *find_ways(const union tuple *tuple,
					      const enum family family)
{
	return family == FAMILY_V4 ? bpf_map_lookup_elem(&ways_v4, &tuple->v4) :
				     bpf_map_lookup_elem(&ways_v6, &tuple->v6);
}

static __always_inline void keep_ways(const union tuple *tuple,
				      const struct ways *ways,
				      const enum family family)
{
	if (family == FAMILY_V4)
		bpf_map_update_elem(&ways_v4, &tuple->v4, ways, BPF_ANY);
	else
		bpf_map_update_elem(&ways_v6, &tuple->v6, ways, BPF_ANY);
}

/*
 * Whether a packet is of the plain kind: whole, without options, of TCP or UDP,
 * and it neither opens nor closes. All others tell the stack something.
 */
static __always_inline bool is_plain(const struct packet *pkt,
				     const enum family family)
{
	__u32 ip_len = family == FAMILY_V4 ? sizeof(struct iphdr) :
					     sizeof(struct ipv6hdr);

	if (pkt->flags != PACKET_PORTS || pkt->l4 - pkt->l3 != ip_len)
		return false;
	if (pkt->proto == IPPROTO_TCP)
		return pkt->tcp_flags == TCP_FLAG_ACK_BIT;
	return pkt->proto == IPPROTO_UDP;
}

/* Whether both sides have been heard, and none is about to leave. */
static __always_inline bool is_settled(const struct flow *flow)
{
	if (!flow->replied)
		return false;
	return flow->state == FLOW_TCP_ESTABLISHED || flow->state == FLOW_UDP ||
	       flow->state == FLOW_UDP_STREAM;
}

/*
 * Whether conntrack may miss packets of the flow. Not if it, too, changes them.
 * In TCP it wants to see every one, or calls what comes after a gap invalid,
 * unless nf_conntrack_tcp_be_liberal is set.
 */
static __always_inline bool
conntrack_allows(struct __sk_buff *skb, const struct packet *pkt, __u32 flags)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);
	unsigned long status = 0;
	struct nf_conn *ct;

	ct = (void *)(kernel->_nfct & ~CTINFO_MASK);
	if (!ct)
		return true;
	if (bpf_core_read(&status, sizeof(status), &ct->status) ||
	    status & IPS_CHANGED)
		return false;
	return pkt->proto != IPPROTO_TCP || flags & FAST_PATH_TRACKED_TCP;
}

/* Tells the agent of a link that could have the fast path. */
static __always_inline void announce(__u32 pod_link, __u64 now)
{
	if (!bpf_map_lookup_elem(&pod_links, &pod_link))
		bpf_map_update_elem(&pod_links, &pod_link, &now, BPF_NOEXIST);
}

/*
 * Asks where a packet between two links would be routed. True: to the link
 * whose index is expected; fib has the frame's addresses and the MTU then.
 */
static __always_inline bool is_routed(struct __sk_buff *skb,
				      const union tuple *tuple, __u8 tos,
				      const enum family family, __u32 from,
				      __u32 to, struct bpf_fib_lookup *fib)
{
	__builtin_memset(fib, 0, sizeof(*fib));
	fib->ifindex = from;
	fib->tot_len = 1; /* any: asks for the MTU */
	if (family == FAMILY_V4) {
		fib->family = AF_INET;
		fib->tos = tos;
		fib->l4_protocol = tuple->v4.proto;
		fib->sport = tuple->v4.sport;
		fib->dport = tuple->v4.dport;
		fib->ipv4_src = tuple->v4.saddr;
		fib->ipv4_dst = tuple->v4.daddr;
	} else {
		fib->family = AF_INET6;
		fib->l4_protocol = tuple->v6.proto;
		fib->sport = tuple->v6.sport;
		fib->dport = tuple->v6.dport;
		__builtin_memcpy(fib->ipv6_src, tuple->v6.saddr, 16);
		__builtin_memcpy(fib->ipv6_dst, tuple->v6.daddr, 16);
	}
	return bpf_fib_lookup(skb, fib, sizeof(*fib), 0) ==
		       BPF_FIB_LKUP_RET_SUCCESS &&
	       fib->ifindex == to;
}

/*
 * bpf_fib_lookup() tells the link's MTU, and the route's only if it is locked
 * (ip_mtu_from_fib_result()). Forwarding goes by the route's, which can be any
 * of the node's as far as we know.
 */
static __always_inline void fill_way(struct way *way,
				     const struct bpf_fib_lookup *fib,
				     const struct fast_path_config *fast,
				     __u64 now)
{
	__builtin_memcpy(way->macs, fib->dmac, ETH_ALEN);
	__builtin_memcpy(way->macs + ETH_ALEN, fib->smac, ETH_ALEN);
	way->mtu = fib->mtu_result;
	if (fast->mtu && fast->mtu < way->mtu)
		way->mtu = fast->mtu;
	way->until = now + WAY_LIFETIME;
}

/*
 * Learns the way out from a packet that the stack has just brought. Only if the
 * routes, asked without the packet's mark, say the same: where they do not, or
 * there are several, each packet is to go its own way.
 */
static __always_inline int learn_way_out(struct __sk_buff *skb,
					 const enum family family)
{
	const struct fast_path_config *fast = fast_path_now();
	const struct scratch *s = this_scratch();
	struct ways ways = {
		.pod_link = skb->ingress_ifindex,
		.uplink = skb->ifindex,
	};
	__u64 now = bpf_ktime_get_ns();
	struct bpf_fib_lookup fib;
	__u8 macs[2 * ETH_ALEN];
	const struct ways *known;

	if (!cfg_fast_path || !fast || !s || !(fast->flags & FAST_PATH_ON))
		return 0;
	ways.generation = fast->generation;
	known = find_ways(&s->packet.tuple, family);
	if (known && known->generation == ways.generation &&
	    known->pod_link == ways.pod_link && known->uplink == ways.uplink) {
		if ((__s64)(known->out.until - now) > 0)
			return 0;
		ways.back = known->back;
	}
	announce(ways.pod_link, now);
	if (!conntrack_allows(skb, &s->packet, fast->flags) ||
	    bpf_skb_load_bytes(skb, 0, macs, sizeof(macs)) ||
	    !is_routed(skb, &s->packet.tuple, s->packet.dscp, family,
		       ways.pod_link, ways.uplink, &fib))
		return 0;
	fill_way(&ways.out, &fib, fast, now);
	if (!same_mac(macs, ways.out.macs) ||
	    !same_mac(macs + ETH_ALEN, ways.out.macs + ETH_ALEN))
		return 0;
	keep_ways(&s->packet.tuple, &ways, family);
	return 0;
}

/* Global functions: see egress.h. */
__noinline int learn_way_out_v4(struct __sk_buff *skb)
{
	return learn_way_out(skb, FAMILY_V4);
}

__noinline int learn_way_out_v6(struct __sk_buff *skb)
{
	return learn_way_out(skb, FAMILY_V6);
}

/* A packet of a flow leaves that the stack has routed. */
static __always_inline void note_way_out(struct __sk_buff *skb,
					 const struct flow *flow,
					 const struct packet *pkt,
					 const struct uplink *uplink,
					 const enum family family)
{
	if (!cfg_fast_path || !skb->ingress_ifindex || !is_settled(flow) ||
	    !is_plain(pkt, family) || !(uplink->flags & UPLINK_ETHERNET))
		return;
	if (family == FAMILY_V4)
		learn_way_out_v4(skb);
	else
		learn_way_out_v6(skb);
}

/*
 * Learns the way back for a reply that is about to take the stack's. The flow
 * is one that leaves from the link to which the routes lead.
 */
static __always_inline void
learn_way_back(struct __sk_buff *skb, const struct scratch *s,
	       const enum family family, const struct ways *known,
	       const struct fast_path_config *fast, __u64 now)
{
	struct bpf_fib_lookup fib;
	struct ways ways = *known;
	union tuple reply;

	mirror(&s->origin, &reply, family);
	if (!is_routed(skb, &reply, s->packet.dscp, family, skb->ifindex,
		       ways.pod_link, &fib))
		return;
	fill_way(&ways.back, &fib, fast, now);
	keep_ways(&s->origin, &ways, family);
}

#endif
