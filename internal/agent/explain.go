// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/prefix"
	"ip-masq-agent/internal/route"
)

// Values of api.Answer.Verdict.
const (
	verdictMasquerade = "masquerade"
	verdictKeep       = "keep"
	verdictLocal      = "local"
)

// Facts are what an explanation is drawn from.
type Facts struct {
	Datapath string // EBPF or IPTables
	IPv6     bool   // IPv6 is enabled
	Policy   *prefix.Policy
	Network  *route.Snapshot
	Path     func(dst, src netip.Addr) (route.Path, error)

	// EachTranslation visits live flows. Optional: without it the answer is what
	// a new connection would get.
	EachTranslation func(visit func(api.Translation)) error

	// Readable is an error for an uplink that the eBPF datapath refuses. Optional.
	Readable func(route.Uplink) error
}

// explanation is one question on its way to an answer.
type explanation struct {
	api.Question
	Facts

	path   route.Path
	uplink *route.Uplink // nil: the path leads through none
}

// Explain tells what happens to the source address of a flow's first packet and
// why, or of the next one if the flow is translated already. It asks in the order
// in which the datapaths do. It fails if the question makes no sense or the node
// has no route to the destination.
func Explain(q api.Question, facts Facts) (api.Answer, error) {
	q.Dst, q.Src = q.Dst.Unmap(), q.Src.Unmap()
	if !q.Dst.IsValid() {
		return api.Answer{}, errors.New("a destination address is needed")
	}
	if q.Src.IsValid() && q.Src.Is4() != q.Dst.Is4() {
		return api.Answer{}, fmt.Errorf("source %s and destination %s are of different families", q.Src, q.Dst)
	}
	if q.Dst.Is6() && q.Proto == "icmp" {
		q.Proto = "icmpv6"
	}
	e := &explanation{Question: q, Facts: facts}
	if q.Dst.Is6() && !facts.IPv6 {
		return keep("IPv6 is left alone: --enable-ipv6 is not set"), nil
	}
	if reason := e.exempt(); reason != "" {
		return keep(reason), nil
	}
	var err error
	if e.path, err = facts.Path(q.Dst, q.Src); err != nil {
		return api.Answer{}, fmt.Errorf("find the route to %s: %w", q.Dst, err)
	}
	e.uplink = facts.Network.Uplink(e.path.LinkIndex)
	answer, err := e.routed()
	if answer.Interface == "" {
		answer.Interface = e.path.LinkName
	}
	return answer, err
}

func keep(reason string) api.Answer {
	return api.Answer{Verdict: verdictKeep, Reason: reason}
}

// exempt names the kinds of packets that the eBPF datapath never touches and
// that can be told without a route. iptables knows no such exception.
func (e *explanation) exempt() string {
	broadcast := netip.AddrFrom4([4]byte{255, 255, 255, 255})
	switch {
	case e.Datapath != EBPF:
		return ""
	case e.Dst.IsMulticast():
		return "multicast is never touched"
	case e.Dst == broadcast:
		return "broadcast is never touched"
	case e.Dst.Is6() && (e.Dst.IsLinkLocalUnicast() || e.Src.IsLinkLocalUnicast()):
		return "fe80::/10 is never touched"
	case e.Src.IsValid() && e.Src.IsUnspecified():
		return "a packet without a source address is never touched"
	case e.Dst.Is4() && e.Proto == "udp" && e.Sport == 68 && e.Dport == 67 && slices.Contains(e.Network.Addresses, e.Src):
		return "the node's own DHCP client keeps its address and port"
	}
	return ""
}

// routed answers once the path is known.
func (e *explanation) routed() (api.Answer, error) {
	if e.path.Local {
		return api.Answer{Verdict: verdictLocal, Reason: e.localReason()}, nil
	}
	if e.Datapath == EBPF {
		if e.uplink == nil {
			return keep(fmt.Sprintf("the route leads through %s, which is not an uplink: only uplinks translate", e.path.LinkName)), nil
		}
		if e.Readable != nil {
			if err := e.Readable(*e.uplink); err != nil {
				return keep(fmt.Sprintf("%s is refused as an uplink: %s", e.path.LinkName, err)), nil
			}
		}
		if answer, found, err := e.live(); found || err != nil {
			return answer, err
		}
	}
	return e.decide()
}

func (e *explanation) localReason() string {
	if e.path.Broadcast {
		return fmt.Sprintf("%s is a broadcast address, which the node does not pass on", e.Dst)
	}
	return fmt.Sprintf("%s is an address of this node: the packet does not leave it", e.Dst)
}

// live looks for the translation that the flow already has: a connection keeps
// what its first packet got, whatever the config says now, unless it leaves
// through another uplink now.
func (e *explanation) live() (api.Answer, bool, error) {
	flow, found, err := e.translation(func(t api.Translation) bool {
		return t.Src == e.Src && t.SPort == e.Sport
	})
	if err != nil || !found || e.elsewhere(flow.NATAddr) {
		return api.Answer{}, false, err
	}
	return api.Answer{
		Verdict:     verdictMasquerade,
		Reason:      fmt.Sprintf("the flow is translated to %s since its first packet", netip.AddrPortFrom(flow.NATAddr, flow.NATPort)),
		SNATAddress: flow.NATAddr,
	}, true, nil
}

// translation finds a live translation towards the destination in question that
// matches. Without source, protocol and port there is nothing to look for.
func (e *explanation) translation(match func(api.Translation) bool) (flow api.Translation, found bool, err error) {
	if e.EachTranslation == nil || !e.Src.IsValid() || e.Proto == "" || e.Sport == 0 {
		return api.Translation{}, false, nil
	}
	err = e.EachTranslation(func(t api.Translation) {
		// An ICMP query has no second port.
		if t.Proto == e.Proto && t.Dst == e.Dst && (e.Dport == 0 || t.DPort == 0 || t.DPort == e.Dport) && match(t) {
			flow, found = t, true
		}
	})
	if err != nil {
		return flow, false, fmt.Errorf("list translations: %w", err)
	}
	return flow, found, nil
}

// elsewhere reports whether an address is one that other uplinks masquerade with,
// and not the one in question. What none does, a deprecated one, can be anywhere.
func (e *explanation) elsewhere(address netip.Addr) bool {
	others := false
	for _, u := range e.Network.Uplinks {
		gives := slices.ContainsFunc(slices.Concat(u.V4, u.V6), func(r route.AddressRule) bool { return r.Address == address })
		if gives && u.Index == e.path.LinkIndex {
			return false
		}
		others = others || gives
	}
	return others
}

// decide answers for a new connection.
func (e *explanation) decide() (api.Answer, error) {
	entry, found := e.Policy.Lookup(e.Dst)
	answer := api.Answer{Verdict: entry.Verdict.String(), Reason: e.listReason(entry, found)}
	if found {
		answer.CIDR = entry.Prefix.String()
	}
	if entry.Verdict == prefix.Keep {
		return answer, nil
	}
	if e.Datapath == EBPF {
		return e.decideEBPF(answer)
	}
	address, known := e.Network.Masquerade(e.path, e.Dst)
	switch {
	case e.uplink == nil || e.Dst.Is6() && (e.Dst.IsMulticast() || e.Dst.IsLinkLocalUnicast()):
		answer.Reason += fmt.Sprintf("; the address is the one of %s that MASQUERADE picks", e.path.LinkName)
	case !known:
		answer.Reason += e.noAddress()
	default:
		answer.SNATAddress = address
	}
	return answer, nil
}

// decideEBPF goes on where no prefix says keep and the path leads through an
// uplink.
func (e *explanation) decideEBPF(answer api.Answer) (api.Answer, error) {
	address, known := e.Network.Masquerade(e.path, e.Dst)
	if known && e.Src == address {
		_, clash, err := e.translation(func(t api.Translation) bool {
			return t.NATAddr == address && t.NATPort == e.Sport
		})
		if err != nil {
			return answer, err
		}
		if !clash {
			return keep(fmt.Sprintf("the source already is the address that masquerading gives on %s", e.uplink.Name)), nil
		}
		answer.Reason = fmt.Sprintf("a translated flow has this address and port towards %s: this one gets another port", e.Dst)
	}
	switch {
	case e.path.Broadcast:
		return keep("broadcast is never touched"), nil
	case !known:
		answer.Reason += e.noAddress()
	default:
		answer.SNATAddress = address
	}
	return answer, nil
}

func (e *explanation) noAddress() string {
	return fmt.Sprintf("; but %s has no usable address, so that the packet is dropped", e.uplink.Name)
}

// listReason says which list decided.
func (e *explanation) listReason(entry prefix.Entry, found bool) string {
	lists := e.Policy.Lists()
	switch {
	case !found:
		return fmt.Sprintf("nonMasqueradeCIDRs has no prefix for %s", e.Dst)
	case slices.Contains(lists.LinkLocal, entry.Prefix):
		return fmt.Sprintf("%s is link-local and keeps its source unless the config says otherwise", entry.Prefix)
	case entry.Verdict == prefix.Masquerade:
		return fmt.Sprintf("%s is in masqueradeCIDRs and the longest prefix that matches", entry.Prefix)
	default:
		return fmt.Sprintf("%s is in nonMasqueradeCIDRs and the longest prefix that matches", entry.Prefix)
	}
}

// Explain answers for the running agent.
func (a *Agent) Explain(q api.Question) (api.Answer, error) {
	return Explain(q, Facts{
		Datapath:        a.options.Datapath.Name(),
		IPv6:            a.options.Config.EnableIPv6,
		Policy:          a.settings.view().policy,
		Network:         a.options.Network.Snapshot(),
		Path:            a.options.Network.Path,
		EachTranslation: a.options.Datapath.EachTranslation,
		Readable:        a.options.Readable,
	})
}
