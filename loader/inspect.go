// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	gomaps "maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"

	"ip-masq-agent/bpf"
	"ip-masq-agent/internal/api"
)

// Inspect tells what the datapath does, for when no agent is there to ask: by
// its pins, which it leaves as they are. False: nothing is pinned under
// opts.PinPath, which is all that is used of opts. It must be called in the
// node's network namespace.
func Inspect(opts Options) (api.DatapathStatus, bool, error) {
	status := api.DatapathStatus{
		Backend:    api.Backend{Name: "ebpf", Reason: "pinned under " + opts.PinPath},
		Interfaces: []api.Interface{},
	}
	found, err := withPins(opts.PinPath, true, func(p *pins) error {
		status.Warnings = p.missing
		if err := p.interfaces(&status); err != nil {
			return err
		}
		if err := p.fastPath(&status.FastPath); err != nil {
			return err
		}
		var err error
		if status.NAT, err = countFlows(p.families); err != nil {
			return err
		}
		status.Drain.Active, err = p.drains()
		if status.Drain.Active {
			status.Drain.Entries = status.NAT.V4.Entries + status.NAT.V6.Entries
		}
		return err
	})
	return status, found, err
}

// InspectTranslations visits the live flows as Datapath.EachTranslation does, by
// the pins. False: nothing is pinned.
func InspectTranslations(opts Options, visit func(api.Translation)) (bool, error) {
	return withPins(opts.PinPath, true, func(p *pins) error {
		timeouts := p.maps[bpf.MasqMapTimeouts]
		if timeouts == nil {
			return nil
		}
		return eachTranslation(p.families, timeouts, visit)
	})
}

// pins are the pinned maps, opened.
type pins struct {
	path     string
	readOnly bool
	maps     map[string]*ebpf.Map
	families []*family // whose maps are there
	missing  []string  // warnings of maps that are not
}

// withPins opens the pins for the time of look, for reading or to be changed.
// False: nothing is pinned, or by the agent of another network namespace.
func withPins(path string, readOnly bool, look func(*pins) error) (found bool, err error) {
	p := &pins{path: path, readOnly: readOnly, maps: make(map[string]*ebpf.Map)}
	entries, err := os.ReadDir(path)
	if errors.Is(err, os.ErrNotExist) || err == nil && len(entries) == 0 {
		return false, nil
	}
	if err == nil {
		err = checkOwner(path)
	}
	if _, foreign := errors.AsType[*OwnerError](err); foreign {
		return false, nil
	}
	if err == nil {
		err = p.open()
	}
	if err == nil {
		err = look(p)
	}
	err = errors.Join(err, p.close())
	if errors.Is(err, os.ErrPermission) {
		err = fmt.Errorf("not permitted, it takes root with the capabilities BPF and NET_ADMIN (before Linux 5.8 SYS_ADMIN): %w", err)
	}
	if err != nil {
		return true, fmt.Errorf("look at pins: %w", err)
	}
	return true, nil
}

func (p *pins) open() error {
	for _, name := range []string{
		bpf.MasqMapUplinks, bpf.MasqMapTimeouts, bpf.MasqMapFlowsV4, bpf.MasqMapFlowsV6,
		bpf.MasqMapAddressesV4, bpf.MasqMapAddressesV6, bpf.MasqMapReverseV4, bpf.MasqMapReverseV6,
		bpf.MasqMapFastPath, bpf.MasqMapCounters,
	} {
		pin := filepath.Join(p.path, layout, name)
		m, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: p.readOnly})
		if errors.Is(err, os.ErrNotExist) {
			p.missing = append(p.missing, fmt.Sprintf("%s is missing: the state is not whole, an agent or cleanup mends it", pin))
			continue
		}
		if err != nil {
			return fmt.Errorf("open %s: %w", pin, err)
		}
		p.maps[name] = m
	}
	for _, f := range []*family{
		{flows: p.maps[bpf.MasqMapFlowsV4], reverse: p.maps[bpf.MasqMapReverseV4], addresses: p.maps[bpf.MasqMapAddressesV4]},
		{flows: p.maps[bpf.MasqMapFlowsV6], reverse: p.maps[bpf.MasqMapReverseV6], addresses: p.maps[bpf.MasqMapAddressesV6], is6: true},
	} {
		if f.flows != nil && f.reverse != nil && f.addresses != nil {
			p.families = append(p.families, f)
		}
	}
	return nil
}

// family is the part of one IP version, nil if it is not there.
func (p *pins) family(is6 bool) *family {
	i := slices.IndexFunc(p.families, func(f *family) bool { return f.is6 == is6 })
	if i < 0 || p.maps[bpf.MasqMapTimeouts] == nil {
		return nil
	}
	return p.families[i]
}

// drains reports whether the uplinks are served without opening flows, as Drain
// leaves them.
func (p *pins) drains() (bool, error) {
	uplinks := p.maps[bpf.MasqMapUplinks]
	if uplinks == nil {
		return false, nil
	}
	open, served := false, false
	err := readSlots(uplinks, func(_ uint32, value bpf.MasqUplink) {
		served = true
		open = open || value.Flags&closed != closed
	})
	return served && !open, err
}

func (p *pins) close() error {
	var errs []error
	for _, m := range p.maps {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// interfaces adds the links that the datapath serves.
func (p *pins) interfaces(status *api.DatapathStatus) error {
	served, err := servedLinks(p.path)
	if err != nil {
		return err
	}
	for _, index := range slices.Sorted(gomaps.Keys(served)) {
		l, err := net.InterfaceByIndex(index)
		if err != nil {
			status.Warnings = append(status.Warnings, fmt.Sprintf(
				"programs are pinned for an interface that is gone, number %d: an agent or cleanup takes them away", index))
			continue
		}
		shown := api.Interface{Name: l.Name}
		var warnings []string
		if shown.Attach, warnings, err = p.attach(l); err != nil {
			return fmt.Errorf("%s: %w", l.Name, err)
		}
		status.Warnings = append(status.Warnings, warnings...)
		if shown.SNATv4, shown.SNATv6, err = p.addresses(served[index]); err != nil {
			return fmt.Errorf("%s: %w", l.Name, err)
		}
		if !shown.SNATv4.IsValid() {
			status.Warnings = append(status.Warnings, noAddressWarning(l.Name, &family{}))
		}
		status.Interfaces = append(status.Interfaces, shown)
	}
	return nil
}

// fastPath tells whether packets take it, and how many did.
func (p *pins) fastPath(status *api.FastPath) error {
	config, counts := p.maps[bpf.MasqMapFastPath], p.maps[bpf.MasqMapCounters]
	if config == nil || counts == nil {
		return nil
	}
	var value bpf.MasqFastPathConfig
	if err := config.Lookup(uint32(0), &value); err != nil {
		return fmt.Errorf("read fast path: %w", err)
	}
	status.Enabled = value.Flags&uint32(bpf.MasqFastPathFlagFAST_PATH_ON) != 0
	for _, index := range slices.Sorted(gomaps.Keys(podLinkPins(p.path))) {
		if l, err := net.InterfaceByIndex(index); err == nil {
			status.Interfaces = append(status.Interfaces, l.Name)
		}
	}
	var err error
	status.Packets, err = counters{counts}.fast()
	return err
}

// attach is how the programs hang on a link, empty if one of them does not.
func (p *pins) attach(l *net.Interface) (kind string, warnings []string, err error) {
	for _, dir := range directions() {
		h, err := pinnedHook(linkPin(p.path, l.Index, dir))
		if err != nil {
			return "", nil, err
		}
		at, err := h.place(l.Index, dir)
		if err := errors.Join(err, h.close()); err != nil {
			return "", nil, err
		}
		switch at {
		case placeGone:
			return "", append(warnings, fmt.Sprintf("program %s is not attached to %s any more", dir.program, l.Name)), nil
		case placeLater:
			warnings = append(warnings, aheadWarning(l.Name, dir))
		}
		kind = h.kind()
	}
	return kind, warnings, nil
}

// pinnedHook is a hook by TCX if its link is pinned, else one by filter.
func pinnedHook(pin string) (*hook, error) {
	pinned, err := openPinnedLink(pin)
	if errors.Is(err, os.ErrNotExist) {
		return &hook{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open pinned link: %w", err)
	}
	return &hook{tcx: pinned}, nil
}

// addresses are those that the longest ways out get, as anyAddress gives them.
func (p *pins) addresses(value bpf.MasqUplink) (v4, v6 netip.Addr, err error) {
	for _, f := range p.families {
		switch {
		case f.is6 && value.Flags&uint8(bpf.MasqUplinkFlagUPLINK_ONE_V6) != 0:
			v6 = fromAddr6(value.AddrV6)
		case f.is6:
			v6, err = widestRule(f.addresses, func(k bpf.MasqAddressRuleV6, address [4]uint32) (uint32, uint32, netip.Addr) {
				return k.Ifindex, k.Prefixlen, fromAddr6(address)
			}, value.Ifindex)
		case value.Flags&uint8(bpf.MasqUplinkFlagUPLINK_ONE_V4) != 0:
			v4 = fromAddr4(value.AddrV4)
		default:
			v4, err = widestRule(f.addresses, func(k bpf.MasqAddressRuleV4, address uint32) (uint32, uint32, netip.Addr) {
				return k.Ifindex, k.Prefixlen, fromAddr4(address)
			}, value.Ifindex)
		}
		if err != nil {
			return v4, v6, fmt.Errorf("read %s addresses: %w", f, err)
		}
	}
	return v4, v6, nil
}

// widestRule is the address of the rule with the shortest prefix on a link. read
// gives a rule's interface, prefix length and address.
func widestRule[K, V any](rules *ebpf.Map, read func(K, V) (uint32, uint32, netip.Addr), ifindex uint32) (netip.Addr, error) {
	var widest netip.Addr
	var bits uint32
	var key K
	var value V
	entries := rules.Iterate()
	for entries.Next(&key, &value) {
		index, length, address := read(key, value)
		if index == be32(ifindex) && (!widest.IsValid() || length < bits) {
			widest, bits = address, length
		}
	}
	return widest, entries.Err()
}
