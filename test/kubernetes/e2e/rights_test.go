// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// rightsPod syncs once in a pod's own network, where the legacy backend is in
// use, with some capabilities.
const rightsPod = `
apiVersion: v1
kind: Pod
metadata: {name: %[1]s}
spec:
  restartPolicy: Never
  securityContext: {seccompProfile: {type: RuntimeDefault}}
  initContainers:
    - name: legacy
      image: %[5]s
      imagePullPolicy: IfNotPresent
      command: [iptables-legacy, -t, mangle, -N, KUBE-IPTABLES-HINT]
      securityContext: {capabilities: {drop: [ALL], add: [NET_ADMIN, NET_RAW]}}
      volumeMounts: [{name: run, mountPath: /run}]
  containers:
    - name: agent
      image: %[5]s
      imagePullPolicy: IfNotPresent
      args: [--once, --metrics-bind-address=0, --pin-path=/sys/fs/bpf/%[1]s, --datapath=%[2]s]
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL], add: [%[3]s]}
      volumeMounts: [{name: run, mountPath: /run}%[4]s]
  volumes: [{name: run, emptyDir: {}}, {name: bpf, hostPath: {path: /sys/fs/bpf, type: Directory}}]
`

// capabilities takes each one away in turn. What is missed has a name.
func capabilities(t *testing.T, c cluster) {
	iptables := []string{"NET_ADMIN", "NET_RAW"}
	ebpf := append(slices.Clone(iptables), "BPF", "PERFMON")
	for i, test := range []struct {
		datapath, without string
		have              []string
		phase             string
		says              string
	}{
		{"iptables", "", iptables, "Succeeded", "backend=legacy"},
		{"iptables", "NET_ADMIN", iptables, "Failed", "ermission denied"},
		{"iptables", "NET_RAW", iptables, "Succeeded", "can't initialize iptables table"},
		{"ebpf", "", ebpf, "Succeeded", "conntrack state of packets: yes"},
		{"ebpf", "BPF", ebpf, "Failed", "needs the capability BPF"},
		{"ebpf", "NET_ADMIN", ebpf, "Failed", "not permitted"},
		{"ebpf", "PERFMON", ebpf, "Succeeded", "the capability PERFMON is missing"},
		{"ebpf", "NET_RAW", ebpf, "Failed", "ermission denied"},
	} {
		t.Run(test.datapath+" without "+cmp.Or(test.without, "none"), func(t *testing.T) {
			have := slices.DeleteFunc(slices.Clone(test.have), func(name string) bool { return name == test.without })
			pod, mount := fmt.Sprintf("rights-%d", i), ""
			if test.datapath == "ebpf" {
				mount = ", {name: bpf, mountPath: /sys/fs/bpf}"
			}
			c.kubectlStdin(t, fmt.Sprintf(rightsPod, pod, test.datapath, strings.Join(have, ", "), mount, c.image), "apply", "-f", "-")
			_, err := c.tryKubectl(t, "", "wait", "pod/"+pod, "--for=jsonpath={.status.phase}="+test.phase, "--timeout=60s")
			if log := c.kubectl(t, "logs", pod, "--all-containers"); err != nil || !strings.Contains(log, test.says) {
				t.Errorf("it did not end as %s and say %q (%v):\n%s", test.phase, test.says, err, log)
			}
			c.kubectl(t, "delete", "pod", pod, "--now")
		})
	}
}
