/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_TCP_H
#define MASQ_TCP_H

/* States of TCP connections, as far as timeouts depend on them. */

#include "masq.h"
#include "packet.h"
#include "parse.h"

/* Flags of a TCP segment by what they mean for the connection. */
enum tcp_event {
	TCP_EVENT_SYN,
	TCP_EVENT_SYN_ACK,
	TCP_EVENT_FIN,
	TCP_EVENT_ACK,
	TCP_EVENT_RST,
};

#define SS FLOW_TCP_SYN_SENT
#define SR FLOW_TCP_SYN_RECV
#define ES FLOW_TCP_ESTABLISHED
#define FW FLOW_TCP_FIN_WAIT
#define CW FLOW_TCP_CLOSE_WAIT
#define LA FLOW_TCP_LAST_ACK
#define TW FLOW_TCP_TIME_WAIT
#define CL FLOW_TCP_CLOSE
#define UN FLOW_TCP_UNACKNOWLEDGED

/*
 * The next states by the present one, four bits each. No array: without PERFMON
 * the verifier takes no index that it knows on one path and not on another.
 */
#define NEXT_BITS 4
#define NEXT(none, ss, sr, es, fw, cw, la, tw, cl, un)                         \
	((__u64)(none) | (__u64)(ss) << 4 | (__u64)(sr) << 8 |                 \
	 (__u64)(es) << 12 | (__u64)(fw) << 16 | (__u64)(cw) << 20 |           \
	 (__u64)(la) << 24 | (__u64)(tw) << 28 | (__u64)(cl) << 32 |           \
	 (__u64)(un) << 36)

/*
 * The next states after a segment. The table of nf_conntrack_proto_tcp.c as far
 * as timeouts depend on it, with two differences: what conntrack calls invalid
 * leaves the state alone, and an ACK after a RST brings the flow back (RFC 7857
 * section 2.2: a blind RST must not end a session), as one that still has to be
 * answered.
 */
/* clang-format off */
static __always_inline __u64 next_of_pod(const enum tcp_event event)
{
	switch (event) {
	/*                                none SS  SR  ES  FW  CW  LA  TW  CL  UN */
	case TCP_EVENT_SYN:     return NEXT(SS, SS, SR, ES, FW, CW, LA, SS, SS, SS);
	case TCP_EVENT_SYN_ACK: return NEXT(SR, SS, SR, ES, FW, CW, LA, TW, CL, UN);
	case TCP_EVENT_FIN:     return NEXT(FW, SS, FW, FW, LA, LA, LA, TW, CL, FW);
	case TCP_EVENT_ACK:     return NEXT(UN, SS, ES, ES, CW, CW, TW, TW, UN, UN);
	case TCP_EVENT_RST:     return NEXT(CL, CL, CL, CL, CL, CL, CL, CL, CL, CL);
	}
}

static __always_inline __u64 next_of_remote(const enum tcp_event event)
{
	switch (event) {
	/*                                none SS  SR  ES  FW  CW  LA  TW  CL  UN */
	case TCP_EVENT_SYN:     return NEXT(SR, SR, SR, ES, FW, CW, LA, SS, CL, UN);
	case TCP_EVENT_SYN_ACK: return NEXT(SR, SR, SR, ES, FW, CW, LA, TW, CL, ES);
	case TCP_EVENT_FIN:     return NEXT(FW, SS, FW, FW, LA, LA, LA, TW, CL, FW);
	case TCP_EVENT_ACK:     return NEXT(ES, SS, SR, ES, CW, CW, TW, TW, CL, ES);
	case TCP_EVENT_RST:     return NEXT(CL, CL, CL, CL, CL, CL, CL, CL, CL, CL);
	}
}
/* clang-format on */

#undef SS
#undef SR
#undef ES
#undef FW
#undef CW
#undef LA
#undef TW
#undef CL
#undef UN

static __always_inline enum tcp_event tcp_event(const struct packet *pkt)
{
	if (pkt->tcp_flags & TCP_FLAG_RST_BIT)
		return TCP_EVENT_RST;
	if (pkt->tcp_flags & TCP_FLAG_SYN_BIT)
		return pkt->tcp_flags & TCP_FLAG_ACK_BIT ? TCP_EVENT_SYN_ACK :
							   TCP_EVENT_SYN;
	return pkt->tcp_flags & TCP_FLAG_FIN_BIT ? TCP_EVENT_FIN :
						   TCP_EVENT_ACK;
}

static __always_inline __u8 tcp_state(const struct packet *pkt, __u8 state,
				      const enum direction direction)
{
	enum tcp_event event;
	__u64 next;

	/* The common case, without the table. */
	if (state == FLOW_TCP_ESTABLISHED && pkt->tcp_flags == TCP_FLAG_ACK_BIT)
		return state;
	if (state > FLOW_TCP_UNACKNOWLEDGED)
		return state;
	event = tcp_event(pkt);
	next = direction == DIRECTION_EGRESS ? next_of_pod(event) :
					       next_of_remote(event);
	return next >> (state * NEXT_BITS) & 0xf;
}

/* The most that a window can be (RFC 7323 section 2.3: 2^30) is far too much to
 * guess in; what is really open is seldom more than this. */
#define TCP_WINDOW (1U << 20)

/*
 * Whether a segment from outside can end the connection: at the place where the
 * pod waits for the next byte, or in the window behind it. Somebody who knows
 * the addresses and ports but not that place must not end it (RFC 5961).
 */
static __always_inline bool believable_end(const struct flow *flow,
					   const struct packet *pkt)
{
	if (!(pkt->tcp_flags & (TCP_FLAG_FIN_BIT | TCP_FLAG_RST_BIT)))
		return true;
	if (!flow->tcp_ack || flow->state == FLOW_TCP_SYN_SENT)
		return true;
	return pkt->tcp_end - flow->tcp_ack + 1 <= TCP_WINDOW;
}

/* How far a pod's side of a connection is. Late segments change nothing. */
static __always_inline void note_sequence(struct flow *flow,
					  const struct packet *pkt)
{
	if ((__s32)(pkt->tcp_end - flow->tcp_end) > 0 ||
	    pkt->tcp_flags == TCP_FLAG_SYN_BIT)
		flow->tcp_end = pkt->tcp_end;
	if (pkt->tcp_flags == TCP_FLAG_SYN_BIT)
		flow->tcp_ack = 0;
	else if (pkt->tcp_ack &&
		 (!flow->tcp_ack || (__s32)(pkt->tcp_ack - flow->tcp_ack) > 0))
		flow->tcp_ack = pkt->tcp_ack;
}

#endif
