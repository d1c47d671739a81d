// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"testing"

	"ip-masq-agent/internal/lab"
)

// When nf_conntrack comes, the programs are replaced by such that ask it.
func TestFeaturesAreProbedAgain(t *testing.T) {
	for attach, noTCX := range attachments() {
		t.Run(attach, func(t *testing.T) {
			t.Parallel()
			opts := testOptions4(t)
			opts.noTCX = noTCX
			n := newNode(t, lab.Options{Conntrack: true}, opts)
			want := n.d.features
			conn := n.dial("tcp", n.serve("tcp", n.Remote.V4))
			ids := func() (ids []uint32) {
				for _, dir := range directions() {
					info, err := n.d.uplinks[n.Uplinks[0].Index].programs[dir.program].Info()
					if err != nil {
						t.Fatal(err)
					}
					id, _ := info.ID()
					ids = append(ids, uint32(id))
				}
				return ids
			}
			before := ids()
			n.sync()
			if got := ids(); got[0] != before[0] || got[1] != before[1] {
				t.Error("replaced without a reason")
			}

			n.d.features, n.d.tracking = features{}, false // as if it had not been there
			n.sync()
			if n.d.features != want {
				t.Errorf("features %s, want %s", n.d.features, want)
			}
			if got := ids(); got[0] == before[0] || got[1] == before[1] {
				t.Error("the programs are those of before")
			}
			n.sync()
			n.goesOn(conn)
			n.translates("udp", false)
			if s := n.status(); len(s.Warnings) > 0 || s.Interfaces[0].Attach != attach {
				t.Errorf("status %+v", s)
			}
		})
	}
}
