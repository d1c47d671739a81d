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

#include "checksum.h"
#include "conntrack.h"
#include "kernel.h"
#include "maps.h"
#include "nat.h"
#include "packet.h"
#include "parse.h"
#include "policy.h"
#include "rewrite.h"

#ifndef AF_INET
#define AF_INET 2
#endif
#define AF_INET6 10

#define WAY_LIFETIME NSEC_PER_SEC

/* A reply is fast only while what the pod sends may be, or could be again. */
#define WAY_GRACE NSEC_PER_SEC

#define PACKET_HOST 0 /* linux/if_packet.h: it is for us */

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

static __always_inline void
fill_way(struct way *way, const struct bpf_fib_lookup *fib, __u64 now)
{
	__builtin_memcpy(way->macs, fib->dmac, ETH_ALEN);
	__builtin_memcpy(way->macs + ETH_ALEN, fib->smac, ETH_ALEN);
	way->mtu = fib->mtu_result;
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
	fill_way(&ways.out, &fib, now);
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
static __always_inline void learn_way_back(struct __sk_buff *skb,
					   const struct scratch *s,
					   const enum family family,
					   const struct ways *known, __u64 now)
{
	struct bpf_fib_lookup fib;
	struct ways ways = *known;
	union tuple reply;

	mirror(&s->origin, &reply, family);
	if (!is_routed(skb, &reply, s->packet.dscp, family, skb->ifindex,
		       ways.pod_link, &fib))
		return;
	fill_way(&ways.back, &fib, now);
	keep_ways(&s->origin, &ways, family);
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
		learn_way_back(skb, s, family, ways, now);
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
