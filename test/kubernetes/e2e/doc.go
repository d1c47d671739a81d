// SPDX-License-Identifier: Apache-2.0

// Package e2e runs the agent on a real cluster, which ../run makes, and asserts
// on what the other end of connections saw. It is no test of its own: ../run
// compiles and starts it.
package e2e
