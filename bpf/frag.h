/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_FRAG_H
#define MASQ_FRAG_H

/* Fragments: the first has the ports, the others get them from here. */

#include "maps.h"
#include "parse.h"

/* Identifiers are used again: what is older is another packet's (RFC 6864). */
#define FRAGMENT_LIFETIME (30 * NSEC_PER_SEC)

union fragment_key {
	struct fragment_key_v4 v4;
	struct fragment_key_v6 v6;
};

static __always_inline void fragment_key(const struct packet *pkt,
					 const enum family family,
					 const enum direction direction,
					 union fragment_key *key)
{
	__builtin_memset(key, 0, sizeof(*key));
	if (family == FAMILY_V4) {
		key->v4.saddr = pkt->tuple.v4.saddr;
		key->v4.daddr = pkt->tuple.v4.daddr;
		key->v4.id = pkt->fragment_id;
		key->v4.proto = pkt->fragment_proto;
		key->v4.direction = direction;
		return;
	}
	__builtin_memcpy(key->v6.saddr, pkt->tuple.v6.saddr, 16);
	__builtin_memcpy(key->v6.daddr, pkt->tuple.v6.daddr, 16);
	key->v6.id = pkt->fragment_id;
	key->v6.proto = pkt->fragment_proto;
	key->v6.direction = direction;
}

static __always_inline void remember_ports(const struct packet *pkt,
					   const enum family family,
					   const enum direction direction,
					   __u64 now)
{
	struct fragment ports = {
		.seen = now,
		.kind = pkt->flags & (PACKET_QUERY | PACKET_REPLY),
		.proto = pkt->proto,
	};
	union fragment_key key;

	fragment_key(pkt, family, direction, &key);
	if (family == FAMILY_V4) {
		ports.sport = pkt->tuple.v4.sport;
		ports.dport = pkt->tuple.v4.dport;
		bpf_map_update_elem(&fragments_v4, &key.v4, &ports, BPF_ANY);
	} else {
		ports.sport = pkt->tuple.v6.sport;
		ports.dport = pkt->tuple.v6.dport;
		bpf_map_update_elem(&fragments_v6, &key.v6, &ports, BPF_ANY);
	}
}

static __always_inline void recall_ports(struct packet *pkt,
					 const enum family family,
					 const enum direction direction,
					 __u64 now)
{
	const struct fragment *ports;
	union fragment_key key;

	fragment_key(pkt, family, direction, &key);
	ports = family == FAMILY_V4 ?
			bpf_map_lookup_elem(&fragments_v4, &key.v4) :
			bpf_map_lookup_elem(&fragments_v6, &key.v6);
	if (!ports || (__s64)(now - ports->seen) >= (__s64)FRAGMENT_LIFETIME)
		return;
	set_ports(pkt, family, ports->sport, ports->dport);
	pkt->flags |= ports->kind;
	pkt->proto = ports->proto;
	if (family == FAMILY_V6)
		pkt->tuple.v6.proto = ports->proto;
}

/* Afterwards a fragment has PACKET_PORTS if its ports could be known. */
static __always_inline void fragment_ports(struct packet *pkt,
					   const enum family family,
					   const enum direction direction,
					   __u64 now)
{
	if (pkt->flags & PACKET_LATER)
		recall_ports(pkt, family, direction, now);
	else if (pkt->flags & PACKET_FIRST && pkt->flags & PACKET_PORTS)
		remember_ports(pkt, family, direction, now);
}

#endif
