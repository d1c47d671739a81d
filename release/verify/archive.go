// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// eachFile visits the regular files of a tar, packed or not.
func eachFile(path string, visit func(name string, content []byte) error) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	packed, err := gzip.NewReader(file)
	if err != nil {
		return err
	}
	return eachFileOf(packed, visit)
}

func eachFileOf(r io.Reader, visit func(name string, content []byte) error) error {
	for archive := tar.NewReader(r); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if header.Typeflag != tar.TypeReg {
			continue
		}
		content, err := io.ReadAll(archive)
		if err != nil {
			return err
		}
		if err := visit(strings.TrimPrefix(header.Name, "./"), content); err != nil {
			return err
		}
	}
}

// checkMachine holds that a program is one for an architecture.
func checkMachine(program []byte, arch string) error {
	machines := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}
	file, err := elf.NewFile(bytes.NewReader(program))
	if err != nil {
		return err
	}
	if file.Machine != machines[arch] {
		return fmt.Errorf("it is for %s, not for %s", file.Machine, arch)
	}
	return nil
}

// verifyImage reads an archive of an image: its config, and in its layers every
// program and library.
func verifyImage(path, arch, version string) error {
	files := make(map[string][]byte)
	if err := eachFile(path, func(name string, content []byte) error {
		files[name] = content
		return nil
	}); err != nil {
		return err
	}
	var manifests []struct {
		Config string
		Layers []string
	}
	if err := json.Unmarshal(files["manifest.json"], &manifests); err != nil {
		return fmt.Errorf("manifest.json: %w", err)
	}
	if len(manifests) != 1 {
		return fmt.Errorf("it holds %d images", len(manifests))
	}
	all := verifyConfig(files[manifests[0].Config], arch, version)
	binaries, lists := 0, 0
	for _, layer := range manifests[0].Layers {
		err := eachFileOf(bytes.NewReader(files[layer]), func(name string, content []byte) error {
			var err error
			switch {
			case bytes.HasPrefix(content, []byte(elf.ELFMAG)):
				binaries++
				err = checkMachine(content, arch)
			case name == "usr/share/sbom/ip-masq-agent.spdx.json":
				lists++
				err = verifyList(content, version)
			}
			if err != nil {
				all = errors.Join(all, fmt.Errorf("%s: %w", name, err))
			}
			return nil
		})
		all = errors.Join(all, err)
	}
	if binaries < 10 || lists != 1 {
		all = errors.Join(all, fmt.Errorf("%d programs and libraries, %d lists of what it is made of", binaries, lists))
	}
	return all
}

func verifyConfig(text []byte, arch, version string) error {
	var config struct {
		Architecture, OS string
		Config           struct {
			Labels     map[string]string
			Entrypoint []string
		}
	}
	if err := json.Unmarshal(text, &config); err != nil {
		return fmt.Errorf("config of the image: %w", err)
	}
	if config.OS != "linux" || config.Architecture != arch {
		return fmt.Errorf("it is an image for %s/%s", config.OS, config.Architecture)
	}
	if got := config.Config.Labels["org.opencontainers.image.version"]; got != version {
		return fmt.Errorf("its label says version %q", got)
	}
	if len(config.Config.Entrypoint) != 1 || config.Config.Entrypoint[0] != "/ip-masq-agent" {
		return fmt.Errorf("it starts %q", config.Config.Entrypoint)
	}
	return nil
}
