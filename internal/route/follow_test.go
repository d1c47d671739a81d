// SPDX-License-Identifier: Apache-2.0

package route

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

func TestLostEvents(t *testing.T) {
	enterNamespace(t)
	log := newRecord()
	tr := newTracker(t, Options{Log: log.logger()})
	if err := tr.events.conn.Control(func(fd uintptr) {
		if err := unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 1); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	ip(t, "tuntap add t0 mode tun", "tuntap add t1 mode tun", "tuntap add t2 mode tun", "tuntap add t3 mode tun",
		"link set t3 up", "addr add 192.0.2.1/24 dev t3")
	run(t, tr)
	await(t, tr, "t3", named("t3"))
	if log.all("events lost") == nil {
		t.Error("no event was lost, so this tests nothing")
	}
	ip(t, "link del t3")
	await(t, tr, "no uplink", named(""))
}

func TestPodsComeAndGo(t *testing.T) {
	const pods = 500
	enterNamespace(t)
	ip(t, "tuntap add t0 mode tun", "link set t0 up", "addr add 192.0.2.1/24 dev t0")
	tr := track(t, Options{})
	var lines []string
	for i := range pods {
		lines = append(lines,
			fmt.Sprintf("link add pod%d group 7 type veth peer eth%d", i, i),
			fmt.Sprintf("link set pod%d up", i), fmt.Sprintf("link set eth%d up", i),
			fmt.Sprintf("route add 10.1.%d.%d/32 dev pod%d", i/256, i%256, i))
	}
	requests := atomic.LoadUint32(&tr.conn.socket.Seq)
	ip(t, append(lines, "link del group 7")...)
	select {
	case <-tr.Changed():
		t.Errorf("a change: %s", tr.Snapshot())
	default:
	}
	if n := atomic.LoadUint32(&tr.conn.socket.Seq) - requests; n > 0 {
		t.Errorf("%d listings because of pods", n)
	}
	barrier(t, tr)
	<-tr.Changed()
	select {
	case <-tr.Changed():
		t.Error("more than one change")
	default:
	}
	if got, want := tr.Snapshot().String(), "t0 192.0.2.1, 2 addresses"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestSettle(t *testing.T) {
	for _, tt := range []struct {
		name   string
		events int // as many, 10 ms apart
		want   time.Duration
	}{
		{"one event", 0, quietTime},
		{"a burst", 5, 50*time.Millisecond + quietTime},
		{"a stream that never ends", 1000, maxDelay},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				wake := make(chan struct{}, 1)
				go func() {
					for range tt.events {
						time.Sleep(10 * time.Millisecond)
						if ctx.Err() != nil {
							return
						}
						deliver(wake)
					}
				}()
				start := time.Now()
				settle(ctx, wake)
				if got := time.Since(start); got != tt.want {
					t.Errorf("settled after %v, want %v", got, tt.want)
				}
				cancel()
				time.Sleep(10 * time.Millisecond)
			})
		})
	}
}
