/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_ALLOC_H
#define MASQ_ALLOC_H

/* Choosing the outside port of a new flow, and making it ours. */

#include <linux/errno.h>

#include "address.h"
#include "clock.h"
#include "conntrack.h"
#include "maps.h"
#include "nat.h"
#include "parse.h"
#include "policy.h"
#include "rewrite.h"
#include "sticky.h"

/* Protocols whose port or identifier can be changed. */
static __always_inline bool port_can_change(const struct packet *pkt,
					    const enum family family)
{
	if (pkt->proto == IPPROTO_SCTP)
		return false;
	return has_ports(pkt->proto) || is_icmp(pkt, family);
}

static __always_inline enum port_class_id port_class(__u16 port)
{
	if (port < 512)
		return PORT_CLASS_LOW;
	return port < 1024 ? PORT_CLASS_PRIVILEGED : PORT_CLASS_HIGH;
}

/* A random port of the class. False: the pool has none. */
static __always_inline bool random_port(struct scratch *s,
					const struct port_pool *pool,
					__u16 original, __be16 *port)
{
	__u32 index = opaque(s, port_class(original)), count;
	const struct port_class *class;

	if (index >= PORT_CLASS_COUNT)
		return false;
	class = &pool->classes[index];
	count = class->count;
	if (!count)
		return false;
	index = class->first +
		(__u32)(((__u64)bpf_get_prandom_u32() * count) >> 32);
	*port = bpf_htons(pool->ports[index & 0xffff]);
	return true;
}

/*
 * The n-th port to try: the original one first, unless it may not be had, then
 * fresh random ones. A walk to the next port would cluster.
 */
static __always_inline bool candidate(struct scratch *s,
				      const enum family family,
				      const struct port_pool *pool, __u32 n,
				      __be16 *port)
{
	const struct packet *pkt = &s->packet;
	bool keep = !n && (!cfg_random_fully || has_own_address(s, family));
	__be16 original = port_of(&pkt->tuple, family, SIDE_SOURCE);
	__u16 wanted = bpf_ntohs(original);

	*port = original;
	if (!port_can_change(pkt, family))
		return n == 0;
	if (is_icmp(pkt, family)) {
		if (!keep)
			*port = bpf_get_prandom_u32();
		return true;
	}
	if (keep && pool->allowed[wanted >> 6] & 1ULL << (wanted & 63))
		return true;
	return random_port(s, pool, wanted, port);
}

/*
 * Whether replies to the tuple would reach a socket of the node's: a TCP
 * listener or connection, or any UDP socket.
 */
static __always_inline bool has_socket(struct __sk_buff *skb,
				       union tuple *reply, __u8 proto,
				       const enum family family)
{
	struct bpf_sock_tuple *tuple = (struct bpf_sock_tuple *)reply;
	struct bpf_sock *sk;

	if (proto == IPPROTO_TCP)
		sk = bpf_skc_lookup_tcp(skb, tuple, sock_tuple_size(family),
					CURRENT_NETNS, 0);
	else if (proto == IPPROTO_UDP)
		sk = bpf_sk_lookup_udp(skb, tuple, sock_tuple_size(family),
				       CURRENT_NETNS, 0);
	else
		return false;
	if (!sk)
		return false;
	bpf_sk_release(sk);
	return true;
}

static __always_inline bool taken_by_node(struct __sk_buff *skb,
					  union tuple *reply, __u8 proto,
					  const enum family family)
{
	if (has_socket(skb, reply, proto, family))
		return true;
	return cfg_ct_lookup &&
	       conntrack_lookup(skb, reply, proto, family) != CONNTRACK_UNKNOWN;
}

static __always_inline long insert_reverse(const union tuple *reply,
					   const union tuple *tuple,
					   const enum family family)
{
	if (family == FAMILY_V4) {
		struct reverse_v4 r = {
			.addr = tuple->v4.saddr,
			.port = tuple->v4.sport,
		};

		return bpf_map_update_elem(&reverse_v4, &reply->v4, &r,
					   BPF_NOEXIST);
	}
	struct reverse_v6 r = { .port = tuple->v6.sport };

	__builtin_memcpy(r.addr, tuple->v6.saddr, 16);
	return bpf_map_update_elem(&reverse_v6, &reply->v6, &r, BPF_NOEXIST);
}

static __always_inline long insert_flow(const union tuple *tuple,
					const struct flow *flow,
					const union address *nat_addr,
					const enum family family)
{
	if (family == FAMILY_V4) {
		struct mapping_v4 m = {
			.flow = *flow,
			.nat_addr = nat_addr->v4,
		};

		return bpf_map_update_elem(&flows_v4, &tuple->v4, &m,
					   BPF_NOEXIST);
	}
	struct mapping_v6 m = { .flow = *flow };

	__builtin_memcpy(m.nat_addr, nat_addr->v6, 16);
	return bpf_map_update_elem(&flows_v6, &tuple->v6, &m, BPF_NOEXIST);
}

/*
 * Whether a SYN may take the place of a flow that is closing: as netfilter
 * since 6.5 (nf_nat_used_tuple_new()), where no other port is left and the new
 * connection's sequence number is beyond the old one's, so that the remote,
 * still in TIME_WAIT, takes it for a new one too (RFC 6191).
 */
static __always_inline bool may_take_over(const struct packet *pkt,
					  const struct flow *flow, __u32 n)
{
	return n >= LIMIT_CANDIDATES - LIMIT_TAKEOVER && opens_tcp(pkt) &&
	       (flow->state == FLOW_TCP_TIME_WAIT ||
		flow->state == FLOW_TCP_CLOSE) &&
	       (__s32)(pkt->tcp_end - flow->tcp_end) > 0;
}

/* Ends the flow that holds an outside tuple, if its time is over. */
static __always_inline bool reclaim(struct scratch *s, const enum family family,
				    __u32 n)
{
	__u64 now = clock_ns();
	struct flow *flow;
	__u64 last_seen;

	if (!find_origin(&s->reply, family, &s->origin))
		return true;
	flow = find_flow(&s->origin, family);
	/* No flow yet: somebody is between the two inserts. */
	if (!flow)
		return false;
	/* The flow has another outside tuple by now: this one is nobody's. */
	if (!owns(flow, &s->reply, family)) {
		delete_reverse(&s->reply, family);
		return true;
	}
	last_seen = flow->last_seen;
	if (alive_since(flow, last_seen, now) &&
	    !may_take_over(&s->packet, flow, n))
		return false;
	return end_flow(last_seen, &s->origin, family);
}

/* How an attempt at one candidate ended. */
enum attempt {
	ATTEMPT_WON, /* the outside tuple is ours */
	ATTEMPT_TAKEN, /* it is somebody else's: try the next */
	ATTEMPT_OVER, /* there is no candidate left */
	ATTEMPT_FULL, /* the table is */
};

/* Tries the n-th candidate. The NOEXIST insert decides between CPUs. */
static __always_inline enum attempt attempt(struct __sk_buff *skb,
					    const enum family family, __u32 n)
{
	struct scratch *s = this_scratch();
	const struct port_pool *pool;
	__u32 zero = 0;
	__be16 port;
	long err;

	pool = bpf_map_lookup_elem(&port_pool, &zero);
	if (!s || !pool || !candidate(s, family, pool, n, &port))
		return ATTEMPT_OVER;
	reply_tuple(&s->packet.tuple, &s->addr, port, family, &s->reply);
	if (taken_by_node(skb, &s->reply, s->packet.proto, family))
		return ATTEMPT_TAKEN;
	err = insert_reverse(&s->reply, &s->packet.tuple, family);
	if (err == -EEXIST && reclaim(s, family, n))
		err = insert_reverse(&s->reply, &s->packet.tuple, family);
	if (err)
		return err == -EEXIST ? ATTEMPT_TAKEN : ATTEMPT_FULL;
	s->port = port;
	return ATTEMPT_WON;
}

__noinline int attempt_v4(struct __sk_buff *skb, __u32 n)
{
	return attempt(skb, FAMILY_V4, n);
}

__noinline int attempt_v6(struct __sk_buff *skb, __u32 n)
{
	return attempt(skb, FAMILY_V6, n);
}

/* Makes an outside tuple ours: that of scratch.reply, addr and port. */
static __always_inline enum verdict claim_tuple(struct __sk_buff *skb,
						const enum family family)
{
	const struct scratch *s = this_scratch();
	int result = ATTEMPT_TAKEN;
	__u64 *count;
	__u32 n, tried;

#pragma unroll /* see sweep() */
	for (n = 0; n < LIMIT_CANDIDATES; n++) {
		result = family == FAMILY_V4 ? attempt_v4(skb, n) :
					       attempt_v6(skb, n);
		if (result != ATTEMPT_TAKEN)
			break;
	}
	tried = n; /* by address: the loop's own would not be unrolled */
	count = bpf_map_lookup_elem(&attempts, &tried);
	if (count && (result == ATTEMPT_WON || result == ATTEMPT_TAKEN))
		(*count)++;
	if (result == ATTEMPT_WON)
		return VERDICT_OPENED;
	if (result == ATTEMPT_FULL)
		return VERDICT_DROP_TABLE_FULL;
	return s && port_can_change(&s->packet, family) ?
		       VERDICT_DROP_PORT_EXHAUSTED :
		       VERDICT_DROP_UNSUPPORTED;
}

__noinline int claim_tuple_v4(struct __sk_buff *skb)
{
	return claim_tuple(skb, FAMILY_V4);
}

__noinline int claim_tuple_v6(struct __sk_buff *skb)
{
	return claim_tuple(skb, FAMILY_V6);
}

/*
 * Opens a flow behind scratch.addr. VERDICT_OPENED or VERDICT_TRANSLATED:
 * scratch.addr and port are what the packet gets; the latter if another CPU
 * opened the same flow first, whose choice then holds. Otherwise the reason to
 * drop the packet.
 */
static __always_inline enum verdict open_flow(struct __sk_buff *skb,
					      struct scratch *s,
					      const enum family family,
					      __u64 now)
{
	struct packet *pkt = &s->packet;
	struct flow flow = {
		.created = now,
		.last_seen = now,
		.ifindex = skb->ifindex,
		.state = first_state(pkt, family),
		.tcp_end = pkt->tcp_end,
		.tcp_ack = pkt->tcp_ack,
	};
	enum verdict verdict;
	struct flow *winner;
	long err;

	verdict = family == FAMILY_V4 ? claim_tuple_v4(skb) :
					claim_tuple_v6(skb);
	if (verdict != VERDICT_OPENED)
		return verdict;
	flow.nat_port = s->port;
	/* Before it can be found: see flows_moved(). */
	if (has_own_address(s, family))
		note_moved(family, now);
	err = insert_flow(&pkt->tuple, &flow, &s->addr, family);
	if (!err)
		return VERDICT_OPENED;
	delete_reverse(&s->reply, family);
	if (err != -EEXIST)
		return VERDICT_DROP_TABLE_FULL;
	winner = find_flow(&pkt->tuple, family);
	if (!winner || !alive(winner, now))
		return VERDICT_DROP_TABLE_FULL;
	nat_address(winner, family, &s->addr);
	s->port = winner->nat_port;
	return VERDICT_TRANSLATED;
}

#endif
