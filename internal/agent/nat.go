// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"cmp"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"ip-masq-agent/internal/api"
)

// natChunk is how many translations are sent at once.
const natChunk = 512

// NATFilter chooses translations. What is zero matches all.
type NATFilter struct {
	Src, Dst netip.Prefix
	Proto    string // as api.Translation has it
}

// Match tells whether the filter chooses t.
func (f NATFilter) Match(t api.Translation) bool {
	return (!f.Src.IsValid() || f.Src.Contains(t.Src)) &&
		(!f.Dst.IsValid() || f.Dst.Contains(t.Dst)) &&
		(f.Proto == "" || strings.EqualFold(f.Proto, t.Proto))
}

func (f NATFilter) query() url.Values {
	values := url.Values{}
	for key, value := range map[string]netip.Prefix{"src": f.Src, "dst": f.Dst} {
		if value.IsValid() {
			values.Set(key, value.String())
		}
	}
	if f.Proto != "" {
		values.Set("proto", f.Proto)
	}
	return values
}

func parseNATFilter(values url.Values) (NATFilter, error) {
	filter := NATFilter{Proto: values.Get("proto")}
	for key, target := range map[string]*netip.Prefix{"src": &filter.Src, "dst": &filter.Dst} {
		text := values.Get(key)
		if text == "" {
			continue
		}
		parsed, err := ParseAddressOrPrefix(text)
		if err != nil {
			return NATFilter{}, fmt.Errorf("%s: %w", key, err)
		}
		*target = parsed
	}
	return filter, nil
}

// ParseAddressOrPrefix reads "10.0.0.1" as 10.0.0.1/32 and "10.0.0.0/8" as it is.
func ParseAddressOrPrefix(text string) (netip.Prefix, error) {
	if strings.Contains(text, "/") {
		parsed, err := netip.ParsePrefix(text)
		return parsed.Masked(), err
	}
	address, err := netip.ParseAddr(text)
	if err != nil {
		return netip.Prefix{}, err
	}
	address = address.Unmap().WithZone("")
	return netip.PrefixFrom(address, address.BitLen()), nil
}

// CountBy is what translations are counted by.
type CountBy string

// Values of CountBy.
const (
	ByPod         CountBy = "pod"
	ByDestination CountBy = "destination"
)

// ErrCountBy is a value of CountBy that there is not.
var ErrCountBy = errors.New("translations are counted by pod or by destination")

// CountTranslations counts the translations that each visits and filter matches,
// the highest number first.
func CountTranslations(each func(visit func(api.Translation)) error, filter NATFilter, by CountBy) ([]api.FlowCount, error) {
	if by != ByPod && by != ByDestination {
		return nil, fmt.Errorf("%w, not by %q", ErrCountBy, by)
	}
	flows := make(map[api.FlowCount]int)
	err := each(func(t api.Translation) {
		if !filter.Match(t) {
			return
		}
		if by == ByPod {
			flows[api.FlowCount{Src: t.Src}]++
		} else {
			flows[api.FlowCount{Proto: t.Proto, Dst: t.Dst, DPort: t.DPort}]++
		}
	})
	counts := make([]api.FlowCount, 0, len(flows))
	for key, number := range flows {
		key.Flows = number
		counts = append(counts, key)
	}
	slices.SortFunc(counts, func(a, b api.FlowCount) int {
		return cmp.Or(b.Flows-a.Flows, a.Src.Compare(b.Src), a.Dst.Compare(b.Dst),
			strings.Compare(a.Proto, b.Proto), cmp.Compare(a.DPort, b.DPort))
	})
	return counts, err
}

// answerNAT writes as it reads: a full table does not fit into the agent's
// memory.
func (a *Agent) answerNAT(w http.ResponseWriter, r *http.Request) {
	filter, err := parseNATFilter(r.URL.Query())
	if err != nil {
		refuse(w, http.StatusBadRequest, err)
		return
	}
	out := &translationWriter{out: bufio.NewWriter(w)}
	out.encoder = gob.NewEncoder(out.out)
	err = a.options.Datapath.EachTranslation(func(t api.Translation) {
		if filter.Match(t) {
			out.add(t)
		}
	})
	switch {
	case err == nil:
		out.end()
	case !out.begun:
		refuse(w, http.StatusInternalServerError, fmt.Errorf("list translations: %w", err))
	default:
		a.options.Log.Warn("list of translations ends early", "error", err)
	}
}

// translationWriter sends translations in chunks, of which an empty one is the
// last: half an answer must not look like a whole one. What cannot be sent is for
// a client that went away.
type translationWriter struct {
	out     *bufio.Writer
	encoder *gob.Encoder
	chunk   []api.Translation
	begun   bool
	gone    bool
}

func (w *translationWriter) add(t api.Translation) {
	if w.chunk = append(w.chunk, t); len(w.chunk) == natChunk {
		w.send()
	}
}

func (w *translationWriter) send() {
	if !w.gone {
		w.begun = true
		w.gone = w.encoder.Encode(w.chunk) != nil
	}
	w.chunk = w.chunk[:0]
}

func (w *translationWriter) end() {
	if len(w.chunk) > 0 {
		w.send()
	}
	w.send()
	_ = w.out.Flush() // the client went away
}

func readTranslations(body io.Reader, visit func(api.Translation)) error {
	chunks := gob.NewDecoder(bufio.NewReader(body))
	for {
		var chunk []api.Translation
		if err := chunks.Decode(&chunk); errors.Is(err, io.EOF) {
			return io.ErrUnexpectedEOF
		} else if err != nil {
			return err
		}
		if len(chunk) == 0 {
			return nil
		}
		for _, t := range chunk {
			visit(t)
		}
	}
}

func (a *Agent) answerNATCounts(w http.ResponseWriter, r *http.Request) {
	filter, err := parseNATFilter(r.URL.Query())
	if err != nil {
		refuse(w, http.StatusBadRequest, err)
		return
	}
	counts, err := CountTranslations(a.options.Datapath.EachTranslation, filter, CountBy(r.URL.Query().Get("by")))
	if errors.Is(err, ErrCountBy) {
		refuse(w, http.StatusBadRequest, err)
		return
	}
	answer(w, http.StatusInternalServerError, counts, err)
}
