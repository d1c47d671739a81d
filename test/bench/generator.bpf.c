//go:build ignore
// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/*
 * Both ends of a benchmark: a program that makes UDP packets out of thin air,
 * as if they had arrived at the interface that it is run on, and one that
 * counts and drops them where they have crossed the node.
 */

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/udp.h>
#include <stdbool.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define SERVICE_PORT 53
#define FIRST_PORT 1024
#define TTL 64
#define PAYLOAD_BYTES 18

/*
 * What to make: packet n belongs to flow n % flows. Flows go round the remotes,
 * so that no remote's ports run out. Addresses are in host byte order.
 */
struct traffic {
	__u32 next; /* n of the next packet */
	__u32 flows;
	__u32 inside; /* the pod, or who stands for it */
	__u32 remote; /* the first of them */
	__u32 remotes;
	__u32 translated; /* what the pod's address becomes */
	__u8 mac[ETH_ALEN]; /* of the interface that the packets arrive at */
	__u8 reply; /* from the remotes */
	__u8 pad;
};

/* What came across, by its inside address. */
struct arrivals {
	__u64 kept;
	__u64 translated;
	__u64 other;
};

struct traffic job;
struct arrivals arrived;

struct frame {
	struct ethhdr eth;
	struct iphdr ip;
	struct udphdr udp;
	__u8 payload[PAYLOAD_BYTES];
} __attribute__((packed));

#define UDP_BYTES (sizeof(struct udphdr) + PAYLOAD_BYTES)
#define IP_BYTES (sizeof(struct iphdr) + UDP_BYTES)

static __always_inline __u32 halves(__u32 addr)
{
	return (addr >> 16) + (addr & 0xffff);
}

static __always_inline __be16 checksum(__u32 sum)
{
	sum = halves(sum);
	return bpf_htons((__u16)~halves(sum));
}

/*
 * Every run writes every header field: a frame comes back as the stack left it.
 */
SEC("xdp")
int generate(struct xdp_md *ctx)
{
	struct frame *f = (void *)(long)ctx->data;
	__u32 flow, remote, addresses;
	__u16 port;

	if ((void *)(f + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	flow = job.next++ % job.flows;
	port = FIRST_PORT + flow / job.remotes;
	remote = job.remote + flow % job.remotes;
	addresses = halves(job.inside) + halves(remote);

	__builtin_memcpy(f->eth.h_dest, job.mac, ETH_ALEN);
	f->eth.h_proto = bpf_htons(ETH_P_IP);
	f->ip = (struct iphdr){
		.version = 4,
		.ihl = 5,
		.tot_len = bpf_htons(IP_BYTES),
		.ttl = TTL,
		.protocol = IPPROTO_UDP,
		.check = checksum(0x4500 + IP_BYTES + (TTL << 8) + IPPROTO_UDP +
				  addresses),
		.saddr = bpf_htonl(job.reply ? remote : job.inside),
		.daddr = bpf_htonl(job.reply ? job.inside : remote),
	};
	f->udp = (struct udphdr){
		.source = bpf_htons(job.reply ? SERVICE_PORT : port),
		.dest = bpf_htons(job.reply ? port : SERVICE_PORT),
		.len = bpf_htons(UDP_BYTES),
		.check = checksum(addresses + IPPROTO_UDP + 2 * UDP_BYTES +
				  port + SERVICE_PORT),
	};
	return XDP_PASS;
}

static __always_inline bool of_job(const struct frame *f)
{
	return f->eth.h_proto == bpf_htons(ETH_P_IP) &&
	       f->ip.protocol == IPPROTO_UDP &&
	       f->ip.tot_len == bpf_htons(IP_BYTES) &&
	       (job.reply ? f->udp.source : f->udp.dest) ==
		       bpf_htons(SERVICE_PORT);
}

SEC("tc")
int count(struct __sk_buff *skb)
{
	const struct frame *f = (void *)(long)skb->data;
	__u32 inside;

	if ((void *)(f + 1) > (void *)(long)skb->data_end || !of_job(f))
		return TC_ACT_UNSPEC;
	inside = bpf_ntohl(job.reply ? f->ip.daddr : f->ip.saddr);
	if (inside == job.inside)
		__sync_fetch_and_add(&arrived.kept, 1);
	else if (inside == job.translated)
		__sync_fetch_and_add(&arrived.translated, 1);
	else
		__sync_fetch_and_add(&arrived.other, 1);
	return TC_ACT_SHOT;
}

char _license[] SEC("license") = "Dual BSD/GPL";
