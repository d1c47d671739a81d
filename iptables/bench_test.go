// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"log/slog"
	"testing"

	"ip-masq-agent/internal/prefix"
)

// BenchmarkSync compares an idle sync and a reload with one plain restore of
// the same text, which is what the classic agent does every minute.
func BenchmarkSync(b *testing.B) {
	for _, m := range []mode{nft, legacy} {
		for _, size := range []int{64, 1_000, 10_000} {
			policies := []*prefix.Policy{manyCIDRs(size), manyCIDRs(size - 1)}
			b.Run(fmt.Sprintf("%s/%d/idle", m, size), func(b *testing.B) {
				benchmark(b, m, policies[:1], func(b *testing.B, d *Datapath, p *prefix.Policy) error {
					return d.Sync(b.Context(), p, nil)
				})
			})
			b.Run(fmt.Sprintf("%s/%d/reload", m, size), func(b *testing.B) {
				benchmark(b, m, policies, func(b *testing.B, d *Datapath, p *prefix.Policy) error {
					return d.Sync(b.Context(), p, nil)
				})
			})
			b.Run(fmt.Sprintf("%s/%d/restore", m, size), func(b *testing.B) {
				benchmark(b, m, policies, func(b *testing.B, d *Datapath, p *prefix.Policy) error {
					t, c := d.newTool(m, ipv4), d.chains(ipv4, p, nil)[0]
					return t.restore(b.Context(), tableNAT, c.fill())
				})
			})
		}
	}
}

func benchmark(b *testing.B, m mode, policies []*prefix.Policy, step func(*testing.B, *Datapath, *prefix.Policy) error) {
	n := newNode(b)
	n.prefer(m)
	options := n.options()
	options.IPv6, options.Log = false, slog.New(slog.DiscardHandler)
	d := n.datapath(options)
	for range 2 {
		n.sync(d, policies[0])
	}
	n.do(func() error {
		for i := 0; b.Loop(); i++ {
			if err := step(b, d, policies[(i+1)%len(policies)]); err != nil {
				return err
			}
		}
		return nil
	})
}
