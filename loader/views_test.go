// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"ip-masq-agent/internal/lab"
)

// Where an IPv4 packet in an Ethernet frame has its addresses.
const (
	sourceOffset      = 14 + 12
	destinationOffset = 14 + 16
)

// countBehind counts, in a program behind ours, the packets of the first uplink
// that have an address.
func (n *node) countBehind(attach ebpf.AttachType, offset int32, address netip.Addr) *ebpf.Map {
	n.t.Helper()
	hits, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { hits.Close() })
	wanted := address.As4()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "behind", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadAbs(offset, asm.Word),
			asm.LoadImm(asm.R1, int64(binary.BigEndian.Uint32(wanted[:])), asm.DWord),
			asm.JNE.Reg(asm.R0, asm.R1, "pass"),
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.LoadMapPtr(asm.R1, hits.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "pass"),
			asm.Mov.Imm(asm.R1, 1),
			asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
			asm.Mov.Imm(asm.R0, -1).WithSymbol("pass"),
			asm.Return(),
		},
	})
	if err != nil {
		n.t.Fatal(err)
	}
	defer program.Close()
	n.do(func() error {
		l, err := link.AttachTCX(link.TCXOptions{Interface: n.Uplinks[0].Index, Program: program, Attach: attach, Anchor: link.Tail()})
		if err == nil {
			n.t.Cleanup(func() { l.Close() })
		}
		return err
	})
	return hits
}

// Programs behind ours see the wire on the way out and the pod on the way in.
// netfilter, which comes before us on the way out and after us on the way in,
// sees the pod.
func TestWhoSeesWhichAddress(t *testing.T) {
	t.Parallel()
	n := newNode(t, lab.Options{}, testOptions4(t))
	wire, pod := n.Addresses.Node.V4, n.Pods[0].V4
	views := map[string]*ebpf.Map{
		"TC out, from the node": n.countBehind(ebpf.AttachTCXEgress, sourceOffset, wire),
		"TC out, from the pod":  n.countBehind(ebpf.AttachTCXEgress, sourceOffset, pod),
		"TC in, to the node":    n.countBehind(ebpf.AttachTCXIngress, destinationOffset, wire),
		"TC in, to the pod":     n.countBehind(ebpf.AttachTCXIngress, destinationOffset, pod),
	}
	for _, rule := range []string{
		"add table ip views",
		"add chain ip views out { type filter hook postrouting priority 300; }",
		"add chain ip views in { type filter hook prerouting priority -500; }",
		"add rule ip views out oifname eth0 ip saddr " + pod.String() + " counter",
		"add rule ip views out oifname eth0 ip saddr " + wire.String() + " ip daddr " + n.Remote.V4.String() + " counter",
		"add rule ip views in iifname eth0 ip daddr " + pod.String() + " counter",
	} {
		n.run("nft", rule)
	}
	n.translates("udp", false) // two questions and their answers
	for view, want := range map[string]uint64{
		"TC out, from the node": 2, "TC out, from the pod": 0, "TC in, to the node": 0, "TC in, to the pod": 2,
	} {
		var got uint64
		if err := views[view].Lookup(uint32(0), &got); err != nil || got != want {
			t.Errorf("%s: %d packets, want %d; %v", view, got, want, err)
		}
	}
	var counters []string
	for line := range strings.Lines(n.run("nft", "list", "table", "ip", "views")) {
		if _, counter, found := strings.Cut(line, "counter packets "); found {
			packets, _, _ := strings.Cut(counter, " ")
			counters = append(counters, packets)
		}
	}
	// Out from the pod, out from the node, in to the pod; nft lists in this order.
	if got := strings.Join(counters, " "); got != "2 0 2" {
		t.Errorf("netfilter counted %s, want 2 0 2", got)
	}
}
