// SPDX-License-Identifier: Apache-2.0

// Package lifecycle has the tests of what may happen to an agent and its node
// while traffic flows: kills at any instant, restarts, damage by hand, changes
// of addresses, links and config, clean-up. They run the agent's own binary in
// networks of namespaces. With LONG_TESTS=1 they look more often and longer.
package lifecycle
