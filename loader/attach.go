// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
)

// direction is one of a link's two hooks.
type direction struct {
	program string // its name in the object, and of the filter
	suffix  string // of its pin
	tcx     ebpf.AttachType
	parent  uint32 // of the filter
	handle  uint32 // of the filter
}

// directions has ingress first: replies must find their way back before the
// first packet is translated.
func directions() []direction {
	return []direction{
		{bpf.MasqProgMasqIngress, "ingress", ebpf.AttachTCXIngress, netlink.HANDLE_MIN_INGRESS, filterHandle},
		{bpf.MasqProgMasqEgress, "egress", ebpf.AttachTCXEgress, netlink.HANDLE_MIN_EGRESS, filterHandle},
	}
}

// secondIngress is where a second ingress program runs while programs are
// replaced by such that have other maps: see attachAll.
func secondIngress() direction {
	second := directions()[0]
	second.suffix += nextSuffix
	second.handle++
	return second
}

// hook is an attached program: by a TCX link, or by a filter, which needs no
// handle.
type hook struct {
	tcx link.Link
}

func (h *hook) kind() string {
	if h.tcx != nil {
		return "tcx"
	}
	return "tc"
}

func (h *hook) close() error {
	if h.tcx == nil {
		return nil
	}
	return h.tcx.Close()
}

// attachTo loads the programs for a link and makes them run there, in place of
// those of an agent before us.
func (d *Datapath) attachTo(u *uplink) error {
	var err error
	if u.programs, err = d.load(u); err != nil {
		return err
	}
	begin := monotonic()
	if err := d.takeOver(d.maps.replaced); err != nil { // what came while the programs were loaded
		return err
	}
	takenOver := d.goOnTakingOver(begin)
	err = d.attachAll(u, func() error {
		begin := monotonic()
		err := takenOver()
		takenOver = d.goOnTakingOver(begin)
		return err
	})
	return errors.Join(err, takenOver())
}

// attachAll replaces the programs of a link, or attaches the first ones.
//
// Programs that have the flows in other maps than those of before cannot be
// replaced one by one: after the first step, replies would come to a program that
// does not know their flows, for good if the agent is killed there. So both
// ingress programs run until the egress program is replaced, and takeAll has
// copied what it opened last.
func (d *Datapath) attachAll(u *uplink, takeAll func() error) error {
	order, second := directions(), secondIngress()
	apart := len(d.maps.before) > 0 || isAttached(d.opts.PinPath, u.Index, second)
	if apart {
		if err := d.attachTwin(u, second); err != nil {
			return fmt.Errorf("attach a second %s: %w", second.program, err)
		}
		slices.Reverse(order)
	}
	for _, dir := range order {
		h, err := d.attach(u, dir)
		if err != nil {
			return fmt.Errorf("attach %s: %w", dir.program, err)
		}
		u.hooks = append(u.hooks, h)
		if apart && dir.program == bpf.MasqProgMasqEgress {
			if err := takeAll(); err != nil {
				return err
			}
		}
	}
	if !apart {
		return nil
	}
	slices.Reverse(u.hooks)
	return detachOne(d.opts.PinPath, u.Index, second)
}

// attachTwin attaches another program of the same kind as the link is to have: a
// chain takes none twice.
func (d *Datapath) attachTwin(u *uplink, dir direction) error {
	programs, err := loadPrograms(d.spec, d.maps, d.constants(u.slot), dir.program)
	if err != nil {
		return err
	}
	twin := &uplink{Uplink: u.Uplink, slot: u.slot, value: u.value, programs: programs}
	h, err := d.attach(twin, dir)
	u.value = twin.value // it may tell of a qdisc
	if err == nil {
		twin.hooks = append(twin.hooks, h)
	}
	return errors.Join(err, twin.close())
}

// isAttached reports whether a program has a pin or a filter there.
func isAttached(pinPath string, ifindex int, dir direction) bool {
	if _, err := os.Lstat(linkPin(pinPath, ifindex, dir)); err == nil {
		return true
	}
	at, err := filterPlace(ifindex, dir)
	return err == nil && at != placeGone
}

// load loads the programs of a link.
func (d *Datapath) load(u *uplink) (map[string]*ebpf.Program, error) {
	var names []string
	for _, dir := range directions() {
		names = append(names, dir.program)
	}
	return loadPrograms(d.spec, d.maps, d.constants(u.slot), names...)
}

// replacePrograms has a link run programs of today's constants in place of those
// that it has.
func (d *Datapath) replacePrograms(u *uplink) error {
	programs, err := d.load(u)
	if err != nil {
		return err
	}
	before := u.programs
	u.programs = programs
	for i, dir := range directions() {
		if tcx := u.hooks[i].tcx; tcx != nil {
			err = tcx.Update(programs[dir.program])
		} else {
			_, err = d.attachFilter(u, dir)
		}
		if err != nil {
			return fmt.Errorf("replace %s: %w", dir.program, err)
		}
		if err := before[dir.program].Close(); err != nil {
			return err
		}
	}
	return nil
}

// attach makes a loaded program run, by TCX where the kernel has it.
func (d *Datapath) attach(u *uplink, dir direction) (*hook, error) {
	if !d.opts.noTCX {
		h, err := attachTCX(d.opts.PinPath, u.Index, u.programs[dir.program], dir, link.Head())
		if !errors.Is(err, ebpf.ErrNotSupported) {
			return h, err
		}
	}
	return d.attachFilter(u, dir)
}

func linkPin(pinPath string, ifindex int, dir direction) string {
	return filepath.Join(pinPath, linksDir, fmt.Sprintf("%d_%s", ifindex, dir.suffix))
}

// attachTCX puts the program at a place in the link's chain. On uplinks that is
// the head: a program before ours that ends the chain would make pod addresses
// leak and replies get lost. ErrNotSupported: the kernel has no TCX.
func attachTCX(pinPath string, ifindex int, program *ebpf.Program, dir direction, at link.Anchor) (*hook, error) {
	pin := linkPin(pinPath, ifindex, dir)
	if updated, err := updateTCX(pin, ifindex, program); err != nil || updated != nil {
		return updated, err
	}
	attached, err := link.AttachTCX(link.TCXOptions{
		Interface: ifindex, Program: program, Attach: dir.tcx, Anchor: at,
	})
	if err != nil {
		return nil, err
	}
	if err := attached.Pin(pin); err != nil {
		return nil, errors.Join(fmt.Errorf("pin: %w", err), attached.Close())
	}
	return &hook{tcx: attached}, nil
}

// updateTCX replaces the program of a pinned link, so that not one packet goes
// without. It returns nil if there is no link, or one of a device that is gone.
func updateTCX(pin string, ifindex int, program *ebpf.Program) (*hook, error) {
	pinned, err := openPinnedLink(pin)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open pinned link: %w", err)
	}
	info, err := pinned.Info()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("look at pinned link: %w", err), pinned.Close())
	}
	if tcx := info.TCX(); tcx == nil || int(tcx.Ifindex) != ifindex {
		return nil, errors.Join(pinned.Unpin(), pinned.Close())
	}
	if err := pinned.Update(program); err != nil {
		return nil, errors.Join(fmt.Errorf("replace program: %w", err), pinned.Close())
	}
	return &hook{tcx: pinned}, nil
}

// filterHandle marks our filters together with their names.
const filterHandle = 0x6d617371 // "masq"

// lastPriority is how far attachFilter goes where others have the first ones.
const lastPriority = 16

// attachFilter is for kernels before TCX (6.6): a filter on the clsact qdisc,
// replaced in place. It has the first preference, or the first that nobody has
// for filters of another kind or protocol, which the kernel does not mix.
func (d *Datapath) attachFilter(u *uplink, dir direction) (*hook, error) {
	if err := d.ensureClsact(u); err != nil {
		return nil, err
	}
	var err error
	for priority := uint16(1); priority <= lastPriority; priority++ {
		err = netlink.FilterReplace(filter(u.Index, dir, u.programs[dir.program].FD(), priority))
		if err == nil {
			return &hook{}, removeFilters(u.Index, dir, func(p uint16) bool { return p != priority })
		}
		if !errors.Is(err, unix.EINVAL) {
			break
		}
	}
	return nil, fmt.Errorf("replace filter: %w", err)
}

func filter(ifindex int, dir direction, fd int, priority uint16) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: dir.parent, Handle: dir.handle,
			Protocol: unix.ETH_P_ALL, Priority: priority,
		},
		Fd: fd, Name: dir.program, DirectAction: true,
	}
}

// ensureClsact adds the qdisc if the link has none. It is noted as ours before:
// of a kill in between, cleanup has to find more in its notes than on the link.
func (d *Datapath) ensureClsact(u *uplink) error {
	if there, err := hasClsact(u); err != nil || there {
		return err
	}
	u.value.Flags |= uint8(bpf.MasqUplinkFlagUPLINK_QDISC)
	if _, err := d.writeUplink(u); err != nil {
		return err
	}
	err := netlink.QdiscAdd(clsact(u.Index))
	if errors.Is(err, unix.EEXIST) { // somebody else was faster
		u.value.Flags &^= uint8(bpf.MasqUplinkFlagUPLINK_QDISC)
		_, err := d.writeUplink(u)
		return err
	}
	if err != nil {
		return fmt.Errorf("add clsact qdisc: %w", err)
	}
	return nil
}

func hasClsact(u *uplink) (bool, error) {
	qdiscs, err := netlink.QdiscList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: u.Index}})
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return false, fmt.Errorf("list qdiscs: %w", err)
	}
	return slices.ContainsFunc(qdiscs, func(q netlink.Qdisc) bool { return q.Attrs().Parent == netlink.HANDLE_CLSACT }), nil
}

func clsact(ifindex int) *netlink.GenericQdisc {
	return &netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: ifindex, Parent: netlink.HANDLE_CLSACT,
			Handle: netlink.MakeHandle(0xffff, 0),
		},
		QdiscType: "clsact",
	}
}

// detach takes our programs from a link, egress first: nothing may be
// translated whose reply would not find its way back.
func detach(pinPath string, value bpf.MasqUplink) error {
	ifindex := int(value.Ifindex)
	for _, dir := range slices.Backward(append([]direction{secondIngress()}, directions()...)) {
		if err := detachOne(pinPath, ifindex, dir); err != nil {
			return err
		}
	}
	if value.Flags&uint8(bpf.MasqUplinkFlagUPLINK_QDISC) == 0 {
		return nil
	}
	return removeClsact(ifindex)
}

func detachOne(pinPath string, ifindex int, dir direction) error {
	if err := detachTCX(linkPin(pinPath, ifindex, dir)); err != nil {
		return fmt.Errorf("detach %s: %w", dir.program, err)
	}
	return removeFilters(ifindex, dir, func(uint16) bool { return true })
}

// detachTCX detaches a pinned link, if there is one, and removes the pin. The
// kernel would detach it some time after its last pin is gone; this waits.
func detachTCX(pin string) error {
	pinned, err := openPinnedLink(pin)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil { // no link, or none that we may open
		return os.Remove(pin)
	}
	if err := pinned.Detach(); err != nil && !errors.Is(err, ebpf.ErrNotSupported) && !errors.Is(err, unix.ENOLINK) {
		return errors.Join(err, pinned.Close())
	}
	return errors.Join(pinned.Unpin(), pinned.Close())
}

// listFilters gives a direction's filters in the order in which they run, none
// if the link or the qdisc is not there.
func listFilters(ifindex int, dir direction) ([]netlink.Filter, error) {
	filters, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}, dir.parent)
	if err != nil && !isGone(err) {
		return nil, fmt.Errorf("list filters: %w", err)
	}
	return filters, nil
}

// removeFilters deletes our filters of the chosen priorities from a link.
func removeFilters(ifindex int, dir direction, choose func(priority uint16) bool) error {
	filters, err := listFilters(ifindex, dir)
	if err != nil {
		return err
	}
	for _, f := range filters {
		if !isOurs(f, dir) || !choose(f.Attrs().Priority) {
			continue
		}
		if err := netlink.FilterDel(f); err != nil && !isGone(err) {
			return fmt.Errorf("delete filter %s: %w", dir.program, err)
		}
	}
	return nil
}

// removeClsact deletes the qdisc that we made, unless somebody uses it too.
func removeClsact(ifindex int) error {
	for _, dir := range directions() {
		filters, err := listFilters(ifindex, dir)
		if err != nil || len(filters) > 0 {
			return err
		}
	}
	if err := netlink.QdiscDel(clsact(ifindex)); err != nil && !isGone(err) {
		return fmt.Errorf("delete clsact qdisc: %w", err)
	}
	return nil
}

// isGone reports whether the link or the qdisc is not there any more.
func isGone(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL)
}
