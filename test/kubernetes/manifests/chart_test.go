// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"ip-masq-agent/test/kubernetes/chart"
)

// everything sets all that the chart knows.
const everything = `
image: {repository: registry.internal/agents/ip-masq-agent, tag: v1.2.3, pullPolicy: Always}
imagePullSecrets: [{name: registry}]
datapath: ebpf
enableIPv6: true
config:
  nonMasqueradeCIDRs: [10.0.0.0/8, "fc00::/7"]
  masqueradeCIDRs: [10.99.0.0/16]
  resyncInterval: 1m30s
flags:
  masqChain: IP-MASQ
  nomasqAllReservedRanges: true
  randomFully: false
  toPorts: 1024-29999,32768-65535
  nodePortRange: 30000-32767
  invalid: drop
  interfaces: [eth0, "bond*"]
  natTableSize: 1048576
  fastPath: true
  logFormat: json
  v: 0
extraArgs: [--pin-path=/sys/fs/bpf/other]
metrics: {exposed: true, port: 9700, podMonitor: {enabled: true, interval: 15s, labels: {release: prometheus}}}
resources: {limits: {memory: 1Gi}}
affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: pool, operator: In, values: [a]}]}]}}}
podAnnotations: {note: "true"}
podLabels: {team: network}
`

func TestChartGolden(t *testing.T) {
	for name, values := range map[string]string{"defaults": "", "ebpf": "datapath: ebpf", "everything": everything} {
		t.Run(name, func(t *testing.T) {
			text, err := helm(t, values)
			if err != nil {
				t.Fatal(err)
			}
			golden(t, "chart_"+name+".yaml", text)
			if len(objects(t, text)) == 0 {
				t.Error("no object")
			}
		})
	}
}

func TestChartPassesNoUnsetFlag(t *testing.T) {
	text, err := helm(t, "")
	if err != nil {
		t.Fatal(err)
	}
	if got := daemonSet(t, text).Spec.Template.Spec.Containers[0].Args; !slices.Equal(got, []string{"--datapath=iptables"}) {
		t.Errorf("arguments %q", got)
	}
}

func TestChartMakesTheConfig(t *testing.T) {
	text, err := helm(t, `config: {nonMasqueradeCIDRs: [], masqLinkLocal: true}`)
	if err != nil {
		t.Fatal(err)
	}
	for _, object := range objects(t, text) {
		if config, ok := object.(*corev1.ConfigMap); ok {
			if got, want := config.Data["ip-masq-agent"], "masqLinkLocal: true\nnonMasqueradeCIDRs: []"; strings.TrimSpace(got) != want {
				t.Errorf("config %q, want %q", got, want)
			}
			return
		}
	}
	t.Error("no ConfigMap")
}

// TestChartBeforeAppArmorWasAField holds that an API server of before gets no field
// that it does not know.
func TestChartBeforeAppArmorWasAField(t *testing.T) {
	for version, want := range map[string]bool{"v1.29.9": true, "v1.30.0": false, "v1.30.0-gke.100": false} {
		for datapath, unconfined := range map[string]bool{"iptables": false, "ebpf": true} {
			values := map[string]any{"datapath": datapath, "podAnnotations": map[string]any{"note": "kept"}}
			text, err := chart.RenderFor(t.Context(), filepath.Join(deploy, "helm", "ip-masq-agent"), values, version)
			if err != nil {
				t.Fatal(err)
			}
			template := daemonSet(t, text).Spec.Template
			_, annotated := template.Annotations["container.apparmor.security.beta.kubernetes.io/ip-masq-agent"]
			field := template.Spec.Containers[0].SecurityContext.AppArmorProfile != nil
			if annotated != (unconfined && want) || field != (unconfined && !want) || template.Annotations["note"] != "kept" {
				t.Errorf("%s, %s: annotations %v, field %v", version, datapath, template.Annotations, field)
			}
		}
	}
}

// TestSchemaRefuses holds that a mistake ends at `helm install`, with its name.
func TestSchemaRefuses(t *testing.T) {
	for values, want := range map[string]string{
		"datapath: nftables":                                "datapath",
		"dataPath: ebpf":                                    "dataPath",
		"flags: {toPorts: abc}":                             "toPorts",
		"flags: {invalid: maybe}":                           "invalid",
		"flags: {natTableSize: 0}":                          "natTableSize",
		"flags: {masqChain: NAME-OF-MORE-THAN-28-OCTETS}":   "",
		"flags: {masqChain: NAME-OF-A-CHAIN-OF-29-OCTETS1}": "masqChain",
		"config: {nonMasqueradeCIDR: [10.0.0.0/8]}":         "nonMasqueradeCIDR",
		"config: {nonMasqueradeCIDRs: [10.0.0.0]}":          "nonMasqueradeCIDRs",
		"config: {nonMasqueradeCIDRs: [null]}":              "nonMasqueradeCIDRs",
		"config: {resyncInterval: 60}":                      "resyncInterval",
		"config: {resyncInterval: soon}":                    "resyncInterval",
		"metrics: {port: 0}":                                "port",
		"extraArgs: [status]":                               "extraArgs",
		"image: {repository: ''}":                           "repository",
		"updateStrategy: {type: Recreate}":                  "updateStrategy",
	} {
		t.Run(values, func(t *testing.T) {
			_, err := helm(t, values)
			if want == "" {
				if err != nil {
					t.Errorf("refused: %v", err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got error %v, want one with %q", err, want)
			}
		})
	}
}

// TestSchemaKnowsAllValues holds values.yaml and its schema together.
func TestSchemaKnowsAllValues(t *testing.T) {
	chart := loadChart(t)
	var schema struct {
		Properties map[string]any `json:"properties"`
	}
	if err := json.Unmarshal(chart.Schema, &schema); err != nil {
		t.Fatal(err)
	}
	for name := range chart.Values {
		if _, ok := schema.Properties[name]; !ok {
			t.Errorf("the schema has no %s", name)
		}
	}
	for name := range schema.Properties {
		if _, ok := chart.Values[name]; !ok && name != "global" {
			t.Errorf("values.yaml has no %s", name)
		}
	}
}
