// SPDX-License-Identifier: Apache-2.0

package parity

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// opinionRules note what conntrack says of each packet, by the number that is
// stamped on it. Packets of the node are asked for once, too: those that it
// sends in output, all others in prerouting.
const opinionRules = `table inet opinion {
	set invalid { typeof @nh,16,16; flags dynamic; size 65535; }
	set new { typeof @nh,16,16; flags dynamic; size 65535; }
	chain note {
		meta nfproto ipv4 ct state invalid add @invalid { @nh,32,16 }
		meta nfproto ipv6 ct state invalid add @invalid { @nh,16,16 }
		meta nfproto ipv4 ct state new add @new { @nh,32,16 }
		meta nfproto ipv6 ct state new add @new { @nh,16,16 }
	}
	chain prerouting {
		type filter hook prerouting priority -150
		jump note
	}
	chain output {
		type filter hook output priority -150
		jump note
	}
}`

// opinion is what conntrack said of the packets of a burst.
type opinion struct {
	invalid, fresh map[uint16]bool
}

// askOpinion reads what was noted since it was asked last.
func (w *twin) askOpinion() opinion {
	w.Helper()
	o := opinion{invalid: make(map[uint16]bool), fresh: make(map[uint16]bool)}
	text, err := w.lab.Node.Run(w.Context(), "nft", "-j", "list table inet opinion")
	if err != nil {
		w.Fatal(err)
	}
	if err := w.lab.Node.NFT("flush set inet opinion invalid; flush set inet opinion new"); err != nil {
		w.Fatal(err)
	}
	var said struct {
		Nftables []struct {
			Set struct {
				Name string   `json:"name"`
				Elem []uint16 `json:"elem"`
			} `json:"set"`
		} `json:"nftables"`
	}
	if err := json.NewDecoder(bytes.NewReader([]byte(text))).Decode(&said); err != nil {
		w.Fatal(fmt.Errorf("%w in %s", err, text))
	}
	for _, object := range said.Nftables {
		to := o.fresh
		if object.Set.Name == "invalid" {
			to = o.invalid
		}
		for _, number := range object.Set.Elem {
			to[number] = true
		}
	}
	return o
}
