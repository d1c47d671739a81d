// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// quiet is long enough for a report that should not come.
const quiet = 2 * debounce

func (n *node) awaitChange(d *Datapath) {
	n.tb.Helper()
	select {
	case <-d.Changed():
	case <-time.After(5 * time.Second):
		n.tb.Fatal("no report of a change")
	}
}

func (n *node) expectQuiet(d *Datapath) {
	n.tb.Helper()
	select {
	case <-d.Changed():
		n.tb.Error("a report without a foreign change")
	case <-time.After(quiet):
	}
}

// TestHealing: with the watcher alone, within a second, whatever others do.
func TestHealing(t *testing.T) {
	all := damages()
	all["ruleset flushed"] = func(n *node, _ string) { n.run("nft", "flush", "ruleset") }
	all["table deleted"] = func(n *node, _ string) { n.run("nft", "delete", "table", "ip", "nat") }
	all["IPv6 chain flushed"] = func(n *node, _ string) { n.run("ip6tables-nft", "-t", "nat", "-F", testChain) }
	all["invalid chain flushed"] = func(n *node, _ string) { n.run("iptables-nft", "-t", "mangle", "-F", InvalidChain) }
	all["invalid jump removed"] = func(n *node, _ string) { n.run("iptables-nft", "-t", "mangle", "-F", "POSTROUTING") }
	n := newNode(t)
	options := n.options()
	options.DropInvalid = true
	d := n.datapath(options)
	n.sync(d, defaultPolicy())
	n.expectQuiet(d)
	want := n.save(nft, ipv4, tableNAT)
	for name, damage := range all {
		t.Run(name, func(t *testing.T) {
			repairs := n.stats(d).Repairs
			damage(n, "iptables-nft")
			started := time.Now()
			n.awaitChange(d)
			n.sync(d, defaultPolicy())
			if took := time.Since(started); took > time.Second {
				t.Errorf("healed after %v", took)
			}
			if got := n.save(nft, ipv4, tableNAT); got != want {
				t.Errorf("not healed:\n%s", got)
			}
			if n.stats(d).Repairs == repairs {
				t.Error("nothing was repaired")
			}
			n.expectQuiet(d) // mending is no change that needs mending
		})
	}
}

// TestOthersRulesAreNoReason: kube-proxy rewrites its chains all the time.
func TestOthersRulesAreNoReason(t *testing.T) {
	n := newNode(t)
	options := n.options()
	options.IPv6 = false
	d := n.datapath(options)
	n.sync(d, defaultPolicy())
	n.run("iptables-nft", "-t", "mangle", "-A", "POSTROUTING", "-j", "ACCEPT") // not watched without --invalid=drop
	n.run("iptables-nft", "-t", "nat", "-A", "PREROUTING", "-j", "ACCEPT")
	n.run("ip6tables-nft", "-t", "nat", "-A", "POSTROUTING", "-j", "ACCEPT") // not without --enable-ipv6
	n.restore(nft, ipv4, "*nat\n:KUBE-POSTROUTING - [0:0]\n:KUBE-SERVICES - [0:0]\n-A KUBE-POSTROUTING -j RETURN\nCOMMIT\n")
	n.run("nft", "add", "table", "inet", "nat")
	n.run("nft", "delete", "table", "inet", "nat")
	n.expectQuiet(d)
	n.run("iptables-nft", "-t", "nat", "-A", "POSTROUTING", "-s", "192.0.2.1", "-j", "ACCEPT")
	n.awaitChange(d)
}

// TestLostEventsAreAChange: who cannot know must look.
func TestLostEventsAreAChange(t *testing.T) {
	n := newNode(t)
	d := n.datapath(n.options())
	n.sync(d, defaultPolicy())
	conn, err := d.watch.socket.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 1)
	}); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	n.restore(nft, ipv4, transaction(tableNAT, chain{name: "OTHERS", rules: natChain("", manyCIDRs(2000).Rules(false), nil, true).rules}.fill()))
	n.awaitChange(d)
}

// TestBurstIsOneReport: a report costs a look at all chains.
func TestBurstIsOneReport(t *testing.T) {
	n := newNode(t)
	d := n.datapath(n.options())
	n.sync(d, defaultPolicy())
	started := time.Now()
	for range 10 {
		n.run("iptables-nft", "-t", "nat", "-A", "POSTROUTING", "-s", "192.0.2.1", "-j", "ACCEPT")
	}
	windows := int(time.Since(started)/debounce) + 1
	reports := 0
	for {
		select {
		case <-d.Changed():
			reports++
			continue
		case <-time.After(quiet):
		}
		break
	}
	if reports == 0 || reports > windows {
		t.Errorf("%d reports in %d windows", reports, windows)
	}
}

// TestLegacyHealsAtTheNextSync, since nobody tells.
func TestLegacyHealsAtTheNextSync(t *testing.T) {
	n := newNode(t)
	n.prefer(legacy)
	d := n.datapath(n.options())
	n.sync(d, defaultPolicy())
	n.run("iptables-legacy", "-t", "nat", "-F")
	n.expectQuiet(d)
	n.sync(d, defaultPolicy())
	if got := n.save(legacy, ipv4, tableNAT); countLines(got, testChain) != 7 {
		t.Errorf("not healed:\n%s", got)
	}
}

func TestCloseEndsTheWatcher(t *testing.T) {
	n := newNode(t)
	var d *Datapath
	n.do(func() (err error) {
		d, err = New(n.options())
		return err
	})
	n.sync(d, defaultPolicy())
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	select {
	case <-d.watch.done:
	default:
		t.Error("the goroutine goes on")
	}
	if got := n.save(nft, ipv4, tableNAT); countLines(got, testChain) != 7 {
		t.Errorf("closing changed the rules:\n%s", got)
	}
}
