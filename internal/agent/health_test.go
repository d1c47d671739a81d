// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"testing"
	"testing/synctest"

	"ip-masq-agent/internal/api"
)

func TestReadyzSaysWhatIsMissing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.datapath.name = EBPF
		want := func(ok bool, missing string) {
			t.Helper()
			gotOK, body := b.ready()
			text, err := json.Marshal(body)
			if err != nil {
				t.Fatal(err)
			}
			var got struct{ Missing json.RawMessage }
			if err := json.Unmarshal(text, &got); err != nil {
				t.Fatal(err)
			}
			if gotOK != ok || string(got.Missing) != missing {
				t.Errorf("got %v, %s, want %v, %s", gotOK, text, ok, missing)
			}
		}
		want(false, `["first sync"]`)
		b.start()
		want(false, `["an uplink"]`)
		b.datapath.status.Interfaces = []api.Interface{{Name: "eth0", Attach: "tcx"}, {Name: "eth1"}}
		b.Resync()
		b.settle()
		want(false, `["programs on eth1"]`)
		b.datapath.status.Interfaces[1].Attach = "tc"
		b.Resync()
		b.settle()
		want(true, `[]`)
	})
}
