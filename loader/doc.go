// SPDX-License-Identifier: Apache-2.0

// Package loader runs the eBPF datapath: it loads and attaches the programs of
// package bpf, keeps their maps in agreement with the configuration and the
// node's network, and takes away what has ended.
//
// State lives in pinned maps and links, so the datapath outlives the agent: a
// new agent finds it and goes on.
package loader
