// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	gomaps "maps"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/route"
)

// uplink is a link that the datapath serves.
type uplink struct {
	route.Uplink
	slot     uint32
	value    bpf.MasqUplink
	hooks    []*hook
	programs map[string]*ebpf.Program
}

func (u *uplink) close() error {
	var errs []error
	for _, h := range u.hooks {
		errs = append(errs, h.close())
	}
	for _, p := range u.programs {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}

// attach is how the programs hang on the link: "tcx" or "tc".
func (u *uplink) attach() string {
	for _, h := range u.hooks {
		return h.kind()
	}
	return ""
}

// syncUplinks serves the network's uplinks and no others.
func (d *Datapath) syncUplinks(network *route.Snapshot) error {
	slots, err := d.readSlots()
	if err != nil {
		return err
	}
	if err := d.syncAddressRules(network); err != nil {
		return err
	}
	before := d.ahead
	d.ahead = nil
	defer func() { d.logAhead(before) }()
	errs := []error{d.leaveGone(network, slots)}
	for _, u := range network.Uplinks {
		if err := d.serve(u, slots); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", u.Name, err))
		}
	}
	return errors.Join(errs...)
}

// logAhead logs which programs of others came before ours since the last look,
// and which are not there any more.
func (d *Datapath) logAhead(before []string) {
	for _, warning := range d.ahead {
		if !slices.Contains(before, warning) {
			d.log.Warn("not the first program", "warning", warning)
		}
	}
	for _, warning := range before {
		if !slices.Contains(d.ahead, warning) {
			d.log.Info("not the first program: no longer so", "warning", warning)
		}
	}
}

// readSlots reads which link each slot is for; those of an agent before us
// count.
func (d *Datapath) readSlots() (map[int]bpf.MasqUplink, error) {
	slots := make(map[int]bpf.MasqUplink)
	err := readSlots(d.maps.Uplinks, func(slot uint32, value bpf.MasqUplink) { slots[int(slot)] = value })
	return slots, err
}

// leaveGone takes the programs from links that are not to be served any more,
// or are gone, and frees their slots.
func (d *Datapath) leaveGone(network *route.Snapshot, slots map[int]bpf.MasqUplink) error {
	var errs []error
	for slot, value := range slots {
		if network.Uplink(int(value.Ifindex)) != nil {
			continue
		}
		if err := d.leave(uint32(slot), value); err != nil {
			errs = append(errs, err)
			continue
		}
		delete(slots, slot)
	}
	return errors.Join(errs...)
}

func (d *Datapath) leave(slot uint32, value bpf.MasqUplink) error {
	index := int(value.Ifindex)
	if u := d.uplinks[index]; u != nil {
		delete(d.uplinks, index)
		if err := u.close(); err != nil {
			return err
		}
		d.log.Info("uplink left", "interface", u.Name)
	}
	if err := detach(d.opts.PinPath, value); err != nil {
		return err
	}
	if err := d.maps.Uplinks.Put(slot, bpf.MasqUplink{}); err != nil {
		return fmt.Errorf("free uplink slot %d: %w", slot, err)
	}
	return nil
}

// serve makes the programs run on a link, with what the datapath must know of
// it in place first.
func (d *Datapath) serve(link route.Uplink, slots map[int]bpf.MasqUplink) error {
	if err := Readable(link); err != nil {
		return err
	}
	u := d.uplinks[link.Index]
	if u != nil {
		d.logAddress("snat_v4", link, anyAddress(u.V4), anyAddress(link.V4))
		d.logAddress("snat_v6", link, anyAddress(u.V6), anyAddress(link.V6))
		u.Uplink = link
		warnings, err := d.keepAttached(u)
		d.ahead = append(d.ahead, warnings...)
		edited, writeErr := d.writeUplink(u)
		if edited {
			d.repaired("uplink " + link.Name)
		}
		return errors.Join(err, writeErr)
	}
	slot, kept, err := findSlot(link.Index, slots, d.maps.Uplinks.MaxEntries())
	if err != nil {
		return err
	}
	u = &uplink{Uplink: link, slot: slot, value: kept}
	if _, err := d.writeUplink(u); err != nil {
		return err
	}
	slots[int(slot)] = u.value
	err = d.attachTo(u)
	if errors.Is(err, unix.ENODEV) {
		return u.close() // the link has gone, as the next snapshot will tell
	}
	if err != nil {
		return errors.Join(err, u.close())
	}
	d.uplinks[link.Index] = u
	d.log.Info("uplink served", "interface", link.Name, "attach", u.attach(),
		"snat_v4", anyAddress(link.V4).String(), "snat_v6", anyAddress(link.V6).String())
	return nil
}

func (d *Datapath) logAddress(which string, link route.Uplink, before, now netip.Addr) {
	if before != now {
		d.log.Info("uplink's address changed", "interface", link.Name, which, now.String(), "before", before.String())
	}
}

// findSlot gives the slot that a link has, or a free one.
func findSlot(index int, slots map[int]bpf.MasqUplink, count uint32) (uint32, bpf.MasqUplink, error) {
	for slot, value := range slots {
		if int(value.Ifindex) == index {
			return uint32(slot), value, nil
		}
	}
	for slot := range int(count) {
		if _, used := slots[slot]; !used {
			return uint32(slot), bpf.MasqUplink{}, nil
		}
	}
	return 0, bpf.MasqUplink{}, fmt.Errorf("all %d uplinks are in use; name the ones to serve with --interfaces", count)
}

// writeUplink writes the link's slot, if it differs from what is there, and
// reports whether that is not what was written last.
func (d *Datapath) writeUplink(u *uplink) (edited bool, err error) {
	want := uplinkValue(u.Uplink)
	want.Flags |= u.value.Flags & uint8(bpf.MasqUplinkFlagUPLINK_QDISC)
	if d.ending6 {
		want.Flags |= uint8(bpf.MasqUplinkFlagUPLINK_CLOSED_V6)
	}
	var have bpf.MasqUplink
	if err := d.maps.Uplinks.Lookup(u.slot, &have); err != nil {
		return false, fmt.Errorf("read uplink: %w", err)
	}
	edited = have != u.value
	u.value = want
	if have == want {
		return edited, nil
	}
	if err := d.maps.Uplinks.Put(u.slot, want); err != nil {
		return edited, fmt.Errorf("write uplink: %w", err)
	}
	return edited, nil
}

func uplinkValue(link route.Uplink) bpf.MasqUplink {
	value := bpf.MasqUplink{Ifindex: uint32(link.Index), L2Len: uint8(link.HeaderLen)}
	if len(link.MAC) == len(value.Mac) {
		value.Flags |= uint8(bpf.MasqUplinkFlagUPLINK_ETHERNET)
		copy(value.Mac[:], link.MAC)
	}
	if link.Tagged {
		value.Flags |= uint8(bpf.MasqUplinkFlagUPLINK_TAGGED)
	}
	if a, ok := onlyAddress(link.V4); ok {
		value.Flags |= uint8(bpf.MasqUplinkFlagUPLINK_ONE_V4)
		value.AddrV4 = addr4(a)
	}
	if a, ok := onlyAddress(link.V6); ok {
		value.Flags |= uint8(bpf.MasqUplinkFlagUPLINK_ONE_V6)
		value.AddrV6 = addr6(a)
	}
	return value
}

// onlyAddress is the address that goes with every packet, if there is only one.
func onlyAddress(rules []route.AddressRule) (netip.Addr, bool) {
	if len(rules) == 0 || rules[len(rules)-1].Prefix.Bits() != 0 {
		return netip.Addr{}, false
	}
	only := rules[0].Address
	same := !slices.ContainsFunc(rules, func(r route.AddressRule) bool { return r.Address != only })
	return only, same
}

// anyAddress is the address that the longest way out gets: for people to see.
func anyAddress(rules []route.AddressRule) netip.Addr {
	if len(rules) == 0 {
		return netip.Addr{}
	}
	return rules[len(rules)-1].Address
}

// syncAddressRules writes which address goes with which next hop or
// destination, for the uplinks that have several.
func (d *Datapath) syncAddressRules(network *route.Snapshot) error {
	for _, f := range d.families {
		want := make(map[any]any)
		for _, u := range network.Uplinks {
			for _, r := range f.addressRules(u) {
				want[addressRuleKey(u.Index, r.Prefix)] = addressValue(r.Address)
			}
		}
		edited, err := f.syncAddresses(want)
		if err != nil {
			return fmt.Errorf("%s addresses: %w", f, err)
		}
		if edited {
			d.repaired(f.String() + " masquerade addresses")
		}
	}
	return nil
}

func (f *family) addressRules(u route.Uplink) []route.AddressRule {
	if f.is6 {
		return u.V6
	}
	return u.V4
}

func (f *family) syncAddresses(want map[any]any) (edited bool, err error) {
	if f.is6 {
		return syncMap[bpf.MasqAddressRuleV6, [4]uint32](f.addresses, want, &f.left.addresses)
	}
	return syncMap[bpf.MasqAddressRuleV4, uint32](f.addresses, want, &f.left.addresses)
}

// syncMap makes a map hold exactly want, whose keys and values are K and V.
// Additions come before deletions. It reports whether the map was not as left
// says, and changes that.
func syncMap[K, V comparable](m *ebpf.Map, want map[any]any, left *map[any]any) (edited bool, err error) {
	have := make(map[any]any)
	var key K
	var value V
	entries := m.Iterate()
	for entries.Next(&key, &value) {
		have[key] = value
	}
	if err := entries.Err(); err != nil {
		return false, fmt.Errorf("read: %w", err)
	}
	edited = *left != nil && !gomaps.Equal(have, *left)
	*left = nil // until all is written
	for k, v := range want {
		if have[k] == v {
			continue
		}
		if err := m.Put(k, v); err != nil {
			return edited, fmt.Errorf("write: %w", err)
		}
	}
	for k := range have {
		if _, ok := want[k]; ok {
			continue
		}
		if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return edited, fmt.Errorf("remove: %w", err)
		}
	}
	*left = want
	return edited, nil
}

// syncNodeAddresses writes which addresses are the node's, and which are
// broadcasts of its subnets.
func (d *Datapath) syncNodeAddresses(network *route.Snapshot) error {
	for _, f := range d.families {
		want := make(map[any]any)
		for _, a := range network.Broadcasts {
			if f.has(a) {
				want[addressValue(a)] = bpf.MasqNodeAddressNODE_ADDRESS_BROADCAST
			}
		}
		for _, a := range network.Addresses {
			if f.has(a) {
				want[addressValue(a)] = bpf.MasqNodeAddressNODE_ADDRESS_LOCAL
			}
		}
		edited, err := f.syncNode(want)
		if err != nil {
			return fmt.Errorf("%s: %w", f, err)
		}
		if edited {
			d.repaired(f.String() + " addresses of the node")
		}
	}
	return nil
}

func (f *family) syncNode(want map[any]any) (edited bool, err error) {
	if f.is6 {
		return syncMap[[4]uint32, bpf.MasqNodeAddress](f.node, want, &f.left.node)
	}
	return syncMap[uint32, bpf.MasqNodeAddress](f.node, want, &f.left.node)
}
