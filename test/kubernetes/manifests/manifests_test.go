// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"bytes"
	"flag"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

var update = flag.Bool("update", false, "write the golden files instead of comparing with them")

// variant is one way to get the agent into a cluster.
type variant struct {
	capabilities []corev1.Capability
	args         []string
	exposed      bool // metrics on all addresses
}

const metricsPort = 9613

func iptablesRights() []corev1.Capability { return []corev1.Capability{"NET_ADMIN", "NET_RAW"} }

func ebpfRights() []corev1.Capability { return append(iptablesRights(), "BPF", "PERFMON") }

// variants are what users apply, by what gives them.
func variants(t *testing.T) map[string]struct {
	text []byte
	variant
} {
	t.Helper()
	iptables := variant{iptablesRights(), []string{"--datapath=iptables"}, false}
	ebpf := variant{ebpfRights(), []string{"--datapath=ebpf"}, false}
	old := variant{append(ebpfRights(), "SYS_RESOURCE"), ebpf.args, false}
	ipv6 := variant{iptables.capabilities, []string{"--datapath=iptables", "--enable-ipv6"}, false}
	monitored := variant{iptables.capabilities, []string{"--datapath=iptables", "--metrics-bind-address=:9613"}, true}
	chart := func(values string) []byte {
		text, err := helm(t, values)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	return map[string]struct {
		text []byte
		variant
	}{
		"plain iptables":             {readFile(t, deploy, "ip-masq-agent.yaml"), iptables},
		"plain ebpf":                 {readFile(t, deploy, "ip-masq-agent-ebpf.yaml"), ebpf},
		"base":                       {kustomize(t, "base"), iptables},
		"overlay ebpf":               {kustomize(t, "overlays/ebpf"), ebpf},
		"overlay ipv6":               {kustomize(t, "overlays/ipv6"), ipv6},
		"overlay monitoring":         {kustomize(t, "overlays/monitoring"), monitored},
		"overlay kernels before":     {kustomize(t, "overlays/kernels-before-5.11"), old},
		"chart":                      {chart(""), iptables},
		"chart, ebpf":                {chart("datapath: ebpf"), ebpf},
		"chart, ipv6":                {chart("enableIPv6: true"), ipv6},
		"chart, pod monitor":         {chart("metrics: {podMonitor: {enabled: true}}"), monitored},
		"chart, kernels before":      {chart("{datapath: ebpf, kernelsBefore511: true}"), old},
		"chart, old kernel's tables": {chart("{datapath: iptables, kernelsBefore511: true}"), iptables},
	}
}

func TestDaemonSets(t *testing.T) {
	for name, v := range variants(t) {
		t.Run(name, func(t *testing.T) {
			set := daemonSet(t, v.text)
			checkPlacement(t, set)
			container := set.Spec.Template.Spec.Containers[0]
			if diff := cmp.Diff(v.args, container.Args); diff != "" {
				t.Errorf("arguments (-want +got):\n%s", diff)
			}
			checkRights(t, set, v.capabilities)
			checkVolumes(t, set)
			checkProbes(t, container, v.exposed)
		})
	}
}

// checkPlacement: on every node, before others, in the place of the classic one.
func checkPlacement(t *testing.T, set *appsv1.DaemonSet) {
	t.Helper()
	pod := set.Spec.Template.Spec
	if set.Namespace != "kube-system" || set.Name != "ip-masq-agent" {
		t.Errorf("it is %s/%s: the classic one would stay beside it", set.Namespace, set.Name)
	}
	if diff := cmp.Diff(map[string]string{"k8s-app": "ip-masq-agent"}, set.Spec.Selector.MatchLabels); diff != "" {
		t.Errorf("a DaemonSet's selector cannot be changed (-classic +ours):\n%s", diff)
	}
	if !pod.HostNetwork || pod.PriorityClassName != "system-node-critical" {
		t.Errorf("hostNetwork %v, priority class %q", pod.HostNetwork, pod.PriorityClassName)
	}
	if diff := cmp.Diff([]corev1.Toleration{{Operator: corev1.TolerationOpExists}}, pod.Tolerations); diff != "" {
		t.Errorf("tolerations (-want +got):\n%s", diff)
	}
	if pod.NodeSelector["kubernetes.io/os"] != "linux" {
		t.Errorf("node selector %v", pod.NodeSelector)
	}
	rolling := set.Spec.UpdateStrategy.RollingUpdate
	if rolling == nil || rolling.MaxUnavailable.String() != "10%" || rolling.MaxSurge != nil {
		t.Errorf("update strategy %+v: two agents on a node exclude each other", set.Spec.UpdateStrategy)
	}
}

// checkRights: these capabilities and nothing else. AppArmor's profile of
// runtimes forbids what ebpf does, which TestAppArmor shows; SELinux forbids
// whoever is no spc_t the lock.
func checkRights(t *testing.T, set *appsv1.DaemonSet, want []corev1.Capability) {
	t.Helper()
	pod := set.Spec.Template.Spec
	if pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken {
		t.Error("it gets a token for the API server")
	}
	if pod.SecurityContext == nil || pod.SecurityContext.SeccompProfile == nil ||
		pod.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Error("seccomp profile is not RuntimeDefault")
	}
	no, yes := false, true
	wantContext := &corev1.SecurityContext{
		AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
		Capabilities:   &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: want},
		SELinuxOptions: &corev1.SELinuxOptions{Type: "spc_t"},
	}
	if slices.Contains(want, "BPF") {
		wantContext.AppArmorProfile = &corev1.AppArmorProfile{Type: corev1.AppArmorProfileTypeUnconfined}
	}
	if diff := cmp.Diff(wantContext, pod.Containers[0].SecurityContext); diff != "" {
		t.Errorf("security context (-want +got):\n%s", diff)
	}
}

// checkVolumes: bpffs in the iptables datapath too, which has to see what the
// other one left.
func checkVolumes(t *testing.T, set *appsv1.DaemonSet) {
	t.Helper()
	pod := set.Spec.Template.Spec
	mounts := make(map[string]string)
	for _, mount := range pod.Containers[0].VolumeMounts {
		mounts[mount.MountPath] = mount.Name
	}
	volumes := make(map[string]corev1.Volume)
	for _, volume := range pod.Volumes {
		volumes[volume.Name] = volume
	}
	lock := volumes[mounts["/run/xtables.lock"]].HostPath
	if lock == nil || lock.Path != "/run/xtables.lock" || *lock.Type != corev1.HostPathFileOrCreate {
		t.Errorf("xtables lock %+v", lock)
	}
	config := volumes[mounts["/etc/config"]].ConfigMap
	if config == nil || config.Name != "ip-masq-agent" || config.Optional == nil || !*config.Optional {
		t.Errorf("config volume %+v", config)
	}
	path := volumes[mounts["/sys/fs/bpf"]].HostPath
	if path == nil || path.Path != "/sys/fs/bpf" || *path.Type != corev1.HostPathDirectory {
		t.Errorf("bpffs %+v", path)
	}
	if want := len(mounts); len(volumes) != want || want != len(pod.Containers[0].VolumeMounts) {
		t.Errorf("%d volumes for %d mounts", len(volumes), want)
	}
}

func checkProbes(t *testing.T, container corev1.Container, exposed bool) {
	t.Helper()
	host := "127.0.0.1"
	if exposed {
		host = ""
	}
	if len(container.Ports) != 1 || container.Ports[0].ContainerPort != metricsPort {
		t.Errorf("ports %+v", container.Ports)
	}
	for path, probe := range map[string]*corev1.Probe{
		"/healthz": container.LivenessProbe, "/readyz": container.ReadinessProbe,
	} {
		if probe == nil || probe.HTTPGet == nil || probe.HTTPGet.Path != path ||
			probe.HTTPGet.Host != host && !exposed || probe.HTTPGet.Port.StrVal != container.Ports[0].Name {
			t.Errorf("probe of %s: %+v", path, probe)
		}
	}
}

// TestSameManifest holds that it does not matter which way somebody goes.
func TestSameManifest(t *testing.T) {
	plain := readFile(t, deploy, "ip-masq-agent.yaml")
	if base := readFile(t, deploy, "kustomize", "base", "daemonset.yaml"); !bytes.Equal(plain, base) {
		t.Error("kustomize/base/daemonset.yaml is not a copy of ip-masq-agent.yaml")
	}
	for file, overlay := range map[string]string{"ip-masq-agent.yaml": "base", "ip-masq-agent-ebpf.yaml": "overlays/ebpf"} {
		if diff := cmp.Diff(daemonSet(t, readFile(t, deploy, file)), daemonSet(t, kustomize(t, overlay))); diff != "" {
			t.Errorf("%s and kustomize/%s differ (-plain +kustomize):\n%s", file, overlay, diff)
		}
	}
	for file, values := range map[string]string{"ip-masq-agent.yaml": "", "ip-masq-agent-ebpf.yaml": "{datapath: ebpf, resources: {requests: {memory: 128Mi}}}"} {
		text, err := helm(t, values)
		if err != nil {
			t.Fatal(err)
		}
		plain, chart := daemonSet(t, readFile(t, deploy, file)), daemonSet(t, text)
		if diff := cmp.Diff(plain.Spec.Template.Spec, chart.Spec.Template.Spec); diff != "" {
			t.Errorf("%s and the chart differ (-plain +chart):\n%s", file, diff)
		}
	}
}

// TestEveryFileIsRead finds manifests that nothing else looks at.
func TestEveryFileIsRead(t *testing.T) {
	count := 0
	err := filepath.WalkDir(deploy, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".yaml") {
			return err
		}
		text := readFile(t, path)
		if !bytes.Contains(text, []byte("SPDX-License-Identifier")) {
			t.Errorf("%s has no licence line", path)
		}
		if strings.Contains(path, "/templates/") || strings.Contains(path, "/monitoring/") || !bytes.Contains(text, []byte("\nkind: ")) ||
			strings.HasSuffix(path, "kustomization.yaml") {
			return nil
		}
		count += len(objects(t, text))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if count < 3 {
		t.Errorf("only %d objects found below %s", count, deploy)
	}
}

// golden compares got with a file, or writes it.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(string(readFile(t, path)), string(got)); diff != "" {
		t.Errorf("%s (-want +got, -update writes it):\n%s", path, diff)
	}
}

// TestREADMENamesWhatIsThere holds the README's commands and the files together.
func TestREADMENamesWhatIsThere(t *testing.T) {
	root := filepath.Dir(deploy)
	words := strings.FieldsFunc(string(readFile(t, root, "README.md")), func(r rune) bool { return strings.ContainsRune(" \n`()[],;=", r) })
	count := 0
	for _, word := range words {
		if !strings.HasPrefix(word, "deploy/") {
			continue
		}
		count++
		if _, err := os.Stat(filepath.Join(root, strings.TrimRight(word, ".:"))); err != nil {
			t.Errorf("README: %v", err)
		}
	}
	if count < 5 {
		t.Errorf("the README names %d files of deploy", count)
	}
}
