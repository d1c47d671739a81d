// SPDX-License-Identifier: Apache-2.0

// Package prefix decides by longest prefix what happens to the source of a
// packet for a destination. Both datapaths, explain and the tests take their
// decisions from here.
package prefix
