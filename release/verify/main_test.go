// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const prefix = "ip-masq-agent-v1.2.3-"

// program is no more than the head of one.
func program(machine elf.Machine) string {
	head := elf.Header64{Type: uint16(elf.ET_EXEC), Machine: uint16(machine), Version: uint32(elf.EV_CURRENT)}
	copy(head.Ident[:], elf.ELFMAG)
	head.Ident[elf.EI_CLASS], head.Ident[elf.EI_DATA], head.Ident[elf.EI_VERSION] = byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)
	var b bytes.Buffer
	_ = binary.Write(&b, binary.LittleEndian, head) // cannot fail
	return b.String() + "v1.2.3"
}

func list(version string) string {
	parts := strings.Repeat(`,{"name": "part"}`, 20)
	return `{"spdxVersion": "SPDX-2.3", "packages": [{"name": "ip-masq-agent", "versionInfo": "` + version + `"}` + parts + `]}`
}

func archive(t *testing.T, files map[string]string) string {
	t.Helper()
	var b bytes.Buffer
	out := tar.NewWriter(&b)
	for name, content := range files {
		if err := out.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(out, content); err != nil {
			t.Fatal(err)
		}
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func pack(t *testing.T, text string) string {
	t.Helper()
	var b bytes.Buffer
	out := gzip.NewWriter(&b)
	if _, err := io.WriteString(out, text); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// release is a good one for arm64, whose image has one library of a machine.
func release(t *testing.T, library elf.Machine) map[string]string {
	t.Helper()
	layer := map[string]string{"usr/lib/odd.so": program(library), "usr/share/sbom/ip-masq-agent.spdx.json": list("v1.2.3")}
	for i := range 10 {
		layer[fmt.Sprintf("usr/bin/%d", i)] = program(elf.EM_AARCH64)
	}
	return map[string]string{
		prefix + "linux-arm64":           program(elf.EM_AARCH64),
		prefix + "linux-arm64.spdx.json": list("v1.2.3"),
		prefix + "image-arm64.tar.gz": pack(t, archive(t, map[string]string{
			"manifest.json": `[{"Config": "c", "Layers": ["l"]}]`, "l": archive(t, layer),
			"c": `{"architecture": "arm64", "os": "linux", "config": {"Entrypoint": ["/ip-masq-agent"],
				"Labels": {"org.opencontainers.image.version": "v1.2.3"}}}`,
		})),
		prefix + "deploy.tar.gz": pack(t, archive(t, map[string]string{"deploy/a.yaml": strings.Repeat("registry.internal/ip-masq-agent:v1.2.3\n", 4)})),
		prefix + "helm.tgz":      pack(t, archive(t, map[string]string{"ip-masq-agent/Chart.yaml": "name: x\nappVersion: v1.2.3\n"})),
	}
}

func TestVerify(t *testing.T) {
	for name, test := range map[string]struct {
		change func(files map[string]string)
		after  func(dir string) error // the checksums
		want   string
	}{
		"a good one": {},
		"a library of another machine": {
			change: func(files map[string]string) {
				files[prefix+"image-arm64.tar.gz"] = release(t, elf.EM_X86_64)[prefix+"image-arm64.tar.gz"]
			},
			want: "usr/lib/odd.so: it is for EM_X86_64, not for arm64",
		},
		"a list of another version": {
			change: func(files map[string]string) { files[prefix+"linux-arm64.spdx.json"] = list("v1.2.2") },
			want:   "it lists no ip-masq-agent v1.2.3",
		},
		"no list": {
			change: func(files map[string]string) { delete(files, prefix+"linux-arm64.spdx.json") },
			want:   "there is no list",
		},
		"a placeholder": {
			change: func(files map[string]string) {
				files[prefix+"deploy.tar.gz"] = pack(t, archive(t, map[string]string{"deploy/a.yaml": "registry.example.com"}))
			},
			want: "names no registry",
		},
		"a file of another version": {
			change: func(files map[string]string) { files["ip-masq-agent-v1.2.2-linux-arm64"] = "" },
			want:   "its name has not the version",
		},
		"a file that changed": {
			after: func(dir string) error {
				return os.WriteFile(filepath.Join(dir, prefix+"linux-arm64.spdx.json"), []byte(list("v1.2.3")+" "), 0o600)
			},
			want: "its checksum is another one",
		},
		"a file that nobody summed": {
			after: func(dir string) error {
				return os.WriteFile(filepath.Join(dir, prefix+"image-arm64.spdx.json"), []byte(list("v1.2.3")), 0o600)
			},
			want: "SHA256SUMS lists",
		},
	} {
		t.Run(name, func(t *testing.T) {
			files, dir := release(t, elf.EM_AARCH64), t.TempDir()
			if test.change != nil {
				test.change(files)
			}
			writeRelease(t, dir, files)
			if test.after != nil {
				if err := test.after(dir); err != nil {
					t.Fatal(err)
				}
			}
			err := verify(dir, "v1.2.3")
			if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("%v, want %q", err, test.want)
			}
		})
	}
}

func writeRelease(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	var lines strings.Builder
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&lines, "%x  %s\n", sha256.Sum256([]byte(content)), name)
	}
	if err := os.WriteFile(filepath.Join(dir, sums), []byte(lines.String()), 0o600); err != nil {
		t.Fatal(err)
	}
}
