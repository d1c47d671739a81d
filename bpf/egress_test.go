// SPDX-License-Identifier: Apache-2.0

package bpf

import "testing"

func TestX(t *testing.T) {
	runTable(t, []row{
		{name: "opened and the reply restored", steps: func(h hosts) []step {
			p := udp(h.pod, 40000, h.remote, 53)
			q := p.from(h.node, 40000)
			return []step{
				leaves(p, MasqVerdictVERDICT_OPENED, q),
				arrives(q.reply(), MasqVerdictVERDICT_TRANSLATED, p.reply()),
			}
		}},
	})
}
