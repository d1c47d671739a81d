// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"ip-masq-agent/bpf"
)

const (
	// eventInterval is how often a kind of drop is logged at most.
	eventInterval = time.Minute
	// eventMemory is how long a drop stays among the warnings of `status`.
	eventMemory = 10 * time.Minute
)

// events hears from the datapath of drops for want of a port, of room in the
// table or of an address.
type events struct {
	reader *ringbuf.Reader
	log    *slog.Logger
	full   func() // called when a table is full
	done   chan struct{}

	mu   sync.Mutex
	last map[bpf.MasqVerdict]drop
}

// drop is the last of its kind.
type drop struct {
	text   string
	when   time.Time
	logged time.Time
	count  int // since it was last logged
}

func startEvents(m *ebpf.Map, log *slog.Logger, full func()) (*events, error) {
	reader, err := ringbuf.NewReader(m)
	if err != nil {
		return nil, fmt.Errorf("read events: %w", err)
	}
	e := &events{reader: reader, log: log, full: full, done: make(chan struct{}), last: make(map[bpf.MasqVerdict]drop)}
	go e.run()
	return e, nil
}

// stop ends the reading goroutine.
func (e *events) stop() error {
	err := e.reader.Close()
	<-e.done
	return err
}

func (e *events) run() {
	defer close(e.done)
	for {
		record, err := e.reader.Read()
		if errors.Is(err, ringbuf.ErrClosed) {
			return
		}
		if err != nil {
			e.log.Error("read events", "error", err)
			return
		}
		var event bpf.MasqEvent
		if _, err := binary.Decode(record.RawSample, binary.NativeEndian, &event); err == nil {
			e.take(event, time.Now())
		}
	}
}

// take notes an event and logs it, unless its kind was logged a moment ago.
func (e *events) take(event bpf.MasqEvent, now time.Time) {
	verdict := bpf.MasqVerdict(event.Verdict)
	if verdict == bpf.MasqVerdictVERDICT_DROP_TABLE_FULL {
		e.full()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	d := e.last[verdict]
	d.text, d.when = describe(event), now
	d.count++
	if now.Sub(d.logged) >= eventInterval {
		e.log.Warn("packets dropped", "reason", dropReasons()[verdict], "last", d.text, "events", d.count)
		d.logged, d.count = now, 0
	}
	e.last[verdict] = d
}

// warnings are the drops of late, for `status`.
func (e *events) warnings(now time.Time) []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var warnings []string
	for verdict := range bpf.MasqVerdictVERDICT_COUNT {
		if d, ok := e.last[verdict]; ok && now.Sub(d.when) < eventMemory {
			warnings = append(warnings, fmt.Sprintf("%s ago: %s", now.Sub(d.when).Round(time.Second), d.text))
		}
	}
	return warnings
}

// describe says what happened and what to do.
func describe(event bpf.MasqEvent) string {
	remote := netip.AddrPortFrom(fromAddr6(event.Daddr).Unmap(), be16(event.Dport))
	switch bpf.MasqVerdict(event.Verdict) {
	case bpf.MasqVerdictVERDICT_DROP_PORT_EXHAUSTED:
		return fmt.Sprintf("no source port is left for %s to %s: make fewer connections to it, or more ports with --to-ports (see nat list --count-by=pod)", protoName(event.Proto), remote)
	case bpf.MasqVerdictVERDICT_DROP_TABLE_FULL:
		return fmt.Sprintf("the translation table is full, no room for %s to %s: raise --nat-table-size", protoName(event.Proto), remote)
	case bpf.MasqVerdictVERDICT_DROP_NO_ADDRESS:
		return fmt.Sprintf("interface %s has no usable address for packets to %s: give it one, or name other uplinks with --interfaces", linkName(int(event.Ifindex)), remote)
	case bpf.MasqVerdictVERDICT_DROP_UNSUPPORTED:
		return fmt.Sprintf("a second pod sends protocol %s to %s, and answers could not be told apart: one pod at a time, or exempt the destination", protoName(event.Proto), remote.Addr())
	}
	return fmt.Sprintf("dropped %s to %s", protoName(event.Proto), remote)
}

func linkName(index int) string {
	if l, err := net.InterfaceByIndex(index); err == nil {
		return l.Name
	}
	return strconv.Itoa(index)
}
