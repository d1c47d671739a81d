// SPDX-License-Identifier: Apache-2.0

// Command ip-masq-agent masquerades what pods send out of the node, except
// towards the ranges that should see their addresses.
package main

import (
	"os"
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr, realEnvironment()))
}
