// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"

	"github.com/spf13/pflag"
)

// addKlogFlags accepts the flags of klog v2, which the classic agent had and
// which manifests in the field set. They do nothing. --v is a flag of our own.
func addKlogFlags(flags *pflag.FlagSet) {
	for _, name := range []string{
		"add-dir-header", "alsologtostderr", "legacy-stderr-threshold-behavior", "logtostderr",
		"one-output", "skip-headers", "skip-log-headers",
	} {
		flags.Bool(name, false, "ignored")
		_ = flags.MarkHidden(name) // it exists
	}
	for _, name := range append(klogFileFlags(),
		"alsologtostderrthreshold", "log-backtrace-at", "stderrthreshold", "vmodule") {
		flags.String(name, "", "ignored")
		_ = flags.MarkHidden(name) // it exists
	}
}

// klogFileFlags are those that ask for a log file. Who sets one may look for
// the log there.
func klogFileFlags() []string {
	return []string{"log-dir", "log-file", "log-file-max-size"}
}

// setKlogFileFlags names the file flags that the user set.
func setKlogFileFlags(flags *pflag.FlagSet) string {
	var set []string
	for _, name := range klogFileFlags() {
		if flags.Changed(name) {
			set = append(set, "--"+strings.ReplaceAll(name, "-", "_"))
		}
	}
	return strings.Join(set, " ")
}
