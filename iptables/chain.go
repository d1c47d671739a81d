// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"slices"
	"strings"
)

// maxChain is the longest chain name that the kernel takes, in bytes: struct
// xt_entry_target has 29 of them for the name and its end.
const maxChain = 28

// ValidateChain tells why iptables would not take name as the name of a chain
// of its own in the nat table. It takes 1 to 28 printable ASCII characters
// without blanks, quotes and backslashes, not beginning as an option or a
// negation does, and not the name of a built-in chain or of a target.
func ValidateChain(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("chain name %q is empty", name)
	case len(name) > maxChain:
		return fmt.Errorf("chain name %q has %d characters, %d is the most", name, len(name), maxChain)
	case name[0] == '-' || name[0] == '!':
		return fmt.Errorf("chain name %q begins with %q", name, name[:1])
	case strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune("\"'\\", r) }):
		return fmt.Errorf("chain name %q holds a blank, a quote, a backslash or a character that is not ASCII", name)
	case slices.Contains(builtinChains(), name):
		return fmt.Errorf("chain name %q is that of a built-in chain", name)
	case slices.Contains(targets(), name):
		return fmt.Errorf("chain name %q is that of a target", name)
	}
	return nil
}

func builtinChains() []string {
	return []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", postrouting}
}

// targets are those of iptables 1.4 to 1.8. The programs refuse each for which
// they find an extension, which differs from node to node.
func targets() []string {
	return []string{
		"ACCEPT", "DROP", "QUEUE", "RETURN",
		"AUDIT", "CHECKSUM", "CLASSIFY", "CLUSTERIP", "CONNMARK", "CONNSECMARK", "CT", "DNAT", "DNPT",
		"DSCP", "ECN", "HL", "HMARK", "IDLETIMER", "LED", "LOG", "MARK", "MASQUERADE", "MIRROR",
		"NETMAP", "NFLOG", "NFQUEUE", "NOTRACK", "RATEEST", "REDIRECT", "REJECT", "SAME", "SECMARK",
		"SET", "SNAT", "SNPT", "SYNPROXY", "TCPMSS", "TCPOPTSTRIP", "TEE", "TOS", "TPROXY", "TRACE",
		"TTL", "ULOG",
	}
}
