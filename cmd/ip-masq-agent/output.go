// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

func addOutputFlag(command *cobra.Command, format *string) {
	command.Flags().StringVarP(format, "output", "o", "text", "output format: `text|json`")
}

// printAs prints value as JSON, or whatever text writes.
func printAs(w io.Writer, format string, value any, text func(io.Writer) error) error {
	if err := checkOutput(format); err != nil {
		return err
	}
	if format == "text" {
		return text(w)
	}
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(value)
}

// say prints where nobody would be left to hear that it failed.
func say(w io.Writer, format string, args ...any) {
	_, _ = fmt.Fprintf(w, format, args...)
}

// closeQuietly is for defer, when all has been said.
func closeQuietly(c io.Closer) { _ = c.Close() }

// table prints rows of cells in columns.
func table(w io.Writer, rows ...[]string) error {
	columns := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, row := range rows {
		say(columns, "%s\n", strings.Join(row, "\t")) // Flush tells the error
	}
	return columns.Flush()
}
