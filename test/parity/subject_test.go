// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ip-masq-agent/internal/lab"
	"ip-masq-agent/internal/prefix"
)

// The subjects of the table. upstream is no agent but the rules of the classic
// one, written by hand: it shows that an expectation is the kernel's.
const (
	upstream = "upstream"
	iptables = "iptables"
	ebpf     = "ebpf"
)

// variant is one way to run the table.
type variant struct {
	subject     string
	conntrack   bool // before the subject came; under iptables rules there always is
	offloads    bool
	randomFully bool
	fastPath    bool // of ebpf; conntrack is liberal then
}

func (v variant) String() string {
	if v.fastPath {
		return fmt.Sprintf("%s/fast-path,conntrack=%t", v.subject, v.conntrack)
	}
	return fmt.Sprintf("%s/conntrack=%t,offloads=%t,random-fully=%t", v.subject, v.conntrack, v.offloads, v.randomFully)
}

// settings are the part of the agent's config that the table needs.
type settings struct {
	NonMasqueradeCIDRs []string `json:"nonMasqueradeCIDRs"`
	MasqueradeCIDRs    []string `json:"masqueradeCIDRs,omitempty"`
}

func usualSettings() settings {
	return settings{
		NonMasqueradeCIDRs: []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fd00::/8"},
		MasqueradeCIDRs:    []string{"10.99.0.0/16", "fd00:99::/32"},
	}
}

// subject is what translates on the node of a lab.
type subject struct {
	lab     *lab.Lab
	variant variant
	config  string
	agent   *lab.Agent // nil: upstream's rules
	ruled   bool       // the upstream rules have their jumps
}

func startSubject(t *testing.T, l *lab.Lab, v variant, s settings) *subject {
	t.Helper()
	sub := &subject{lab: l, variant: v, config: filepath.Join(t.TempDir(), "config")}
	sub.configure(t, s)
	if v.subject == upstream {
		return sub
	}
	if v.fastPath && v.conntrack {
		if err := l.Node.Sysctl("net/netfilter/nf_conntrack_tcp_be_liberal", "1"); err != nil {
			t.Fatal(err)
		}
	}
	sub.agent = lab.StartAgent(t, l.Node,
		"--datapath="+v.subject,
		fmt.Sprintf("--fast-path=%t", v.fastPath),
		"--config="+sub.config,
		"--enable-ipv6",
		"--invalid=drop",
		fmt.Sprintf("--random-fully=%t", v.randomFully),
	)
	return sub
}

// configure changes the settings. An agent takes them up by itself, within a
// second or so.
func (sub *subject) configure(t *testing.T, s settings) {
	t.Helper()
	if sub.variant.subject == upstream {
		sub.writeRules(t, s)
		return
	}
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	aside := sub.config + ".new"
	if err := os.WriteFile(aside, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(aside, sub.config); err != nil {
		t.Fatal(err)
	}
}

func (sub *subject) writeRules(t *testing.T, s settings) {
	t.Helper()
	policy := prefix.New(prefix.Lists{
		LinkLocal:     prefixes(t, "169.254.0.0/16", "fe80::/10"),
		NonMasquerade: prefixes(t, s.NonMasqueradeCIDRs...),
		Masquerade:    prefixes(t, s.MasqueradeCIDRs...),
	})
	for _, is6 := range []bool{false, true} {
		tool := "iptables-nft-restore"
		if is6 {
			tool = "ip6tables-nft-restore"
		}
		ctx, cancel := context.WithTimeout(t.Context(), lab.Patience(10*time.Second))
		defer cancel()
		cmd := sub.lab.Node.Command(ctx, tool, "--noflush")
		cmd.Stdin = strings.NewReader(sub.rules(policy.Rules(is6)))
		if said, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, said)
		}
	}
	sub.ruled = true
}

func (sub *subject) rules(entries []prefix.Entry) string {
	masquerade := "-j MASQUERADE"
	if sub.variant.randomFully {
		masquerade += " --random-fully"
	}
	var nat, mangle strings.Builder
	fmt.Fprintln(&nat, "*nat\n:IP-MASQ-AGENT - [0:0]")
	fmt.Fprintln(&mangle, "*mangle\n:INVALID - [0:0]")
	for _, e := range entries {
		if e.Verdict == prefix.Keep {
			fmt.Fprintf(&nat, "-A IP-MASQ-AGENT -d %s -j RETURN\n", e.Prefix)
			fmt.Fprintf(&mangle, "-A INVALID -d %s -j RETURN\n", e.Prefix)
			continue
		}
		fmt.Fprintf(&nat, "-A IP-MASQ-AGENT -d %s %s\n", e.Prefix, masquerade)
		fmt.Fprintf(&mangle, "-A INVALID -d %s -j DROP\n", e.Prefix)
	}
	fmt.Fprintf(&nat, "-A IP-MASQ-AGENT %s\n", masquerade)
	fmt.Fprintln(&mangle, "-A INVALID -j DROP")
	if !sub.ruled {
		fmt.Fprintln(&nat, "-A POSTROUTING -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT")
		fmt.Fprintln(&mangle, "-A POSTROUTING -o eth+ -m conntrack --ctstate INVALID -m addrtype ! --src-type LOCAL -j INVALID")
	}
	return nat.String() + "COMMIT\n" + mangle.String() + "COMMIT\n"
}

func prefixes(t *testing.T, texts ...string) []netip.Prefix {
	t.Helper()
	var all []netip.Prefix
	for _, text := range texts {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	return all
}
