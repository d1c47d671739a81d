// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	gomaps "maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/api"
)

// fastPath is the way past the stack (bpf/fastpath.h), with or without which a
// datapath runs. Its programs at pods' links are the last of their chains.
type fastPath struct {
	config *ebpf.Map
	links  *ebpf.Map // from which flows come, as the datapath tells

	// Datapath.mu guards these.
	program    *ebpf.Program
	hooks      map[int]*podLink // by interface index
	left       bool             // what an agent before us had attached is detached
	trackedTCP bool             // as conntrack is set

	mu      sync.Mutex // of config: read, change, write
	watcher *pathWatcher
}

// podLink is a link with the program.
type podLink struct {
	*hook
	name string
}

// fromPods is where packets come from pods.
func fromPods() direction {
	return direction{program: bpf.MasqProgMasqFastPath, suffix: "fast", tcx: ebpf.AttachTCXIngress}
}

// newFastPath has no packet take the fast path until all programs are of this
// process. What programs of one before it know of ways is nothing to its own.
func newFastPath(m *maps, changed chan<- struct{}, opts Options) (*fastPath, error) {
	f := &fastPath{config: m.FastPath, links: m.PodLinks, hooks: make(map[int]*podLink)}
	if err := f.turnOff(); err != nil {
		return nil, err
	}
	if !opts.FastPath {
		return f, nil
	}
	if err := f.expectAttached(opts.PinPath); err != nil {
		return nil, err
	}
	var err error
	f.watcher, err = startPathWatcher(f, changed, opts.Log)
	return f, err
}

// missingForFastPath names what the kernel or the rights lack for it.
func (d *Datapath) missingForFastPath() (missing []string) {
	if !d.opts.FastPath {
		return nil
	}
	_, err := link.QueryPrograms(link.QueryOptions{Target: 1, Attach: ebpf.AttachTCXIngress}) // any link
	if d.opts.noTCX || errors.Is(err, ebpf.ErrNotSupported) {
		missing = append(missing, "--fast-path: TC programs by TCX link (Linux 6.6); run without the flag")
	}
	if !d.features.CTInfo {
		missing = append(missing,
			"--fast-path: reading the conntrack state of packets (Linux 6.2, and the capability PERFMON); run without the flag")
	}
	return missing
}

// change rewrites what the programs of both sides share. Ways that were learnt
// before are not taken any more.
func (f *fastPath) change(edit func(*bpf.MasqFastPathConfig) error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var value bpf.MasqFastPathConfig
	if err := f.config.Lookup(uint32(0), &value); err != nil {
		return fmt.Errorf("read fast path: %w", err)
	}
	for value.Token&0xffffffff == 0 { // a frame without token has 0 there
		value.Token = rand.Uint64()
	}
	value.Generation++
	if err := edit(&value); err != nil {
		return err
	}
	if err := f.config.Put(uint32(0), value); err != nil {
		return fmt.Errorf("write fast path: %w", err)
	}
	return nil
}

// turnOff has no packet take the fast path.
func (f *fastPath) turnOff() error {
	return f.change(func(value *bpf.MasqFastPathConfig) error {
		value.Flags = 0
		return nil
	})
}

// turnOn has packets take the fast path, those of TCP connections that conntrack
// sees only if it does not mind gaps. Routes are asked for their MTUs while
// events about them wait: limit comes after.
func (f *fastPath) turnOn(trackedTCP bool) error {
	return f.change(func(value *bpf.MasqFastPathConfig) (err error) {
		value.Flags = uint32(bpf.MasqFastPathFlagFAST_PATH_ON)
		if trackedTCP {
			value.Flags |= uint32(bpf.MasqFastPathFlagFAST_PATH_TRACKED_TCP)
		}
		value.Mtu, err = leastRouteMTU()
		return err
	})
}

// forget has all flows learn their ways again.
func (f *fastPath) forget() error {
	return f.change(func(*bpf.MasqFastPathConfig) error { return nil })
}

// limit has longer packets than a route's MTU go by the stack.
func (f *fastPath) limit(mtu uint32) error {
	return f.change(func(value *bpf.MasqFastPathConfig) error {
		value.Mtu = lesserMTU(value.Mtu, mtu)
		return nil
	})
}

// isLiberal reports whether conntrack minds no gaps in TCP connections. Where
// it does not run nobody asks.
func isLiberal() bool {
	text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")
	return err == nil && strings.TrimSpace(string(text)) != "0"
}

// warnings are what keeps packets off it.
func (f *fastPath) warnings() []string {
	if f.trackedTCP || !isTracking() {
		return nil
	}
	return []string{"--fast-path: TCP connections that conntrack sees do not take it, since it would call what comes after a gap invalid: " +
		"set the sysctl net.netfilter.nf_conntrack_tcp_be_liberal=1"}
}

// syncFastPath has the programs run at the links from which flows come, and
// lets packets take the fast path then.
func (d *Datapath) syncFastPath() error {
	f := d.fast
	if !d.opts.FastPath {
		if f.left {
			return nil
		}
		err := detachPodLinks(d.opts.PinPath)
		f.left = err == nil
		return err
	}
	if f.program == nil {
		programs, err := loadPrograms(d.spec, d.maps, d.constants(0), bpf.MasqProgMasqFastPath)
		if err != nil {
			return err
		}
		f.program = programs[bpf.MasqProgMasqFastPath]
	}
	announced, err := f.announced()
	if err != nil {
		return err
	}
	var errs []error
	for _, index := range announced {
		if err := d.syncPodLink(index); err != nil {
			errs = append(errs, fmt.Errorf("fast path at link %d: %w", index, err))
		}
	}
	f.watcher.known.Store(&announced)
	f.trackedTCP = isLiberal()
	return errors.Join(append(errs, f.turnOn(f.trackedTCP))...)
}

// announced are the links that flows come from, in ascending order.
func (f *fastPath) announced() (all []int, err error) {
	err = scan(f.links, func(index *uint32, _ *uint64) { all = append(all, int(*index)) })
	slices.Sort(all)
	return all, err
}

// expectAttached has the next Sync look at the links where an agent before us
// had its programs, too.
func (f *fastPath) expectAttached(pinPath string) error {
	for index := range podLinkPins(pinPath) {
		if err := f.links.Put(uint32(index), uint64(0)); err != nil {
			return fmt.Errorf("note link %d: %w", index, err)
		}
	}
	return nil
}

// syncPodLink has the program run at one link, if that can be and it is still
// there.
func (d *Datapath) syncPodLink(index int) error {
	l, err := netlink.LinkByIndex(index)
	if _, gone := errors.AsType[netlink.LinkNotFoundError](err); gone {
		return d.leavePodLink(index)
	}
	if err != nil {
		return err
	}
	if d.uplinks[index] != nil || l.Attrs().EncapType != "ether" {
		return nil
	}
	dir, known := fromPods(), d.fast.hooks[index]
	if known != nil {
		known.name = l.Attrs().Name
		at, err := known.place(index, dir)
		if err != nil {
			return err
		}
		if at != placeGone {
			return d.keepPin(linkPin(d.opts.PinPath, index, dir), known.tcx)
		}
		d.repaired(fmt.Sprintf("program %s on %s", dir.program, known.name))
		if err := known.close(); err != nil {
			return err
		}
	}
	h, err := attachTCX(d.opts.PinPath, index, d.fast.program, dir, link.Tail())
	if errors.Is(err, unix.ENODEV) {
		return nil // it has just gone
	}
	if err != nil {
		return err
	}
	d.fast.hooks[index] = &podLink{hook: h, name: l.Attrs().Name}
	if known == nil {
		d.log.Info("fast path from a link", "interface", l.Attrs().Name)
	}
	return nil
}

// leavePodLink forgets a link that is gone.
func (d *Datapath) leavePodLink(index int) error {
	var errs []error
	if h := d.fast.hooks[index]; h != nil {
		delete(d.fast.hooks, index)
		errs = append(errs, h.close())
	}
	errs = append(errs, detachTCX(linkPin(d.opts.PinPath, index, fromPods())))
	if err := d.fast.links.Delete(uint32(index)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// podLinkPins gives the pins of programs at pods' links, by interface index.
func podLinkPins(pinPath string) map[int]string {
	found := make(map[int]string)
	all, _ := filepath.Glob(filepath.Join(pinPath, linksDir, "*_"+fromPods().suffix))
	for _, pin := range all {
		text, _, _ := strings.Cut(filepath.Base(pin), "_")
		if index, err := strconv.Atoi(text); err == nil {
			found[index] = pin
		}
	}
	return found
}

// detachPodLinks takes the program from the links of pods.
func detachPodLinks(pinPath string) error {
	var errs []error
	for _, pin := range podLinkPins(pinPath) {
		errs = append(errs, detachTCX(pin))
	}
	return errors.Join(errs...)
}

func (f *fastPath) close() error {
	if f.watcher != nil {
		f.watcher.stop()
	}
	var errs []error
	for _, h := range f.hooks {
		errs = append(errs, h.close())
	}
	if f.program != nil {
		errs = append(errs, f.program.Close())
	}
	return errors.Join(errs...)
}

// status is what people see of it.
func (f *fastPath) status(enabled bool, counted counters) (api.FastPath, error) {
	status := api.FastPath{Enabled: enabled}
	for _, index := range slices.Sorted(gomaps.Keys(f.hooks)) {
		status.Interfaces = append(status.Interfaces, f.hooks[index].name)
	}
	var err error
	status.Packets, err = counted.fast()
	return status, err
}
