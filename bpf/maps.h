/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_MAPS_H
#define MASQ_MAPS_H

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

#include "masq.h"

/*
 * What the programs were loaded for. Constant: the verifier removes the
 * branches that a configuration does not need.
 */
const volatile __u32 cfg_slot; /* index into uplinks */
const volatile bool cfg_ipv6;
const volatile bool cfg_random_fully;
const volatile bool cfg_drop_invalid;
const volatile bool cfg_tcp_loose; /* nf_conntrack_tcp_loose */
const volatile bool cfg_direct; /* the packet is readable without helpers */
const volatile bool cfg_ctinfo; /* struct sk_buff is readable: see kernel.h */
const volatile bool cfg_coarse_clock; /* bpf_ktime_get_coarse_ns() is there */
const volatile bool cfg_ct_lookup; /* conntrack can be asked for a tuple */
const volatile bool cfg_fast_path; /* see fastpath.h; implies cfg_ctinfo */

/*
 * CIDRs with their verdict: exactly the configured prefixes and link-local.
 * Written by the agent, in place. Full: the agent refuses the config.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, LIMIT_CIDRS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct cidr_v4);
	__type(value, enum cidr_verdict);
} nonmasq_v4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, LIMIT_CIDRS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct cidr_v6);
	__type(value, enum cidr_verdict);
} nonmasq_v6 SEC(".maps");

/*
 * CIDRs that were exempt until recently, with the time until which their open
 * flows keep their source. Written by the agent, deleted by it when past.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, LIMIT_CIDRS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct cidr_v4);
	__type(value, __u64);
} draining_v4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, LIMIT_CIDRS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct cidr_v6);
	__type(value, __u64);
} draining_v6 SEC(".maps");

/*
 * Translated flows by the tuple that the pod sends. Written and refreshed by
 * the datapath; deleted by whoever marked it dying. Not LRU: full means that a
 * new flow is refused, never that a live one dies.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LIMIT_FLOWS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tuple_v4);
	__type(value, struct mapping_v4);
} flows_v4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LIMIT_FLOWS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tuple_v6);
	__type(value, struct mapping_v6);
} flows_v6 SEC(".maps");

/*
 * The same flows by the tuple of their replies. An entry is the lock on its
 * outside tuple: it is inserted with BPF_NOEXIST before the mapping, and
 * deleted before it.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LIMIT_FLOWS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tuple_v4);
	__type(value, struct reverse_v4);
} reverse_v4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LIMIT_FLOWS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tuple_v6);
	__type(value, struct reverse_v6);
} reverse_v6 SEC(".maps");

/*
 * Connections from outside by the tuple of their replies, for nodes where
 * conntrack cannot tell. Written at ingress and by the agent when it attaches.
 * LRU: forgetting one is bad luck for a connection without conntrack.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, LIMIT_INBOUND);
	__type(key, struct tuple_v4);
	__type(value, struct inbound);
} inbound_v4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, LIMIT_INBOUND);
	__type(key, struct tuple_v6);
	__type(value, struct inbound);
} inbound_v6 SEC(".maps");

/* Fragmented packets under way. Written by first fragments. LRU. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, LIMIT_FRAGMENTS);
	__type(key, struct fragment_key_v4);
	__type(value, struct fragment);
} fragments_v4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, LIMIT_FRAGMENTS);
	__type(key, struct fragment_key_v6);
	__type(value, struct fragment);
} fragments_v6 SEC(".maps");

/*
 * Talkers by remote. Written by flows that open and go on. LRU: forgetting one
 * costs a fragment that came early.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, LIMIT_TALKERS);
	__type(key, struct talker_key_v4);
	__type(value, struct talker_v4);
} talkers_v4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, LIMIT_TALKERS);
	__type(key, struct talker_key_v6);
	__type(value, struct talker_v6);
} talkers_v6 SEC(".maps");

/*
 * Ways past the stack, by the tuple that the pod sends. Written by the
 * datapath. LRU: forgetting one costs a packet that takes the stack's way. One
 * a process: what is in it is good for a second.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, LIMIT_WAYS);
	__type(key, struct tuple_v4);
	__type(value, struct ways);
} ways_v4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, LIMIT_WAYS);
	__type(key, struct tuple_v6);
	__type(value, struct ways);
} ways_v6 SEC(".maps");

/*
 * Links from which translated flows come, with the time of the first one.
 * Written by the datapath, for the agent to attach there; deleted by the agent.
 * Full: no more links get the fast path.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LIMIT_POD_LINKS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u64);
} pod_links SEC(".maps");

/* One element, written by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fast_path_config);
} fast_path SEC(".maps");

/* Uplinks by slot. Written by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LIMIT_UPLINKS);
	__type(key, __u32);
	__type(value, struct uplink);
} uplinks SEC(".maps");

/*
 * What the agent knows of flows that other rules would leave alone, by family.
 * It says that there are such before it makes some, and that there are none
 * when it has looked at all flows. One that died left what is safe.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, FAMILY_COUNT);
	__type(key, __u32);
	__type(value, struct sticky);
} sticky SEC(".maps");

/* When the datapath last moved a flow of the node's own, by family. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, FAMILY_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} moved SEC(".maps");

/* Masquerade addresses of the uplinks that have several. By the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, LIMIT_ADDRESS_RULES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct address_rule_v4);
	__type(value, __be32);
} addresses_v4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, LIMIT_ADDRESS_RULES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct address_rule_v6);
	__type(value, __be32[4]);
} addresses_v6 SEC(".maps");

/* The node's own addresses and its subnets' broadcasts. By the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LIMIT_NODE_ADDRESSES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __be32);
	__type(value, enum node_address);
} node_v4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LIMIT_NODE_ADDRESSES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __be32[4]);
	__type(value, enum node_address);
} node_v6 SEC(".maps");

/* Ports that may be handed out. One element, written by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct port_pool);
} port_pool SEC(".maps");

/* Timeouts in seconds by enum flow_state. Written by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, FLOW_STATE_COUNT);
	__type(key, __u32);
	__type(value, __u32);
} timeouts SEC(".maps");

/* New flows by the number of candidates that they took; the last found none. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LIMIT_CANDIDATES + 1);
	__type(key, __u32);
	__type(value, __u64);
} attempts SEC(".maps");

/* Drops that somebody should hear of. Full: the event is lost. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, LIMIT_EVENT_BYTES);
} events SEC(".maps");

/* Packets and bytes by direction, family and verdict: see counter_index(). */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, DIRECTION_COUNT *FAMILY_COUNT *VERDICT_COUNT);
	__type(key, __u32);
	__type(value, struct counter);
} counters SEC(".maps");

#endif
