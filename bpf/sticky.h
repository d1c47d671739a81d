/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef MASQ_STICKY_H
#define MASQ_STICKY_H

/*
 * Flows keep what they got, so a packet that other rules would leave alone has
 * to be looked up among them: but only where there can be such a flow. There
 * seldom is one, and most packets of a node need no translation.
 */

#include "maps.h"
#include "policy.h"

/* Whether flows may be open towards destinations that are exempt by now. */
static __always_inline bool flows_to_exempt(const enum family family)
{
	__u32 index = family;
	const struct sticky *known = bpf_map_lookup_elem(&sticky, &index);

	return !known || known->exempt;
}

/*
 * Whether a packet to an exempt destination stays as it is, whatever is behind
 * its addresses: no flow goes there.
 */
static __always_inline bool exempt_is_all(const struct uplink *uplink,
					  const enum family family)
{
	return !is_closed(uplink, family) && !flows_to_exempt(family);
}

/* Whether flows of the node's own may be open that were moved. */
static __always_inline bool flows_moved(const enum family family)
{
	__u32 index = family;
	const struct sticky *known = bpf_map_lookup_elem(&sticky, &index);
	const __u64 *last = bpf_map_lookup_elem(&moved, &index);

	return !known || !last || *last > known->moved;
}

/* A flow of the node's own is about to be moved. */
static __always_inline void note_moved(const enum family family, __u64 now)
{
	__u32 index = family;
	__u64 *last = bpf_map_lookup_elem(&moved, &index);

	if (last)
		*last = now;
}

#endif
