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

	// Translations lists live flows. Optional: without it the answer is what a
	// new connection would get.
	Translations func() ([]api.Translation, error)
}

// explanation is one question on its way to an answer.
type explanation struct {
	api.Question
	Facts

	path   route.Path
	uplink *route.Uplink // nil: the path leads through none
}

// Explain tells what happens to a packet's source address and why. It fails if
// the question makes no sense or the node has no route to the destination.
func Explain(q api.Question, facts Facts) (api.Answer, error) {
	q.Dst, q.Src = q.Dst.Unmap(), q.Src.Unmap()
	if !q.Dst.IsValid() {
		return api.Answer{}, errors.New("a destination address is needed")
	}
	if q.Src.IsValid() && q.Src.Is4() != q.Dst.Is4() {
		return api.Answer{}, fmt.Errorf("source %s and destination %s are of different families", q.Src, q.Dst)
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
	case e.Dst.Is6() && e.Dst.IsLinkLocalUnicast():
		return "fe80::/10 is never touched"
	case e.Src.IsValid() && e.Src.IsUnspecified():
		return "a packet without a source address is never touched"
	}
	return ""
}

// routed answers once the path is known.
func (e *explanation) routed() (api.Answer, error) {
	if e.path.Local {
		return api.Answer{
			Verdict: verdictLocal,
			Reason:  fmt.Sprintf("%s is an address of this node: the packet does not leave it", e.Dst),
		}, nil
	}
	if e.Datapath == EBPF {
		if e.uplink == nil {
			return keep(fmt.Sprintf("the route leads through %s, which is not an uplink: only uplinks translate", e.path.LinkName)), nil
		}
		if answer, found, err := e.live(); found || err != nil {
			return answer, err
		}
	}
	return e.decide(), nil
}

// live looks for the translation that the flow already has: a connection keeps
// what its first packet got, whatever the config says now.
func (e *explanation) live() (api.Answer, bool, error) {
	if e.Translations == nil || !e.Src.IsValid() || e.Proto == "" || e.Sport == 0 {
		return api.Answer{}, false, nil
	}
	flows, err := e.Translations()
	if err != nil {
		return api.Answer{}, false, fmt.Errorf("list translations: %w", err)
	}
	i := slices.IndexFunc(flows, func(t api.Translation) bool {
		return t.Src == e.Src && t.Dst == e.Dst && t.Proto == e.Proto && t.SPort == e.Sport &&
			(e.Dport == 0 || t.DPort == e.Dport)
	})
	if i < 0 {
		return api.Answer{}, false, nil
	}
	return api.Answer{
		Verdict:     verdictMasquerade,
		Reason:      fmt.Sprintf("the flow is translated to %s since its first packet", netip.AddrPortFrom(flows[i].NATAddr, flows[i].NATPort)),
		SNATAddress: flows[i].NATAddr,
	}, true, nil
}

// decide answers for a new connection.
func (e *explanation) decide() api.Answer {
	entry, found := e.Policy.Lookup(e.Dst)
	reason := e.listReason(entry, found)
	answer := api.Answer{Verdict: entry.Verdict.String(), Reason: reason}
	if found {
		answer.CIDR = entry.Prefix.String()
	}
	if entry.Verdict == prefix.Keep {
		return answer
	}
	address, known := e.Network.Masquerade(e.path, e.Dst)
	switch {
	case e.uplink == nil:
		answer.Reason += fmt.Sprintf("; the address is the one of %s that MASQUERADE picks", e.path.LinkName)
	case !known:
		answer.Reason += fmt.Sprintf("; but %s has no usable address, so that the packet is dropped", e.uplink.Name)
	case e.Datapath == EBPF && e.Src == address:
		answer.Verdict = verdictKeep
		answer.Reason = fmt.Sprintf("the source already is the address that masquerading gives on %s", e.uplink.Name)
	default:
		answer.SNATAddress = address
	}
	return answer
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
		Datapath:     a.options.Datapath.Name(),
		IPv6:         a.options.Config.EnableIPv6,
		Policy:       a.settings.view().policy,
		Network:      a.options.Network.Snapshot(),
		Path:         a.options.Network.Path,
		Translations: a.options.Datapath.Translations,
	})
}
