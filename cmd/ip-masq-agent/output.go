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

// table prints rows of cells in columns. Rows without content are left out.
func table(w io.Writer, rows ...[]string) error {
	columns := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, row := range rows {
		if len(row) > 0 {
			fmt.Fprintln(columns, strings.Join(row, "\t"))
		}
	}
	return columns.Flush()
}
