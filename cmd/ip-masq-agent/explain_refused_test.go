// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/lab"
)

// What leaves through a link that the eBPF datapath refuses is not masqueraded, and
// explain says so and why, with and without an agent.
func TestKernelExplainOfARefusedUplink(t *testing.T) {
	n := &node{Lab: lab.New(t, lab.Options{Pods: 1}), t: t, config: filepath.Join(t.TempDir(), "ip-masq-agent")}
	n.write("{}")
	flags := n.flags("--datapath=" + agent.EBPF)
	ask := func(dst string) string {
		got := lab.RunAgent(t, n.Node, append([]string{"explain", "--dst=" + dst, "--src=" + n.Pods[0].V4.String()}, flags...)...)
		return got.Stdout + got.Stderr
	}
	const refused = "ib0 is refused as an uplink: its frames cannot be read as they are of link type 32"
	running := lab.StartAgent(t, n.Node, flags...)
	n.addStrangeLink("ib0")
	n.within(10*time.Second, "the agent refuses it", func() bool { return strings.Contains(ask("198.18.0.1"), refused) })
	if got := ask(n.Remote.V4.String()); strings.Contains(got, "refused") {
		t.Errorf("another uplink: %q", got)
	}
	if err := running.Stop(); err != nil {
		t.Fatal(err)
	}
	if got := ask("198.18.0.1"); !strings.Contains(got, refused) {
		t.Errorf("without an agent: %q", got)
	}
}

// addStrangeLink makes an uplink with frames of InfiniBand's type.
func (n *node) addStrangeLink(name string) {
	n.t.Helper()
	if err := n.Node.Do(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		tun := os.NewFile(uintptr(fd), name)
		n.t.Cleanup(func() { _ = tun.Close() })
		request, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
			return err
		}
		return unix.IoctlSetInt(fd, unix.TUNSETLINK, unix.ARPHRD_INFINIBAND)
	}); err != nil {
		n.t.Fatal(err)
	}
	for _, command := range []string{"link set " + name + " up", "addr add 198.18.1.1/24 dev " + name, "route add 198.18.0.0/24 dev " + name} {
		if _, err := n.Node.Run(n.t.Context(), "ip", strings.Fields(command)...); err != nil {
			n.t.Fatal(err)
		}
	}
}
