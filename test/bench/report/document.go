// SPDX-License-Identifier: Apache-2.0

package report

import (
	"errors"
	"fmt"
	"strings"
)

// What stands between these lines is measured, what stands elsewhere is
// written.
const (
	begin = "<!-- measured: begin (make bench writes what follows) -->\n"
	end   = "<!-- measured: end -->\n"
)

// Circumstances are what to know about a run.
type Circumstances struct {
	Kernel, CPU, Command, Version string

	Rounds int
	Took   string
	// Quick says that the numbers only show that the benchmark works.
	Quick bool
}

// Empty is a document without text.
func Empty() string { return begin + end }

// Replace puts a report into a document, in the place of the one that is there.
func Replace(document, report string) (string, error) {
	before, rest, ok := strings.Cut(document, begin)
	if !ok {
		return "", errors.New("the document has no line that begins what is measured")
	}
	_, after, ok := strings.Cut(rest, end)
	if !ok {
		return "", errors.New("the document has no line that ends what is measured")
	}
	return before + begin + "\n" + report + "\n" + end + after, nil
}

// Markdown is the report. Plots are found in a directory beside the document.
func (r Results) Markdown(about Circumstances, images string) string {
	var s strings.Builder
	if about.Quick {
		fmt.Fprint(&s, "> **A quick run on a busy machine: these numbers show that the benchmark works, and nothing else.**\n\n")
	}
	fmt.Fprintf(&s, "%s; %s; `%s` at %s: %d rounds in %s.\n", about.Kernel, about.CPU, about.Command, about.Version, about.Rounds, about.Took)
	fmt.Fprint(&s, "Medians, with quartiles in brackets. Ratios are medians of the rounds' ratios.\n")
	for _, part := range []struct {
		title, plot string
		write       func(*strings.Builder)
	}{
		{"Targets", "", r.writeTargets},
		{"What a packet costs", "", r.writeBudget},
		{"Packets", "packets", r.writePackets},
		{"New flows", "flows", r.writeFlows},
		{"TCP", "tcp", r.writeTCP},
		{"Runs of the programs", "runs", r.writeRuns},
		{"Ports", "", r.writeFailures},
		{"Lists", "", r.writeLists},
		{"The agent", "", r.writeAgent},
	} {
		fmt.Fprintf(&s, "\n### %s\n\n", part.title)
		part.write(&s)
		if part.plot != "" {
			fmt.Fprintf(&s, "\n![%s](%s/%s.svg)\n", part.title, images, part.plot)
		}
	}
	return s.String()
}
