// SPDX-License-Identifier: Apache-2.0

// Command sbom lists what a build is made of, as SPDX 2.3 in JSON: the modules
// that the Go toolchain wrote into a binary and, for an image, the Debian
// packages in it. The same input gives the same output: the time is that of
// SOURCE_DATE_EPOCH.
package main

import (
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"
)

func main() {
	if err := run(os.Args[1:], os.Getenv("SOURCE_DATE_EPOCH"), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func run(args []string, epoch string, out io.Writer) error {
	flags := flag.NewFlagSet("sbom", flag.ContinueOnError)
	binary := flags.String("binary", "", "the Go program to list the modules of")
	version := flags.String("version", "devel", "version of the program")
	packages := flags.String("packages", "", "directory with a dpkg record of each package (optional)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *binary == "" {
		return errors.New("-binary is missing")
	}
	created, err := creation(epoch)
	if err != nil {
		return err
	}
	info, err := buildinfo.ReadFile(*binary)
	if err != nil {
		return fmt.Errorf("read modules of %s: %w", *binary, err)
	}
	parts := modules(info)
	if *packages != "" {
		debs, err := debianPackages(*packages)
		if err != nil {
			return err
		}
		parts = append(parts, debs...)
	}
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(newDocument(*version, created, parts))
}

// creation is the time of the document: seconds since 1970, or none.
func creation(epoch string) (time.Time, error) {
	if epoch == "" {
		return time.Unix(0, 0).UTC(), nil
	}
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
	}
	return time.Unix(seconds, 0).UTC(), nil
}
