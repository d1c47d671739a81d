//go:build ignore
// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/*
 * The source NAT of the eBPF datapath: one program for each direction of an
 * uplink. Read egress_verdict() and ingress_verdict() first.
 */

#include "clock.h"
#include "conntrack.h"
#include "egress.h"
#include "fastpath.h"
#include "frag.h"
#include "ingress.h"
#include "maps.h"
#include "masq.h"
#include "parse.h"
#include "policy.h"
#include "stats.h"
#include "sticky.h"
#include "sweep.h"

/* Keeps the enums that no map mentions in the BTF, where bpf2go finds them. */
const volatile struct {
	enum limit limit;
	enum family family;
	enum direction direction;
	enum verdict verdict;
	enum flow_state flow_state;
	enum uplink_flag uplink_flag;
	enum fast_path_flag fast_path_flag;
	enum port_class_id port_class_id;
	enum sweep_mode sweep_mode;
	struct sweep_request sweep_request;
	struct event event;
} contract;

/* Reads where the packet goes. VERDICT_UNDECIDED: it may be one for us. */
static __always_inline enum verdict read_network(struct __sk_buff *skb,
						 struct packet *pkt,
						 const enum family family,
						 const struct uplink *uplink)
{
	enum verdict verdict;

	if (of_vlan(skb))
		return VERDICT_FOREIGN;
	__builtin_memset(pkt, 0, sizeof(*pkt));
	verdict = parse_network(skb, pkt, family, link_header_len(skb, uplink));
	if (verdict)
		return verdict;
	return exempt_address(pkt, family) ? VERDICT_EXEMPT : VERDICT_UNDECIDED;
}

/* Reads the rest. VERDICT_UNDECIDED: it is one for us. */
static __always_inline enum verdict
read_transport(struct __sk_buff *skb, struct packet *pkt,
	       const enum family family, const struct uplink *uplink,
	       const enum direction direction, __u64 now)
{
	parse_transport(skb, pkt, family);
	if (exempt_message(pkt, family))
		return VERDICT_EXEMPT;
	if (direction == DIRECTION_EGRESS && foreign_source_mac(skb, uplink))
		return VERDICT_FOREIGN;
	fragment_ports(pkt, family, direction, now);
	return VERDICT_UNDECIDED;
}

static __always_inline enum verdict egress_verdict(struct __sk_buff *skb,
						   const enum family family)
{
	const struct uplink *uplink = this_uplink();
	struct scratch *s = this_scratch();
	enum verdict verdict;
	struct packet *pkt;
	union address dst;
	bool keep;
	__u64 now;

	if (!uplink || !s)
		return VERDICT_NOT_IP;
	if (came_fast(skb))
		return VERDICT_FAST_PATH;
	pkt = &s->packet;
	verdict = read_network(skb, pkt, family, uplink);
	if (verdict)
		return verdict;
	destination(pkt, family, &dst);
	keep = cidr_keeps(&dst, family);
	if (keep && exempt_is_all(uplink, family))
		return VERDICT_KEEP_CIDR;
	now = clock_ns();
	verdict =
		read_transport(skb, pkt, family, uplink, DIRECTION_EGRESS, now);
	if (verdict)
		return verdict;
	s->ended = false;
	if (!keep && plainly_nodes_own(skb, s, family, uplink, now))
		return VERDICT_KEEP_NODE;
	if (pkt->flags & PACKET_ERROR)
		verdict = family == FAMILY_V4 ? error_leaves_v4(skb) :
						error_leaves_v6(skb);
	else
		verdict = existing_flow(skb, s, uplink, family, now);
	if (verdict)
		return verdict;
	if (is_closed(uplink, family) &&
	    left_to_others(skb, s, family, uplink, now))
		return VERDICT_CLOSED;
	if (keep)
		return VERDICT_KEEP_CIDR;
	if (nodes_own(skb, s, family, uplink, now))
		return VERDICT_KEEP_NODE;
	return family == FAMILY_V4 ? unknown_flow_v4(skb) :
				     unknown_flow_v6(skb);
}

static __always_inline enum verdict ingress_verdict(struct __sk_buff *skb,
						    const enum family family)
{
	const struct uplink *uplink = this_uplink();
	struct scratch *s = this_scratch();
	enum verdict verdict;
	struct packet *pkt;
	__u64 now;

	if (!uplink || !s)
		return VERDICT_NOT_IP;
	pkt = &s->packet;
	verdict = read_network(skb, pkt, family, uplink);
	if (verdict)
		return verdict;
	now = clock_ns();
	verdict = read_transport(skb, pkt, family, uplink, DIRECTION_INGRESS,
				 now);
	if (verdict)
		return verdict;
	if (pkt->flags & PACKET_ERROR)
		verdict = family == FAMILY_V4 ? error_arrives_v4(skb) :
						error_arrives_v6(skb);
	else
		verdict = reply_of_flow(skb, s, family, now);
	if (verdict)
		return verdict;
	return from_outside(pkt, family, uplink, now);
}

SEC("tc")
int masq_egress(struct __sk_buff *skb)
{
	__be16 proto = network_protocol(skb);

	if (proto == bpf_htons(ETH_P_IP))
		return finish(skb, DIRECTION_EGRESS, FAMILY_V4,
			      egress_verdict(skb, FAMILY_V4));
	if (cfg_ipv6 && proto == bpf_htons(ETH_P_IPV6))
		return finish(skb, DIRECTION_EGRESS, FAMILY_V6,
			      egress_verdict(skb, FAMILY_V6));
	return TC_ACT_UNSPEC;
}

/* A packet that came in and takes the fast path goes on from here. */
static __always_inline int come_in(struct __sk_buff *skb,
				   const enum family family)
{
	enum verdict verdict = ingress_verdict(skb, family);
	int action = finish(skb, DIRECTION_INGRESS, family, verdict);

	if (cfg_fast_path && verdict == VERDICT_FAST_PATH)
		return redirect();
	return action;
}

SEC("tc")
int masq_ingress(struct __sk_buff *skb)
{
	__be16 proto = network_protocol(skb);

	if (proto == bpf_htons(ETH_P_IP))
		return come_in(skb, FAMILY_V4);
	if (cfg_ipv6 && proto == bpf_htons(ETH_P_IPV6))
		return come_in(skb, FAMILY_V6);
	return TC_ACT_UNSPEC;
}

/*
 * A packet that takes the fast path is counted where it leaves; one that does
 * not is nobody's yet.
 */
static __always_inline int go_out(struct __sk_buff *skb,
				  const enum family family)
{
	enum verdict verdict = leave_fast(skb, family);

	if (verdict == VERDICT_FAST_PATH)
		return redirect();
	if (verdict == VERDICT_UNDECIDED)
		return TC_ACT_UNSPEC;
	return finish(skb, DIRECTION_EGRESS, family, verdict);
}

/* At the links of pods, behind all other programs: see fastpath.h. */
SEC("tc")
int masq_fast_path(struct __sk_buff *skb)
{
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return go_out(skb, FAMILY_V4);
	if (cfg_ipv6 && skb->protocol == bpf_htons(ETH_P_IPV6))
		return go_out(skb, FAMILY_V6);
	return TC_ACT_UNSPEC;
}

SEC("tc")
int sweep_v4(struct __sk_buff *skb)
{
	return sweep(skb, FAMILY_V4);
}

SEC("tc")
int sweep_v6(struct __sk_buff *skb)
{
	return sweep(skb, FAMILY_V6);
}

/* Loaded to learn whether the kernel lets us: see loader's probes. */
SEC("tc")
int probe_direct(struct __sk_buff *skb)
{
	const __u8 *at = linear(skb, skb->mark, sizeof(*at));

	return at ? *at : 0;
}

SEC("tc")
int probe_ctinfo(struct __sk_buff *skb)
{
	return ctinfo_view(skb) + ip_summed(skb);
}

/*
 * Without PERFMON the verifier goes where a branch does not lead, too. A newer
 * one (6.17) keeps CPUs from there instead of refusing what it sees.
 */
SEC("tc")
int probe_guarded(struct __sk_buff *skb)
{
	return cfg_ctinfo ? ctinfo_view(skb) : 0;
}

SEC("tc")
int probe_ct_lookup(struct __sk_buff *skb)
{
	union tuple tuple = {};

	return conntrack_lookup(skb, &tuple, skb->mark, FAMILY_V4);
}

char _license[] SEC("license") = "Dual BSD/GPL";
