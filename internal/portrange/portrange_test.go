// SPDX-License-Identifier: Apache-2.0

package portrange

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParse(t *testing.T) {
	tests := []struct {
		text    string
		want    []Range
		wantErr string
	}{
		{text: ""},
		{text: "42", want: []Range{{42, 42}}},
		{text: "1-65535", want: []Range{{1, 65535}}},
		{text: "1024-29999,32768-65535", want: []Range{{1024, 29999}, {32768, 65535}}},
		{text: "9,1-8", want: []Range{{9, 9}, {1, 8}}},
		{text: "0", wantErr: `"0" is not a port`},
		{text: "0-9", wantErr: `"0" is not a port`},
		{text: "65536", wantErr: `"65536" is not a port`},
		{text: "abc", wantErr: `"abc" is not a port`},
		{text: "4-3", wantErr: `first is greater than last in "4-3"`},
		{text: "42 - 44", wantErr: "is not a port"},
		{text: "42-43-44", wantErr: `"43-44" is not a port`},
		{text: "-44", wantErr: `"" is not a port`},
		{text: "42-", wantErr: `"" is not a port`},
		{text: "1,", wantErr: `"" is not a port`},
		{text: "1-10,10-20", wantErr: `ranges "1-10" and "10-20" overlap`},
		{text: "5,1-10", wantErr: `ranges "5" and "1-10" overlap`},
	}
	for _, tt := range tests {
		t.Run(tt.text, func(t *testing.T) {
			got, err := Parse(tt.text)
			if tt.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), tt.wantErr) {
					t.Fatalf("Parse(%q) error = %v, want one with %q", tt.text, err, tt.wantErr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("Parse(%q) (-want +got):\n%s", tt.text, diff)
			}
		})
	}
}

func TestRange(t *testing.T) {
	r := Range{First: 1024, Last: 1025}
	if r.Size() != 2 || !r.Contains(1024) || !r.Contains(1025) || r.Contains(1023) || r.Contains(1026) {
		t.Errorf("range %v: wrong size or bounds", r)
	}
	if got := (Range{7, 7}).String() + " " + r.String(); got != "7 1024-1025" {
		t.Errorf("String() = %q", got)
	}
}
