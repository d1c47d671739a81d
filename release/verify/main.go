// SPDX-License-Identifier: Apache-2.0

// Command verify reads a release as its users get it, and says all that is wrong:
// checksums, versions, architectures, lists of what is inside, names of images.
//
//	verify DIR VERSION
package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

const sums = "SHA256SUMS"

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: verify DIR VERSION")
		os.Exit(2)
	}
	if err := verify(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "verify:", err)
		os.Exit(1)
	}
}

// verify reads every file of a release.
func verify(dir, version string) error {
	names, err := filesOf(dir)
	if err != nil {
		return err
	}
	all := checkSums(dir, names)
	counts := make(map[string]int)
	for _, name := range names {
		kind, err := verifyFile(filepath.Join(dir, name), version)
		if err != nil {
			all = errors.Join(all, fmt.Errorf("%s: %w", name, err))
		}
		counts[kind]++
	}
	for _, kind := range []string{"program", "image", "list", "manifests", "chart"} {
		if counts[kind] == 0 {
			all = errors.Join(all, fmt.Errorf("there is no %s", kind))
		}
	}
	return all
}

// filesOf lists what a release consists of, but for the checksums.
func filesOf(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, entry := range entries {
		if entry.Name() != sums {
			names = append(names, entry.Name())
		}
	}
	return names, nil
}

// checkSums holds that each file has its line, and each line its file.
func checkSums(dir string, names []string) error {
	text, err := os.ReadFile(filepath.Join(dir, sums))
	if err != nil {
		return err
	}
	var all error
	var listed []string
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		want, name, _ := strings.Cut(lines.Text(), "  ")
		listed = append(listed, name)
		content, err := os.ReadFile(filepath.Join(dir, filepath.Base(name)))
		if err != nil {
			all = errors.Join(all, err)
			continue
		}
		if sum := sha256.Sum256(content); hex.EncodeToString(sum[:]) != want {
			all = errors.Join(all, fmt.Errorf("%s: its checksum is another one", name))
		}
	}
	slices.Sort(listed)
	if !slices.Equal(listed, names) {
		all = errors.Join(all, fmt.Errorf("%s lists %q, not %q", sums, listed, names))
	}
	return all
}

// verifyFile looks into a file of a kind that its name tells.
func verifyFile(path, version string) (kind string, err error) {
	name, ok := strings.CutPrefix(filepath.Base(path), "ip-masq-agent-"+version+"-")
	if !ok {
		return "", fmt.Errorf("its name has not the version %s", version)
	}
	program := regexp.MustCompile(`^linux-([a-z0-9]+)$`).FindStringSubmatch(name)
	image := regexp.MustCompile(`^image-([a-z0-9]+)\.tar\.gz$`).FindStringSubmatch(name)
	switch {
	case program != nil:
		return "program", verifyProgram(path, program[1], version)
	case image != nil:
		return "image", verifyImage(path, image[1], version)
	case strings.HasSuffix(name, ".spdx.json"):
		text, err := os.ReadFile(path)
		return "list", errors.Join(err, verifyList(text, version))
	case name == "deploy.tar.gz":
		return "manifests", verifyManifests(path, version)
	case name == "helm.tgz":
		return "chart", verifyChart(path, version)
	}
	return "", errors.New("nobody knows this kind of file")
}

func verifyProgram(path, arch, version string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if !bytes.Contains(text, []byte(version)) {
		err = fmt.Errorf("it does not know the version %s", version)
	}
	return errors.Join(err, checkMachine(text, arch))
}

// verifyList reads SPDX.
func verifyList(text []byte, version string) error {
	var list struct {
		SPDXVersion string `json:"spdxVersion"`
		Packages    []struct{ Name, VersionInfo string }
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return err
	}
	if list.SPDXVersion != "SPDX-2.3" || len(list.Packages) < 10 {
		return fmt.Errorf("%s with %d packages", list.SPDXVersion, len(list.Packages))
	}
	for _, p := range list.Packages {
		if p.Name == "ip-masq-agent" && p.VersionInfo == version {
			return nil
		}
	}
	return fmt.Errorf("it lists no ip-masq-agent %s", version)
}

func verifyManifests(path, version string) error {
	count := 0
	err := eachFile(path, func(name string, content []byte) error {
		if bytes.Contains(content, []byte("registry.example.com")) && !strings.HasPrefix(name, "deploy/kustomize/base/kustomization") {
			return fmt.Errorf("%s names no registry of anybody's", name)
		}
		count += bytes.Count(content, []byte("/ip-masq-agent:"+version))
		return nil
	})
	if err == nil && count < 4 {
		err = fmt.Errorf("only %d images of version %s", count, version)
	}
	return err
}

func verifyChart(path, version string) error {
	found := false
	err := eachFile(path, func(name string, content []byte) error {
		found = found || name == "ip-masq-agent/Chart.yaml" && bytes.Contains(content, []byte("\nappVersion: "+version+"\n"))
		return nil
	})
	if err == nil && !found {
		err = fmt.Errorf("its Chart.yaml has not the version %s", version)
	}
	return err
}
