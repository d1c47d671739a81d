// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"encoding/binary"
	"testing"

	"ip-masq-agent/bpf"
)

// A request is what encoding/binary makes of the structs of masq.h.
func TestSweepRequestHasTheLayoutOfTheStructs(t *testing.T) {
	t.Parallel()
	e := flow{
		key4: bpf.MasqTupleV4{Saddr: 0x01020304, Daddr: 0x05060708, Sport: 0x090a, Dport: 0x0b0c, Proto: 17},
		key6: bpf.MasqTupleV6{
			Saddr: [4]uint32{0x01020304, 0x05060708, 0x090a0b0c, 0x0d0e0f10},
			Daddr: [4]uint32{0x11121314, 0x15161718, 0x191a1b1c, 0x1d1e1f20},
			Sport: 0x2122, Dport: 0x2324, Proto: 6,
		},
	}
	for is6, key := range map[bool]any{false: e.key4, true: e.key6} {
		r := newSweepRequest(bpf.MasqSweepModeSWEEP_ALL)
		r.add(&e, is6)
		r.add(&e, is6)
		if _, err := binary.Encode(r.data, binary.NativeEndian, &r.head); err != nil {
			t.Fatal(err)
		}
		var want []byte
		for _, part := range []any{bpf.MasqSweepRequest{Mode: uint16(bpf.MasqSweepModeSWEEP_ALL), Count: 2}, key, key} {
			var err error
			if want, err = binary.Append(want, binary.NativeEndian, part); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(r.data, want) {
			t.Errorf("IPv6 %t: got\n% x\nwant\n% x", is6, r.data, want)
		}
	}
}
