// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

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

// printLines prints a list as JSON with one element a line: what can be long is
// read by line, and indenting it takes longer than all else.
func printLines[T any](w io.Writer, list []T) error {
	out := bufio.NewWriter(w)
	before := "["
	for _, element := range list {
		line, err := json.Marshal(element)
		if err != nil {
			return err
		}
		say(out, "%s%s", before, line) // Flush tells the error
		before = ",\n "
	}
	if len(list) == 0 {
		say(out, "[")
	}
	say(out, "]\n")
	return out.Flush()
}

// table prints rows of cells in columns.
func table(w io.Writer, rows ...[]string) error {
	var widths []int
	for _, row := range rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	out := bufio.NewWriter(w)
	for _, row := range rows {
		for i, cell := range row {
			padding := 0
			if i < len(row)-1 {
				padding = widths[i] + 2 - utf8.RuneCountInString(cell)
			}
			say(out, "%s%s", cell, strings.Repeat(" ", padding)) // Flush tells the error
		}
		say(out, "\n")
	}
	return out.Flush()
}
