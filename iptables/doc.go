// SPDX-License-Identifier: Apache-2.0

// Package iptables is the datapath that the classic ip-masq-agent made: a chain
// in the nat table whose text other tools know, in whichever of the two iptables
// backends the node uses.
//
// What it wants is built purely (rules.go, invalid.go), compared with what the
// kernel lists (listing.go, plan.go) and, only where the two differ, written as
// one restore transaction that is read back (command.go, apply.go). A chain's
// content and the jump to it are in the same transaction, so no moment exists in
// which the jump leads to half a chain.
//
// Programs run on the goroutine that calls, and so in its network namespace.
package iptables
