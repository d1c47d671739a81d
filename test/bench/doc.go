// SPDX-License-Identifier: Apache-2.0

// Package bench has no code of its own. Its tests measure what the datapaths
// cost, each against the others and against plain routing, in one run.
package bench
