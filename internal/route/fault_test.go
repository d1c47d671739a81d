// SPDX-License-Identifier: Apache-2.0

package route

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
)

func TestFaultsAreLoggedOnceUntilTheyChange(t *testing.T) {
	var lines bytes.Buffer
	faults := faultLog{log: slog.New(slog.NewTextHandler(&lines, nil)), text: "look"}
	busy, gone := errors.New("busy"), errors.New("gone")
	for _, err := range []error{busy, busy, gone, gone, nil, nil, gone} {
		faults.note(err)
	}
	var got []string
	for line := range strings.Lines(lines.String()) {
		_, fault, _ := strings.Cut(strings.TrimSpace(line), "error=")
		got = append(got, fault)
	}
	if text := strings.Join(got, " "); text != "busy gone gone" {
		t.Errorf("logged %s, want busy gone gone", text)
	}
}
