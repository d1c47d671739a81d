// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// pinned runs f on two threads, each on a CPU of its own where there are two,
// and keeps them in step: f is called for the same turn at the same time.
func pinned(t *testing.T, turns int, f func(thread, turn int) error) {
	t.Helper()
	var at [2]atomic.Int64
	var group sync.WaitGroup
	errs := make([]error, len(at))
	for thread := range at {
		group.Go(func() {
			defer at[thread].Store(int64(turns))
			if errs[thread] = stayOnCPU(thread); errs[thread] != nil {
				return
			}
			for turn := range turns {
				at[thread].Store(int64(turn))
				for spins := 0; at[1-thread].Load() < int64(turn); spins++ {
					if spins > 1000 {
						runtime.Gosched()
						_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
					}
				}
				if err := f(thread, turn); err != nil {
					errs[thread] = fmt.Errorf("turn %d: %w", turn, err)
					return
				}
			}
		})
	}
	group.Wait()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// stayOnCPU keeps the goroutine on the n-th of the CPUs that it may use, or the
// first again where there are less.
func stayOnCPU(n int) error {
	runtime.LockOSThread() // never unlocked: the thread dies with its affinity
	var allowed, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return fmt.Errorf("ask for the CPUs: %w", err)
	}
	n %= allowed.Count()
	for cpu := range len(allowed) * 64 {
		if !allowed.IsSet(cpu) {
			continue
		}
		if n == 0 {
			one.Set(cpu)
			break
		}
		n--
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return fmt.Errorf("stay on a CPU: %w", err)
	}
	return nil
}

// racer sends a packet with a port that changes with the turn. Ports of two
// packets differ as those of the originals do; nothing checks its checksum.
type racer struct {
	d     *datapath
	frame []byte
	at    int // of the remote's port
	out   []byte
}

func newRacer(d *datapath, p packet) *racer {
	return &racer{d: d, frame: p.frame(), at: ethernetLength + p.headerLength() + 2, out: make([]byte, 256)}
}

// send returns the packet's outside port.
func (r *racer) send(turn int) (uint16, error) {
	binary.BigEndian.PutUint16(r.frame[r.at:], uint16(turn))
	action, out, err := r.d.exec(egress, r.frame, r.out)
	if err == nil && action != actionPass {
		err = fmt.Errorf("action %#x", action)
	}
	return binary.BigEndian.Uint16(out[r.at-2:]), err
}

// raceTurns is how often two threads meet.
func raceTurns() int {
	if os.Getenv("LONG_TESTS") != "" {
		return 60000
	}
	return 3000
}

// Trap 13: two pods want the same outside tuple at the same time, 10^5 times in all, and
// 10^6 times in the long form: the NOEXIST insert decides.
func TestRaceForOneTuple(t *testing.T) {
	const turns = 50000 // each with another port of the remote
	rounds := 1
	if os.Getenv("LONG_TESTS") != "" {
		rounds = 10
	}
	for _, h := range families {
		for round := range rounds {
			t.Run(fmt.Sprintf("%v/%d", h, round), func(t *testing.T) { raceForOneTuple(t, h, turns) })
		}
	}
}

func raceForOneTuple(t *testing.T, h hosts, turns int) {
	t.Helper()
	d := load(t, config{flows: 4 * uint32(turns)})
	racers := []*racer{
		newRacer(d, udp(h.pod, 40000, h.remote, 0)), newRacer(d, udp(h.podB, 40000, h.remote, 0)),
	}
	ports := [2][]uint16{make([]uint16, turns), make([]uint16, turns)}
	pinned(t, turns, func(thread, turn int) (err error) {
		ports[thread][turn], err = racers[thread].send(turn)
		return err
	})
	moved := [2]int{}
	for turn := range turns {
		if ports[0][turn] == ports[1][turn] {
			t.Errorf("turn %d: both pods got port %d", turn, ports[0][turn])
		}
		for pod := range moved {
			if ports[pod][turn] != 40000 {
				moved[pod]++
			}
		}
	}
	t.Logf("moved: %d of the first pod, %d of the second", moved[0], moved[1])
	if flows := d.checkPairs(); len(flows) != 2*turns {
		t.Errorf("%d flows, want %d", len(flows), 2*turns)
	}
}

// Trap 14: a flow has two first packets, and one translation.
func TestRaceToOpenOneFlow(t *testing.T) {
	turns := raceTurns()
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d := load(t, config{flows: 2 * uint32(turns), randomFully: true})
			racers := []*racer{
				newRacer(d, udp(h.pod, 40000, h.remote, 0)), newRacer(d, udp(h.pod, 40000, h.remote, 0)),
			}
			ports := [2][]uint16{make([]uint16, turns), make([]uint16, turns)}
			pinned(t, turns, func(thread, turn int) (err error) {
				ports[thread][turn], err = racers[thread].send(turn)
				return err
			})
			for turn := range turns {
				if ports[0][turn] != ports[1][turn] {
					t.Errorf("turn %d: ports %d and %d of one flow", turn, ports[0][turn], ports[1][turn])
				}
			}
			if flows := d.checkPairs(); len(flows) != turns {
				t.Errorf("%d flows, want %d", len(flows), turns)
			}
		})
	}
}

// Trap 51: while one thread ends all flows, the other goes on sending on them.
func TestRaceWithTheSweep(t *testing.T) {
	turns := raceTurns()
	const flows = 32
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d := load(t, config{flows: 1024}, sweepPrograms...)
			sender := newRacer(d, udp(h.pod, 40000, h.remote, 0))
			name := MasqProgSweepV4
			if h.v6 {
				name = MasqProgSweepV6
			}
			request, err := binary.Append(nil, binary.NativeEndian, &MasqSweepRequest{Mode: uint16(sweepAll), Count: flows})
			if err != nil {
				t.Fatal(err)
			}
			for n := range uint16(flows) {
				key, err := binary.Append(nil, binary.NativeEndian, udp(h.pod, 40000, h.remote, n).tuple().key())
				if err != nil {
					t.Fatal(err)
				}
				request = append(request, key...)
			}
			drops, ended := 0, 0
			pinned(t, turns, func(thread, turn int) error {
				if thread == 0 {
					count, err := d.coll.Programs[name].Run(&ebpf.RunOptions{Data: request})
					ended += int(count)
					return err
				}
				for n := range 4 {
					binary.BigEndian.PutUint16(sender.frame[sender.at:], uint16((4*turn+n)%flows))
					action, _, err := d.exec(egress, sender.frame, sender.out)
					if err != nil {
						return err
					}
					if action == actionDrop {
						drops++
					}
				}
				return nil
			})
			t.Logf("ended %d flows, dropped %d of %d packets", ended, drops, 4*turns)
			if left := d.checkPairs(); len(left) > flows {
				t.Errorf("%d flows left of %d", len(left), flows)
			}
			if drops > turns/10 {
				t.Errorf("%d packets dropped", drops)
			}
		})
	}
}

// Two pods open and reset connections through the only port there is, and take
// it over from each other.
func TestRaceToTakeOver(t *testing.T) {
	turns := raceTurns()
	for _, h := range families {
		t.Run(h.String(), func(t *testing.T) {
			d := load(t, config{ports: onlyPorts(50000, 50000)})
			var racers [2][2]*racer // by pod: one that opens, one that resets
			for pod, src := range []netip.Addr{h.pod, h.podB} {
				for i, flags := range []string{"S", "R"} {
					racers[pod][i] = newRacer(d, tcp(src, 40000, h.remote, 0, flags))
				}
			}
			won := [2]int{}
			pinned(t, turns, func(thread, turn int) error {
				for i, r := range racers[thread] {
					binary.BigEndian.PutUint32(r.frame[r.at+2:], uint32(2*turn+i)<<4)
					binary.BigEndian.PutUint16(r.frame[r.at:], uint16(turn%2))
					action, _, err := d.exec(egress, r.frame, r.out)
					if err != nil {
						return err
					}
					if i == 0 && action == actionPass {
						won[thread]++
					}
				}
				return nil
			})
			t.Logf("opened: %d by the first pod, %d by the second", won[0], won[1])
			if won[0] == 0 || won[1] == 0 {
				t.Error("a pod never got the port")
			}
			if flows := d.checkPairs(); len(flows) > 2 {
				t.Errorf("%d flows on one port to two remotes", len(flows))
			}
		})
	}
}
