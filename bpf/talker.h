/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_TALKER_H
#define MASQ_TALKER_H

/*
 * Fragments that come in before the one with the ports. TC cannot hold a
 * packet, so such a fragment is for the pod that talks to the remote with the
 * protocol, if only one does. TCP is left out: it does not send fragments that
 * anybody should wait for.
 */

#include "maps.h"
#include "packet.h"

/* How long somebody who talked is still expected to get an answer. */
#define TALKER_MEMORY (180 * NSEC_PER_SEC)

union talker_key {
	struct talker_key_v4 v4;
	struct talker_key_v6 v6;
};

/* The entry, and where in it the pod's address is. */
struct talker {
	__u64 *seen;
	__u64 *other_seen;
	__be32 *addr;
};

static __always_inline void talker_key(const union address *remote,
				       const union address *nat_addr,
				       __u8 proto, const enum family family,
				       union talker_key *key)
{
	__builtin_memset(key, 0, sizeof(*key));
	if (family == FAMILY_V4) {
		key->v4.remote = remote->v4;
		key->v4.nat_addr = nat_addr->v4;
		key->v4.proto = proto;
		return;
	}
	__builtin_memcpy(key->v6.remote, remote->v6, 16);
	__builtin_memcpy(key->v6.nat_addr, nat_addr->v6, 16);
	key->v6.proto = proto;
}

static __always_inline bool find_talker(const union talker_key *key,
					const enum family family,
					struct talker *talker)
{
	if (family == FAMILY_V4) {
		struct talker_v4 *v4 =
			bpf_map_lookup_elem(&talkers_v4, &key->v4);

		if (!v4)
			return false;
		talker->seen = &v4->seen;
		talker->other_seen = &v4->other_seen;
		talker->addr = &v4->addr;
	} else {
		struct talker_v6 *v6 =
			bpf_map_lookup_elem(&talkers_v6, &key->v6);

		if (!v6)
			return false;
		talker->seen = &v6->seen;
		talker->other_seen = &v6->other_seen;
		talker->addr = v6->addr;
	}
	return true;
}

static __always_inline void insert_talker(const union talker_key *key,
					  const union address *addr,
					  const enum family family, __u64 now)
{
	if (family == FAMILY_V4) {
		struct talker_v4 v4 = { .seen = now, .addr = addr->v4 };

		bpf_map_update_elem(&talkers_v4, &key->v4, &v4, BPF_NOEXIST);
	} else {
		struct talker_v6 v6 = { .seen = now };

		__builtin_memcpy(v6.addr, addr->v6, 16);
		bpf_map_update_elem(&talkers_v6, &key->v6, &v6, BPF_NOEXIST);
	}
}

static __always_inline bool recent(__u64 when, __u64 now)
{
	return when && (__s64)(now - when) < (__s64)TALKER_MEMORY;
}

static __always_inline void talker_address(const struct talker *talker,
					   const enum family family,
					   union address *addr)
{
	if (family == FAMILY_V4)
		addr->v4 = *talker->addr;
	else
		__builtin_memcpy(addr->v6, talker->addr, 16);
}

/*
 * A pod sends to a remote: it is the talker, or there are several. An entry
 * whose talker fell silent is the next one's.
 */
static __always_inline void note_talker(const struct packet *pkt,
					const union address *nat_addr,
					const enum family family, __u64 now)
{
	union address remote, addr, known;
	struct talker talker;
	union talker_key key;

	if (pkt->proto == IPPROTO_TCP)
		return;
	source(pkt, family, &addr);
	destination(pkt, family, &remote);
	talker_key(&remote, nat_addr, pkt->proto, family, &key);
	if (!find_talker(&key, family, &talker)) {
		insert_talker(&key, &addr, family, now);
		return;
	}
	talker_address(&talker, family, &known);
	if (same_address(&known, &addr, family)) {
		*talker.seen = now;
	} else if (recent(*talker.seen, now)) {
		*talker.other_seen = now;
	} else {
		if (family == FAMILY_V4)
			*talker.addr = addr.v4;
		else
			__builtin_memcpy(talker.addr, addr.v6, 16);
		*talker.seen = now;
	}
}

/* The node itself got something from a remote that a pod talks to. */
static __always_inline void note_node_talks(const struct packet *pkt,
					    const enum family family, __u64 now)
{
	union address remote, nat_addr;
	struct talker talker;
	union talker_key key;

	if (pkt->proto == IPPROTO_TCP)
		return;
	source(pkt, family, &remote);
	destination(pkt, family, &nat_addr);
	talker_key(&remote, &nat_addr, pkt->proto, family, &key);
	if (find_talker(&key, family, &talker) &&
	    (__s64)(now - *talker.other_seen) >= (__s64)NSEC_PER_SEC)
		*talker.other_seen = now;
}

/*
 * The pod that a fragment without ports is for. VERDICT_TRANSLATED: addr is it.
 * VERDICT_UNDECIDED: no pod talks to the remote. Several do: it is dropped.
 */
static __always_inline enum verdict only_talker(const struct packet *pkt,
						const enum family family,
						__u64 now, union address *addr)
{
	union address remote, nat_addr;
	struct talker talker;
	union talker_key key;

	source(pkt, family, &remote);
	destination(pkt, family, &nat_addr);
	talker_key(&remote, &nat_addr, pkt->proto, family, &key);
	if (!find_talker(&key, family, &talker) || !recent(*talker.seen, now))
		return VERDICT_UNDECIDED;
	if (recent(*talker.other_seen, now))
		return VERDICT_DROP_FRAGMENT;
	talker_address(&talker, family, addr);
	return VERDICT_TRANSLATED;
}

#endif
