/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_CHECKSUM_H
#define MASQ_CHECKSUM_H

/*
 * Checksums of the Internet protocols, and what a change does to them. The
 * arithmetic is one's complement (RFC 1071, RFC 1624): the order of octets does
 * not matter to it.
 */

#include "transport.h"

/* A UDP checksum of 0 means none: it stays 0, and none becomes 0. */
static __always_inline bool zero_is_none(__u8 proto)
{
	return proto == IPPROTO_UDP || proto == IPPROTO_UDPLITE;
}

static __always_inline __u64 checksum_flags(__u8 proto)
{
	return zero_is_none(proto) ? BPF_F_MARK_MANGLED_0 : 0;
}

/* Only ICMP over IPv4 has a checksum without addresses in it. */
static __always_inline bool covers_addresses(__u8 proto,
					     const enum family family)
{
	return family == FAMILY_V6 || proto != IPPROTO_ICMP;
}

static __always_inline __u32 fold_to_word(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

/* By how much a sum changes when an address does. */
static __always_inline __u32 address_change(const union address *old,
					    const union address *new,
					    const enum family family)
{
	__u64 sum = 0;

	if (family == FAMILY_V4)
		return fold_to_word((__u64)(__u32)~old->v4 + new->v4);
	for (int i = 0; i < 4; i++)
		sum += (__u64)(__u32)~old->v6[i] + new->v6[i];
	return fold_to_word(sum);
}

/* By how much it changes when two octets do. */
static __always_inline __u32 short_change(__u16 old, __u16 new)
{
	return (__u16)~old + (__u32) new;
}

/* A checksum when what it is over changes. */
static __always_inline __sum16 adjust(__sum16 check, __u64 change)
{
	__u64 sum = (__u16)~check + change;

	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~(__u16)sum;
}

#endif
