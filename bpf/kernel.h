/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_KERNEL_H
#define MASQ_KERNEL_H

/*
 * What is read and called of the kernel itself, where cfg_ctinfo and
 * cfg_ct_lookup say that it can be. The parts of kernel types that are read;
 * CO-RE finds where they are. The names are the kernel's.
 */

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

struct net_device {
	const unsigned char *dev_addr;
} __attribute__((preserve_access_index));

struct sk_buff {
	unsigned long _nfct;
	struct net_device *dev;
	__u8 ip_summed : 2;
} __attribute__((preserve_access_index));

struct nf_conn {
	unsigned long status;
} __attribute__((preserve_access_index));

struct bpf_ct_opts {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

/* 6.2 and up. */
extern void *bpf_cast_to_kern_ctx(void *ctx) __ksym __weak;
/* 5.18 and up, with nf_conntrack loaded. */
extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *skb,
					 struct bpf_sock_tuple *tuple,
					 __u32 tuple_size,
					 struct bpf_ct_opts *opts,
					 __u32 opts_size) __ksym __weak;
extern void bpf_ct_release(struct nf_conn *ct) __ksym __weak;

/* How a packet's transport checksum stands: linux/skbuff.h. */
enum ip_summed {
	IP_SUMMED_NONE, /* it is in the header */
	IP_SUMMED_UNNECESSARY, /* it is, and somebody has seen that it is right
				*/
	IP_SUMMED_COMPLETE, /* it is, and skb->csum sums up the packet */
	IP_SUMMED_PARTIAL, /* the header has the pseudo header's sum only */
};

static __always_inline enum ip_summed ip_summed(struct __sk_buff *skb)
{
	struct sk_buff *kernel = bpf_cast_to_kern_ctx(skb);

	return BPF_CORE_READ_BITFIELD(kernel, ip_summed);
}

#endif
