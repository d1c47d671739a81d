// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// patience is for what a cluster does in a second or two when nothing else runs.
const patience = 90 * time.Second

// cluster is where the test runs.
type cluster struct {
	dir        string // of ../cluster
	probe      string // the program of the test's pods
	repository string // a copy, whose manifests name the image
	image      string
	readme     string // the commands of the README, from the first kubectl on
}

// findCluster reads what ../run says.
func findCluster(t *testing.T) cluster {
	t.Helper()
	c := cluster{
		os.Getenv("E2E_CLUSTER"), os.Getenv("E2E_PROBE"), os.Getenv("E2E_REPOSITORY"), os.Getenv("E2E_IMAGE"), os.Getenv("E2E_README"),
	}
	if c.dir == "" {
		t.Fatal("no cluster: please call test/kubernetes/run")
	}
	return c
}

// imageParts are its name and its tag.
func (c cluster) imageParts() (repository, tag string) {
	i := strings.LastIndex(c.image, ":")
	return c.image[:i], c.image[i+1:]
}

// readFile reads a file of the repository.
func (c cluster) readFile(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(c.repository, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// try runs a program in a host's network namespace.
func (c cluster) try(t *testing.T, stdin, host string, command ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=/run/netns/" + host}, command...)...)
	cmd.Dir = c.repository
	cmd.Stdin = strings.NewReader(stdin)
	var out, errText bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errText
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s", strings.Join(command, " "), err, strings.TrimSpace(errText.String()))
	}
	return strings.TrimSpace(out.String()), nil
}

func (c cluster) on(t *testing.T, host string, command ...string) string {
	t.Helper()
	out, err := c.try(t, "", host, command...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// onNode runs a program among a node's mounts and processes.
func (c cluster) onNode(t *testing.T, node string, command ...string) string {
	t.Helper()
	pid, err := os.ReadFile(filepath.Join(c.dir, node, "pid"))
	if err != nil {
		t.Fatal(err)
	}
	return c.on(t, node, append([]string{"nsenter", "--mount", "--target", strings.TrimSpace(string(pid))}, command...)...)
}

// tryKubectl runs kubectl with stdin in the repository.
func (c cluster) tryKubectl(t *testing.T, stdin string, args ...string) (string, error) {
	t.Helper()
	return c.try(t, stdin, "node1", append([]string{"kubectl"}, args...)...)
}

func (c cluster) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	return c.kubectlStdin(t, "", args...)
}

func (c cluster) kubectlStdin(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	out, err := c.tryKubectl(t, stdin, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// apply applies a file of the repository, or with -k a directory.
func (c cluster) apply(t *testing.T, args ...string) {
	t.Helper()
	c.kubectl(t, append([]string{"apply"}, args...)...)
	c.rolledOut(t)
}

// rolledOut waits until all agents are ready.
func (c cluster) rolledOut(t *testing.T) {
	t.Helper()
	c.kubectl(t, "rollout", "status", "daemonset/ip-masq-agent", "--namespace=kube-system", "--timeout=80s")
}

// agent runs a command of the agent in its pod on a node.
func (c cluster) agent(t *testing.T, node string, args ...string) string {
	t.Helper()
	return c.kubectl(t, append([]string{"exec", "--namespace=kube-system", c.agentPod(t, node), "--", "/ip-masq-agent"}, args...)...)
}

// status is what a part of the agent's says, in the words of its JSON.
type status struct {
	Interfaces []struct {
		SNATv4 string `json:"snat_v4"`
		SNATv6 string `json:"snat_v6"`
	} `json:"interfaces"`
	Drain struct {
		Active  bool `json:"active"`
		Entries int  `json:"entries"`
	} `json:"drain"`
	Warnings []string `json:"warnings"`
}

func (c cluster) status(t *testing.T, node string) status {
	t.Helper()
	var s status
	if err := json.Unmarshal([]byte(c.agent(t, node, "status", "-o", "json")), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// ownKustomization makes the one that kustomize/base describes in its head, with
// our image, and returns its directory.
func (c cluster) ownKustomization(t *testing.T) string {
	t.Helper()
	const base = "deploy/kustomize/base/kustomization.yaml"
	var own strings.Builder
	for line := range strings.Lines(c.readFile(t, base)) {
		if text, ok := strings.CutPrefix(line, "#   "); ok {
			own.WriteString(text)
		}
	}
	repository, tag := c.imageParts()
	text := strings.NewReplacer("registry.internal/ip-masq-agent", repository, "v1.0.0", tag).Replace(own.String())
	dir := t.TempDir()
	if err := os.Symlink(c.repository, filepath.Join(dir, "ip-masq-agent")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// agentPod is the name of the agent's pod on a node, or "" if none runs.
func (c cluster) agentPod(t *testing.T, node string) string {
	t.Helper()
	return c.kubectl(t, "get", "pods", "--namespace=kube-system", "--selector=k8s-app=ip-masq-agent",
		"--field-selector=status.phase=Running,spec.nodeName="+node, "--output=jsonpath={.items[*].metadata.name}")
}

// podAddress is a pod's, of the default namespace.
func (c cluster) podAddress(t *testing.T, pod string, f family) string {
	t.Helper()
	return c.kubectl(t, "get", "pod", pod, fmt.Sprintf("--output=jsonpath={.status.podIPs[%d].ip}", f.pod))
}

// eventually repeats what until it gives no error.
func eventually(t *testing.T, what func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if err = what(); err == nil {
			return
		}
	}
	t.Fatalf("after %v still: %v", patience, err)
}
