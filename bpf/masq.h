/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_MASQ_H
#define MASQ_MASQ_H

/*
 * The contract between the datapath and the agent: keys, values, names of
 * fates and limits. Go gets all of it from this file through bpf2go.
 *
 * Addresses and ports in keys and values are in network byte order, times are
 * CLOCK_MONOTONIC in nanoseconds, and all padding is explicit and zero.
 */

#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#define NSEC_PER_SEC 1000000000ULL

enum limit {
	LIMIT_CIDRS = 1048576, /* prefixes of one family */
	LIMIT_FLOWS = 262144, /* flows of one family, unless configured */
	LIMIT_INBOUND = 131072, /* remembered connections from outside */
	LIMIT_FRAGMENTS = 16384, /* fragmented packets under way */
	LIMIT_TALKERS = 16384, /* remotes whose fragments could be resolved */
	LIMIT_WAYS = 65536, /* flows of one family on the fast path */
	LIMIT_POD_LINKS = 4096,
	LIMIT_UPLINKS = 256,
	LIMIT_ADDRESS_RULES = 16384,
	LIMIT_NODE_ADDRESSES = 65536,
	LIMIT_CANDIDATES = 128, /* ports tried for one new flow */
	LIMIT_TAKEOVER =
		32, /* the last of them may take a closing flow's place */
	LIMIT_IPV6_HEADERS = 8, /* extension headers walked */
	LIMIT_SWEEP = 64, /* flows in one run of the sweep program */
	LIMIT_EVENT_BYTES = 65536, /* events that nobody has read yet */
};

enum family {
	FAMILY_V4,
	FAMILY_V6,
	FAMILY_COUNT,
};

enum direction {
	DIRECTION_EGRESS,
	DIRECTION_INGRESS,
	DIRECTION_COUNT,
};

/*
 * The fate of a packet. Every IP packet gets exactly one, and each is counted
 * per direction and family.
 */
enum verdict {
	VERDICT_UNDECIDED, /* never counted: the next rule decides */

	/* Left alone */
	VERDICT_NOT_IP, /* no IP, or too short to be */
	VERDICT_EXEMPT, /* multicast, broadcast, link scope, DHCP, NDP, MLD */
	VERDICT_FOREIGN, /* a macvlan child's or a VLAN's, which only crosses */
	VERDICT_KEEP_CIDR, /* destination in a non-masquerade CIDR */
	VERDICT_KEEP_NODE, /* the node's own, with the tuple it should have */
	VERDICT_NODE_OPENED, /* its first of a kind that no socket guards */
	VERDICT_KEEP_REPLY, /* of a connection that was opened from outside */
	VERDICT_KEEP_DRAINING, /* of a flow older than its CIDR's removal */
	VERDICT_CLOSED, /* of no flow; the uplink opens none any more */
	VERDICT_PASS_INVALID, /* cannot open a flow; --invalid=pass */
	VERDICT_NO_FLOW, /* ingress: no translation belongs to it */
	VERDICT_INBOUND, /* ingress: opens a connection from outside */

	/* Translated */
	VERDICT_TRANSLATED, /* by a flow that was there */
	VERDICT_FAST_PATH, /* likewise, and taken past the stack */
	VERDICT_OPENED, /* by a new flow */
	VERDICT_ICMP_ERROR, /* an error about a translated flow */

	/* Dropped: VERDICT_DROP_FIRST and above */
	VERDICT_DROP_PORT_EXHAUSTED,
	VERDICT_DROP_TABLE_FULL,
	VERDICT_DROP_FRAGMENT,
	VERDICT_DROP_INVALID,
	VERDICT_DROP_UNSUPPORTED,
	VERDICT_DROP_NO_ADDRESS,

	VERDICT_COUNT,
	VERDICT_DROP_FIRST = VERDICT_DROP_PORT_EXHAUSTED,
};

/* Where a flow is in its life. Each state has a timeout. */
enum flow_state {
	FLOW_NONE,
	FLOW_TCP_SYN_SENT,
	FLOW_TCP_SYN_RECV,
	FLOW_TCP_ESTABLISHED,
	FLOW_TCP_FIN_WAIT,
	FLOW_TCP_CLOSE_WAIT,
	FLOW_TCP_LAST_ACK,
	FLOW_TCP_TIME_WAIT,
	FLOW_TCP_CLOSE,
	FLOW_TCP_UNACKNOWLEDGED, /* picked up in the middle, no reply yet */
	FLOW_UDP, /* no reply yet, or younger than two seconds */
	FLOW_UDP_STREAM,
	FLOW_ICMP,
	FLOW_ICMPV6,
	FLOW_SCTP,
	FLOW_GENERIC,
	FLOW_STATE_COUNT,
};

/* What a prefix says of the packets that go there. */
enum cidr_verdict {
	CIDR_MASQUERADE,
	CIDR_KEEP,
};

enum uplink_flag {
	UPLINK_ONE_V4 = 1, /* addr_v4 goes with every next hop */
	UPLINK_ONE_V6 = 2, /* addr_v6 goes with every destination */
	UPLINK_ETHERNET = 4, /* frames carry a source MAC to compare */
	UPLINK_QDISC = 8, /* the agent made the clsact qdisc, and removes it */
	UPLINK_CLOSED_V4 = 16, /* serves flows that are there, opens none */
	UPLINK_CLOSED_V6 = 32,
	UPLINK_TAGGED = 64, /* a VLAN whose tag may stand in its frames */
};

enum node_address {
	NODE_ADDRESS_LOCAL,
	NODE_ADDRESS_BROADCAST,
};

/* Keys of the LPM tries: prefixlen in bits, octets as people read them. */
struct cidr_v4 {
	__u32 prefixlen;
	__u8 addr[4];
};

struct cidr_v6 {
	__u32 prefixlen;
	__u8 addr[16];
};

/*
 * A flow in one direction, as a packet on the wire shows it. ICMP queries have
 * their identifier as the port of the asking side and, as the port of the
 * other, the type of the question (see icmp_query_port()).
 */
struct tuple_v4 {
	__be32 saddr;
	__be32 daddr;
	__be16 sport;
	__be16 dport;
	__u8 proto;
	__u8 pad[3];
};

struct tuple_v6 {
	__be32 saddr[4];
	__be32 daddr[4];
	__be16 sport;
	__be16 dport;
	__u8 proto;
	__u8 pad[3];
};

/*
 * What both families know of a translated flow. last_seen is written at most
 * once a second, or when the state changes.
 */
struct flow {
	__u64 created;
	__u64 last_seen;
	__u32 ifindex; /* the uplink it leaves through */
	__be16 nat_port;
	__u8 state; /* enum flow_state */
	__u8 dying; /* being deleted: nobody may use it any more */
	__u32 tcp_end; /* sequence number after the newest byte sent */
	__u32 tcp_ack; /* newest byte acknowledged; 0: none yet */
	__u8 replied;
	__u8 pad[7];
};

/*
 * A translated flow. The lock decides who deletes it, nothing else. It comes
 * first: without PERFMON the verifier lets no pointer be moved to a lock.
 */
struct mapping_v4 {
	struct bpf_spin_lock lock;
	__be32 nat_addr;
	struct flow flow;
};

struct mapping_v6 {
	struct bpf_spin_lock lock;
	__u32 pad;
	struct flow flow;
	__be32 nat_addr[4];
};

/* The way back: who is behind an outside tuple. The mapping has the state. */
struct reverse_v4 {
	__be32 addr;
	__be16 port;
	__u16 suspect; /* a sweep found no mapping for it */
};

struct reverse_v6 {
	__be32 addr[4];
	__be16 port;
	__u16 suspect;
};

/* A connection that was opened from outside. */
struct inbound {
	__u64 last_seen;
};

/*
 * Ports of a fragmented packet, for the fragments that carry none. proto is
 * what follows the fragment header, which can be another extension header.
 */
struct fragment_key_v4 {
	__be32 saddr;
	__be32 daddr;
	__be32 id;
	__u8 proto;
	__u8 direction; /* enum direction */
	__u16 pad;
};

struct fragment_key_v6 {
	__be32 saddr[4];
	__be32 daddr[4];
	__be32 id;
	__u8 proto;
	__u8 direction; /* enum direction */
	__u16 pad;
};

struct fragment {
	__u64 seen;
	__be16 sport;
	__be16 dport;
	__u8 kind; /* of ICMP: asks or answers */
	__u8 proto; /* of the transport header */
	__u16 pad;
};

/*
 * Who talks to a remote with a protocol through a masquerade address: for
 * fragments that come before the one with the ports.
 */
struct talker_key_v4 {
	__be32 remote;
	__be32 nat_addr;
	__u8 proto;
	__u8 pad[3];
};

struct talker_key_v6 {
	__be32 remote[4];
	__be32 nat_addr[4];
	__u8 proto;
	__u8 pad[3];
};

struct talker_v4 {
	__u64 seen; /* when the pod last sent */
	__u64 other_seen; /* when another, or the node, last did */
	__be32 addr;
	__u32 pad;
};

struct talker_v6 {
	__u64 seen;
	__u64 other_seen;
	__be32 addr[4];
};

/* One uplink, in the slot that its programs were loaded for. */
struct uplink {
	__u32 ifindex;
	__u8 l2_len; /* bytes before the IP header */
	__u8 flags; /* enum uplink_flag */
	__u8 mac[6];
	__be32 addr_v4;
	__be32 addr_v6[4];
};

/* A way from link to link that the stack need not be asked for again. */
struct way {
	__u64 until; /* from then on it has to be */
	__u8 macs[12]; /* destination and source, as in a frame */
	__u16 mtu;
	__u16 pad;
};

/* The ways of a flow's packets between its pod's side and its uplink. */
struct ways {
	struct way out;
	struct way back;
	__u32 pod_link; /* interface index; of a bridge, if the pod is behind
			   one */
	__u32 uplink;
	__u32 generation; /* of struct fast_path_config, when they were learnt
			   */
	__u32 pad;
};

enum fast_path_flag {
	FAST_PATH_ON = 1,
	FAST_PATH_TRACKED_TCP = 2, /* conntrack minds no gaps in a connection */
};

/* What programs on both sides must agree on. */
struct fast_path_config {
	__u64 token; /* in the frames that come from a pod's side, translated */
	__u32 generation; /* ways of another one are not taken any more */
	__u32 flags; /* enum fast_path_flag */
	__u32 mtu; /* the least that any route sets, in octets; 0: none does */
	__u32 pad;
};

/*
 * Which packets that are left alone by themselves may belong to a flow all the
 * same, and have to be looked up: those of flows that are older than the
 * exemption of their destination, and the node's own that were moved.
 */
struct sticky {
	__u64 exempt; /* not 0: some may go where it is exempt now */
	__u64 moved; /* those that were moved before then have ended */
};

/*
 * Which masquerade address an uplink uses: by next hop (IPv4) or destination
 * (IPv6). prefixlen counts the 32 bits of the interface index too.
 */
struct address_rule_v4 {
	__u32 prefixlen;
	__be32 ifindex;
	__u8 addr[4];
};

struct address_rule_v6 {
	__u32 prefixlen;
	__be32 ifindex;
	__u8 addr[16];
};

/* A slice of the pool's ports. */
struct port_class {
	__u32 first; /* index */
	__u32 count;
};

/* The classes in which netfilter's NAT keeps a port (nf_nat_core.c). */
enum port_class_id {
	PORT_CLASS_LOW, /* below 512 */
	PORT_CLASS_PRIVILEGED, /* below 1024 */
	PORT_CLASS_HIGH,
	PORT_CLASS_COUNT,
};

/*
 * The ports that may be handed out. Ports that never may (reserved ones, the
 * node port range) are in neither.
 */
struct port_pool {
	struct port_class classes[PORT_CLASS_COUNT];
	__u64 allowed[1024]; /* bit by port */
	__u16 ports[65536]; /* host byte order */
};

struct counter {
	__u64 packets;
	__u64 bytes;
};

/*
 * A packet was dropped for want of a port, of room or of an address. At most
 * one a second and CPU is told. daddr is IPv4-mapped for IPv4.
 */
struct event {
	__be32 daddr[4];
	__be16 dport;
	__u8 proto;
	__u8 verdict; /* enum verdict */
	__u32 ifindex;
};

/* What a sweep ends of that which it is asked about. */
enum sweep_mode {
	SWEEP_EXPIRED, /* flows past their time */
	SWEEP_ALL, /* flows, whatever they are */
	SWEEP_UNASSURED, /* flows that nobody would miss: see assured() */
	SWEEP_ORPHANS, /* outside tuples without a flow */
};

/*
 * What the sweep programs are run on: a request, then up to LIMIT_SWEEP tuples,
 * of flows or, for SWEEP_ORPHANS, of their replies. The first 14 bytes stand
 * where an Ethernet header would.
 */
struct sweep_request {
	__u8 ethernet[14];
	__u16 mode; /* enum sweep_mode */
	__u32 count;
};

_Static_assert(sizeof(struct sweep_request) == 20, "padding");
_Static_assert(sizeof(struct tuple_v4) == 16, "padding");
_Static_assert(sizeof(struct tuple_v6) == 40, "padding");
_Static_assert(sizeof(struct flow) == 40, "padding");
_Static_assert(sizeof(struct mapping_v4) == 48, "padding");
_Static_assert(sizeof(struct mapping_v6) == 64, "padding");
_Static_assert(sizeof(struct reverse_v4) == 8, "padding");
_Static_assert(sizeof(struct reverse_v6) == 20, "padding");
_Static_assert(sizeof(struct fragment_key_v4) == 16, "padding");
_Static_assert(sizeof(struct fragment_key_v6) == 40, "padding");
_Static_assert(sizeof(struct talker_key_v4) == 12, "padding");
_Static_assert(sizeof(struct talker_key_v6) == 36, "padding");
_Static_assert(sizeof(struct way) == 24, "padding");
_Static_assert(sizeof(struct ways) == 64, "padding");
_Static_assert(sizeof(struct fast_path_config) == 24, "padding");
_Static_assert(sizeof(struct talker_v4) == 24, "padding");
_Static_assert(sizeof(struct talker_v6) == 32, "padding");

#endif
