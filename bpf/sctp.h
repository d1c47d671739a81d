/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_SCTP_H
#define MASQ_SCTP_H

#include <stddef.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "packet.h"

/* The common header and the first chunk's, RFC 9260 section 3. */
struct sctp_head {
	__be16 source;
	__be16 dest;
	__be32 tag;
	__be32 checksum;
	__u8 chunk;
	__u8 flags;
	__be16 len;
};

enum sctp_chunk {
	SCTP_CHUNK_INIT = 1,
	SCTP_CHUNK_HEARTBEAT = 4,
	SCTP_CHUNK_HEARTBEAT_ACK = 5,
	SCTP_CHUNK_SHUTDOWN_ACK = 8,
};

/* The shortest INIT chunk, RFC 9260 section 3.3.2. */
#define SCTP_INIT_LEN 20

/*
 * Whether a packet can be the first that is seen of an association: with the
 * chunks that nf_conntrack_proto_sctp.c takes from nobody known, one a packet.
 */
static __always_inline bool opens_sctp(const struct __sk_buff *skb,
				       const struct packet *pkt,
				       const struct sctp_head *sctp)
{
	__u32 len = offsetof(struct sctp_head, chunk) + bpf_ntohs(sctp->len);
	__u32 whole = transport_len(skb, pkt);

	if (!sctp->len || ((len + 3) & ~3U) < whole)
		return false;
	switch (sctp->chunk) {
	case SCTP_CHUNK_INIT:
		return !sctp->tag &&
		       whole >= offsetof(struct sctp_head, chunk) +
					SCTP_INIT_LEN;
	case SCTP_CHUNK_HEARTBEAT:
	case SCTP_CHUNK_HEARTBEAT_ACK:
	case SCTP_CHUNK_SHUTDOWN_ACK:
		return true;
	}
	return false;
}

static __always_inline void
parse_sctp(struct __sk_buff *skb, struct packet *pkt, const enum family family)
{
	struct sctp_head sctp;

	if (bpf_skb_load_bytes(skb, pkt->l4, &sctp, sizeof(sctp))) {
		pkt->flags |= PACKET_MALFORMED;
		return;
	}
	if (!opens_sctp(skb, pkt, &sctp))
		pkt->flags |= PACKET_UNDERWAY;
	set_ports(pkt, family, sctp.source, sctp.dest);
}

#endif
