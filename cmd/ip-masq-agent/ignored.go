// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
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

// resyncFlag is Azure's, in whole seconds. There it is all that makes a change of
// the config come into force; here a change is in force at once.
const resyncFlag = "resync-interval"

func addAzureFlags(flags *pflag.FlagSet) {
	flags.Int(resyncFlag, 60, "ignored")
	_ = flags.MarkHidden(resyncFlag) // it exists
}

// tellIgnored logs a line for those flags without effect that the user may count
// on.
func tellIgnored(flags *pflag.FlagSet, log *slog.Logger) {
	if set := setKlogFileFlags(flags); set != "" {
		log.Warn("log file flags have no effect, logs go to stderr", "flags", set)
	}
	if flags.Changed(resyncFlag) {
		log.Warn("--resync-interval has no effect: the config and the kernel are watched; the safety net is resyncInterval in the config")
	}
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
