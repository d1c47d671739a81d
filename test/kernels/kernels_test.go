// SPDX-License-Identifier: Apache-2.0

// Package kernels_test is what test/kernels/run runs in every kernel. On the
// development machine the same tests run as part of go test.
package kernels_test

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/lab"
)

// TestTrivial proves the guest itself: links, both families, a program on the uplink.
func TestTrivial(t *testing.T) {
	for _, conntrack := range []bool{false, true} {
		l := lab.New(t, lab.Options{Conntrack: conntrack})
		if err := l.Node.Do(func() error { return attach(t, l) }); err != nil {
			t.Fatal(err)
		}
		for _, is6 := range []bool{false, true} {
			udp(t, l, netip.AddrPortFrom(l.Remote.Addr(is6), 7))
		}
	}
}

func attach(t *testing.T, l *lab.Lab) error {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}, License: "GPL"})
	if err != nil {
		return err
	}
	i := l.Uplinks[0].Index
	tcx, err := link.AttachTCX(link.TCXOptions{Interface: i, Program: prog, Attach: ebpf.AttachTCXEgress})
	if err == nil {
		t.Log("FACT attach=tcx")
		return tcx.Pin("/sys/fs/bpf/link")
	}
	if !errors.Is(err, ebpf.ErrNotSupported) {
		return err
	}
	t.Log("FACT attach=clsact")
	if err := l.Node.Netlink().QdiscAdd(&netlink.GenericQdisc{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: i, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}, QdiscType: "clsact"}); err != nil {
		return err
	}
	return l.Node.Netlink().FilterAdd(&netlink.BpfFilter{FilterAttrs: netlink.FilterAttrs{LinkIndex: i, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1}, Fd: prog.FD(), Name: "snat", DirectAction: true})
}

func udp(t *testing.T, l *lab.Lab, to netip.AddrPort) {
	t.Helper()
	var server *net.UDPConn
	var client net.Conn
	if err := l.Outside.Do(func() (err error) { server, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(to)); return err }); err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	if err := l.Pods[0].Do(func() (err error) { client, err = net.Dial("udp", to.String()); return err }); err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := client.Write([]byte("hi")); err != nil {
		t.Fatal(err)
	}
	server.SetDeadline(time.Now().Add(5 * time.Second))
	buf := make([]byte, 16)
	_, from, err := server.ReadFromUDPAddrPort(buf)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(from)
}
