// SPDX-License-Identifier: Apache-2.0

// Package parity has no code of its own. Its test runs one table of
// expectations under upstream's rules, under the iptables datapath and under
// the eBPF datapath: what holds under the first is what users know.
package parity
