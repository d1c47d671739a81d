// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
)

// Kernels without batches for tries are served one by one, in the same order,
// and both ways say which prefix failed.
func TestPrefixesAreDoneOneByOneWithoutBatches(t *testing.T) {
	t.Parallel()
	prefixes := []netip.Prefix{
		netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("192.168.0.0/16"),
	}
	refused := errors.New("refused")
	for _, test := range []struct {
		name string
		all  func() (int, error)
		one  error // of the second prefix
		done int
		want string
	}{
		{"batch", func() (int, error) { return 3, nil }, nil, 0, ""},
		{"batch that fails", func() (int, error) { return 1, refused }, nil, 0, "172.16.0.0/12: refused"},
		{"no batches", func() (int, error) { return 0, fmt.Errorf("batch: %w", ebpf.ErrNotSupported) }, nil, 3, ""},
		{"no batches, and one fails", func() (int, error) { return 0, ebpf.ErrNotSupported }, refused, 2, "172.16.0.0/12: refused"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var done []netip.Prefix
			err := each(prefixes, test.all, func(i int) error {
				done = append(done, prefixes[i])
				if i == 1 {
					return test.one
				}
				return nil
			})
			if !slices.Equal(done, prefixes[:test.done]) {
				t.Errorf("done one by one: %v", done)
			}
			if got := fmt.Sprint(err); test.want == "" && err != nil || !strings.Contains(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
