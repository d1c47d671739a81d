// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/lab"
	"ip-masq-agent/test/bench/report"
)

// ports are those that flows may have where allocations are made to fail.
const (
	ports     = 32768
	portsFlag = "--to-ports=32768-65535"
)

// failures offers flows towards one remote for some of the ports and gives
// the share in % that did not get one.
func (c *contender) failures(g *generator, load int) (float64, error) {
	r, flows := c.toMasqueraded(), uint64(ports*load/100)
	r.remotes = 1
	if err := g.aim(r, uint32(flows)); err != nil {
		return 0, err
	}
	b, err := g.send(r.at, flows, forever)
	if err != nil {
		return 0, err
	}
	if b.arrived.Kept+b.arrived.Other > 0 {
		return 0, fmt.Errorf("%s: packets came with a wrong source: %+v", c, b.arrived)
	}
	return 100 * float64(b.sent-b.arrived.Translated) / float64(b.sent), c.forget()
}

// flowBytes is what full tables of flows take, each flow's share of it, by the
// kernel's account.
func flowBytes(size uint32, names ...string) (float64, error) {
	spec, err := bpf.LoadMasq()
	if err != nil {
		return 0, err
	}
	var total uint64
	for _, name := range names {
		s := spec.Maps[name].Copy()
		s.Pinning, s.MaxEntries = ebpf.PinNone, size
		bytes, err := fullMapBytes(s)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", name, err)
		}
		total += bytes
	}
	return float64(total) / float64(size), nil
}

func fullMapBytes(spec *ebpf.MapSpec) (uint64, error) {
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return 0, err
	}
	defer m.Close()
	key, value := make([]byte, spec.KeySize), make([]byte, spec.ValueSize)
	for n := range spec.MaxEntries {
		binary.NativeEndian.PutUint32(key, n)
		if err := m.Put(key, value); err != nil {
			return 0, err
		}
	}
	info, err := m.Info()
	if err != nil {
		return 0, err
	}
	bytes, ok := info.Memlock()
	if !ok {
		return 0, errors.New("the kernel does not say how large the map is")
	}
	return bytes, nil
}

// idler is an agent with an empty table and the default config.
type idler struct {
	agent *lab.Agent
	begin time.Time
	spent time.Duration // of processors, at the beginning
}

func newIdler(tb testing.TB, datapath string) *idler {
	tb.Helper()
	l := lab.New(tb, lab.Options{Pods: -1, RoutedPods: 1})
	agent := lab.StartAgent(tb, l.Node, "--datapath="+datapath, "--config="+filepath.Join(tb.TempDir(), "none"))
	spent, err := processorTime(agent.PID())
	if err != nil {
		tb.Fatal(err)
	}
	return &idler{agent: agent, begin: time.Now(), spent: spent}
}

// use is the share of a processor in % since the beginning.
func (i *idler) use() (float64, error) {
	spent, err := processorTime(i.agent.PID())
	if err != nil {
		return 0, err
	}
	return 100 * (spent - i.spent).Seconds() / time.Since(i.begin).Seconds(), nil
}

// processorTime is what a process's threads have used.
func processorTime(pid int) (total time.Duration, err error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(threads) == 0 {
		return 0, fmt.Errorf("find threads of %d: %w", pid, err)
	}
	for _, path := range threads {
		text, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue // ended since
		}
		if err != nil {
			return 0, err
		}
		running, _, _ := strings.Cut(string(text), " ")
		n, err := strconv.ParseInt(running, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", path, err)
		}
		total += time.Duration(n)
	}
	return total, nil
}

// resident is a process's memory in MB.
func resident(pid int) (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if kilobytes, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(kilobytes), "kB")), 64)
			return n * 1024 / 1e6, err
		}
	}
	return 0, fmt.Errorf("no VmRSS in the status of process %d", pid)
}

// addIdlers says what idle agents take.
func addIdlers(results report.Results, idlers map[string]*idler) error {
	for name, i := range idlers {
		memory, memoryErr := resident(i.agent.PID())
		use, useErr := i.use()
		if err := errors.Join(memoryErr, useErr); err != nil {
			return err
		}
		results.Add(report.Key{Figure: report.Resident, Subject: name, Conntrack: name == report.Iptables}, memory)
		results.Add(report.Key{Figure: report.Idle, Subject: name, Conntrack: name == report.Iptables}, use)
	}
	return nil
}
