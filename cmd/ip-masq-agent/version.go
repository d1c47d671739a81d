// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"ip-masq-agent/loader"
)

// Set by the release build with -ldflags "-X main.version=v1.2.3 …".
var (
	version string
	commit  string
)

const unknown = "unknown"

// versionInfo is what `version` shows. Nothing in it is ever empty.
type versionInfo struct {
	Version string `json:"version"`
	Commit  string `json:"commit"`
	Go      string `json:"go"`
	Clang   string `json:"clang"`
}

// thisVersion is what the release build set, else what the Go toolchain knows.
func thisVersion() versionInfo {
	build, ok := debug.ReadBuildInfo()
	if !ok {
		build = &debug.BuildInfo{}
	}
	return describeBuild(versionInfo{Version: version, Commit: commit, Clang: loader.Clang}, build)
}

// describeBuild fills the gaps of set.
func describeBuild(set versionInfo, build *debug.BuildInfo) versionInfo {
	settings := make(map[string]string)
	for _, setting := range build.Settings {
		settings[setting.Key] = setting.Value
	}
	set.Go = runtime.Version()
	if set.Commit == "" {
		set.Commit = settings["vcs.revision"]
		if set.Commit != "" && settings["vcs.modified"] == "true" {
			set.Commit += "-dirty"
		}
	}
	if set.Version == "" && build.Main.Version != "(devel)" {
		set.Version = build.Main.Version
	}
	if set.Version == "" {
		set.Version = "devel"
	}
	if set.Commit == "" {
		set.Commit = unknown
	}
	return set
}

func (v versionInfo) String() string {
	return fmt.Sprintf("ip-masq-agent %s (commit %s, %s, clang %s)", v.Version, v.Commit, v.Go, v.Clang)
}

func newVersionCommand() *cobra.Command {
	var format string
	command := &cobra.Command{
		Use:   "version",
		Short: "Show which build this is",
		Args:  noArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			return printVersion(command.OutOrStdout(), format)
		},
	}
	addOutputFlag(command, &format)
	return command
}

func printVersion(w io.Writer, format string) error {
	return printAs(w, format, thisVersion(), func(w io.Writer) error {
		_, err := fmt.Fprintln(w, thisVersion())
		return err
	})
}
