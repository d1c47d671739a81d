/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_CLOCK_H
#define MASQ_CLOCK_H

#include "maps.h"

/*
 * CLOCK_MONOTONIC in nanoseconds. As of the last tick where the kernel tells
 * that (5.11): reading the hardware takes longer than a flow's lookup on some
 * machines, and nothing here lasts less than a second.
 */
static __always_inline __u64 clock_ns(void)
{
	return cfg_coarse_clock ? bpf_ktime_get_coarse_ns() :
				  bpf_ktime_get_ns();
}

#endif
