// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"strings"
	"sync/atomic"
	"testing"

	"ip-masq-agent/internal/lab"
)

// TestUplinkShapes has pods talk through uplinks that are no plain Ethernet
// device, under both datapaths. Those that this kernel may lack are tested in
// test/kernels.
func TestUplinkShapes(t *testing.T) {
	for _, shape := range []lab.Shape{lab.Tun, lab.Bridge, lab.VXLAN} {
		for _, subject := range []string{iptables, ebpf} {
			t.Run(string(shape)+"/"+subject, func(t *testing.T) {
				t.Parallel()
				v := variant{subject: subject, conntrack: true, offloads: true, randomFully: true}
				l := lab.New(t, lab.Options{Conntrack: true, SecondUplink: true, Shape: shape})
				b := &bench{T: t, lab: l, variant: v, port: new(atomic.Uint32), wires: []*lab.Capture{lab.NewCapture(t, l.End)}}
				b.port.Store(20000)
				b.serve()
				b.subject = startSubject(t, l, v, usualSettings())
				b.checkShape()
			})
		}
	}
}

// checkShape: two pods with one port, whole messages and such in fragments, both
// ways, and no more translations than flows, whatever devices are on the way.
func (b *bench) checkShape() {
	b.Helper()
	flows := 0
	for _, is6 := range []bool{false, true} {
		for _, proto := range []string{tcp, udp, icmp} {
			for _, size := range []int{0, 4000} {
				b.check(proto, is6, []flow{
					{from: podA, to: viaUplink2, seen: uplink2, size: size},
					{from: routedA, to: viaUplink2, seen: uplink2, ports: taken, size: size},
				})
				flows += 2
			}
		}
	}
	if b.variant.subject != ebpf {
		return
	}
	list := lab.RunAgent(b, b.lab.Node, "nat", "list", "--dst="+viaUplink2(b.lab).V4.String()).Stdout +
		lab.RunAgent(b, b.lab.Node, "nat", "list", "--dst="+viaUplink2(b.lab).V6.String()).Stdout
	if got := strings.Count(list, " "+uplink2(b.lab).V4.String()+":") + strings.Count(list, uplink2(b.lab).V6.String()+"]:"); got != flows {
		b.Errorf("%d translations of %d flows:\n%s", got, flows, list)
	}
}
