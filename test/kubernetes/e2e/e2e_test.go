// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	iptablesManifest = "deploy/ip-masq-agent.yaml"
	ebpfOverlay      = "deploy/kustomize/overlays/ebpf"
)

// TestCluster is one story: each step starts where the one before it ended.
func TestCluster(t *testing.T) {
	c := findCluster(t)
	c.startOutside(t)
	c.startPods(t)
	for _, step := range []struct {
		name string
		run  func(*testing.T, cluster)
	}{
		{"without an agent pods are seen", func(t *testing.T, c cluster) { c.checkTraffic(t, false) }},
		{"the API server takes every manifest", takesManifests},
		{"iptables", startIPTables},
		{"to ebpf under traffic", switchToEBPF},
		{"an agent is killed", killAgent},
		{"config is made, edited, broken and deleted", changeConfig},
		{"deleted, the datapath stays", deleteAgent},
		{"cleaned up, nothing is left", cleanUp},
		{"the classic manifest with another image", classicManifest},
		{"each capability is needed", capabilities},
	} {
		if !t.Run(step.name, func(t *testing.T) { step.run(t, c) }) {
			return
		}
	}
}

// startPods starts the server on the last node, and a client on each.
func (c cluster) startPods(t *testing.T) {
	t.Helper()
	nodes := c.nodes(t)
	eventually(t, func() error { // the controllers make it
		_, err := c.tryKubectl(t, "", "get", "serviceaccount", "default")
		return err
	})
	text, err := os.ReadFile(filepath.Join(c.repository, "test/kubernetes/e2e/testdata/pods.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	c.kubectlStdin(t, strings.Replace(string(text), "NODE", nodes[len(nodes)-1], 1), "apply", "-f", "-")
	for _, node := range nodes {
		c.kubectl(t, "run", "client-"+node, "--image=localhost/probe:e2e", "--image-pull-policy=Never", "--restart=Never",
			"--overrides", `{"spec": {"nodeName": "`+node+`"}}`)
	}
	c.kubectl(t, "wait", "--for=condition=Ready", "pod", "--all", "--timeout=80s")
	eventually(t, func() error { // kube-proxy has the services
		_, err := c.seen(t, "client-"+nodes[0], "udp", clusterIP)
		return err
	})
}

// takesManifests has the API server validate what the repository ships. Kinds of
// the Prometheus operator it does not know.
func takesManifests(t *testing.T, c cluster) {
	dry := []string{"apply", "--dry-run=server", "--validate=strict", "--output=name"}
	for _, file := range []string{iptablesManifest, "deploy/ip-masq-agent-ebpf.yaml"} {
		c.kubectl(t, append(dry, "-f", file)...)
	}
	for _, overlay := range []string{"ebpf", "ipv6", "kernels-before-5.11"} {
		c.kubectl(t, append(dry, "-k", "deploy/kustomize/overlays/"+overlay)...)
	}
	monitoring := c.kubectl(t, "kustomize", "deploy/kustomize/overlays/monitoring")
	c.kubectlStdin(t, ownKinds(monitoring), append(dry, "-f", "-")...)
	charts, err := filepath.Glob(filepath.Join(c.repository, "test/kubernetes/manifests/testdata/chart_*.yaml"))
	if err != nil || len(charts) == 0 {
		t.Fatalf("no charts: %v", err)
	}
	for _, chart := range charts {
		text, err := os.ReadFile(chart)
		if err != nil {
			t.Fatal(err)
		}
		c.kubectlStdin(t, ownKinds(string(text)), append(dry, "-f", "-")...)
	}
	if _, err := c.tryKubectl(t, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\ndate: {}\n", append(dry, "-f", "-")...); err == nil {
		t.Error("it takes anything")
	}
}

func ownKinds(text string) string {
	var own []string
	for document := range strings.SplitSeq(text, "---\n") {
		if !strings.Contains(document, "apiVersion: monitoring.coreos.com") {
			own = append(own, document)
		}
	}
	return strings.Join(own, "---\n")
}

func startIPTables(t *testing.T, c cluster) {
	c.apply(t, "-f", iptablesManifest)
	c.checkTraffic(t, true)
	if status := c.agent(t, "node1", "status"); !strings.Contains(status, "iptables") {
		t.Errorf("status:\n%s", status)
	}
}

func switchToEBPF(t *testing.T, c cluster) {
	c.startTalk(t)
	c.apply(t, "-k", ebpfOverlay)
	c.checkTraffic(t, true)
	c.checkTalk(t)
	if flows := c.agent(t, "node1", "nat", "list"); !strings.Contains(flows, c.podAddress(t, "client-node1")) {
		t.Errorf("nat list:\n%s", flows)
	}
	if rules := c.on(t, "node1", "iptables-nft-save", "-t", "nat"); strings.Contains(rules, "IP-MASQ-AGENT") {
		t.Errorf("rules are left:\n%s", rules)
	}
}

func killAgent(t *testing.T, c cluster) {
	c.startTalk(t)
	before := c.agentPod(t, "node1")
	c.kubectl(t, "delete", "pod", "--namespace=kube-system", before, "--force", "--grace-period=0")
	eventually(t, func() error {
		if after := c.agentPod(t, "node1"); after == before || after == "" {
			return errors.New("no new pod yet")
		}
		return nil
	})
	c.rolledOut(t)
	c.checkTraffic(t, true)
	c.checkTalk(t)
}

// changeConfig goes by what the outside sees: exempt, it sees the pod.
func changeConfig(t *testing.T, c cluster) {
	const exempt = "nonMasqueradeCIDRs: [10.0.0.0/8, 203.0.113.0/24]\n"
	pod, own, node := "client-node1", c.podAddress(t, "client-node1"), c.nodeAddress(t, "node1")
	seenAs := func(want string) {
		t.Helper()
		eventually(t, func() error { return c.sees(t, pod, "tcp", outside, want) })
	}
	edit := func(data string) {
		t.Helper()
		c.kubectl(t, "patch", "configmap", "ip-masq-agent", "--namespace=kube-system", "--patch", "data: "+data)
	}
	c.kubectl(t, "create", "configmap", "ip-masq-agent", "--from-file=deploy/agent-config", "--namespace=kube-system")
	eventually(t, func() error {
		if status := c.agent(t, "node1", "status", "-o", "json"); strings.Contains(status, `"source":"defaults"`) {
			return fmt.Errorf("status: %s", status)
		}
		return nil
	})
	seenAs(node)
	edit(fmt.Sprintf("{ip-masq-agent: %q}", exempt))
	seenAs(own)
	edit(`{ip-masq-agent: "nonMasqueradeCIDRs: [300.0.0.0/8]"}`)
	eventually(t, func() error {
		if log := c.kubectl(t, "logs", "--namespace=kube-system", c.agentPod(t, "node1")); !strings.Contains(log, "300.0.0.0/8") {
			return errors.New("the log does not name the fault")
		}
		return nil
	})
	seenAs(own) // the last good one stays in force
	c.kubectl(t, "delete", "configmap", "ip-masq-agent", "--namespace=kube-system")
	seenAs(node)
	// The key of the classic project does as well.
	c.kubectl(t, "create", "configmap", "ip-masq-agent", "--namespace=kube-system", "--from-literal=config="+exempt)
	seenAs(own)
	c.kubectl(t, "delete", "configmap", "ip-masq-agent", "--namespace=kube-system")
	seenAs(node)
}

func deleteAgent(t *testing.T, c cluster) {
	c.startTalk(t)
	c.kubectl(t, "delete", "-k", ebpfOverlay, "--wait")
	eventually(t, func() error {
		if pods := c.kubectl(t, "get", "pods", "--namespace=kube-system", "--selector=k8s-app=ip-masq-agent", "--output=name"); pods != "" {
			return errors.New("still there: " + pods)
		}
		return nil
	})
	c.checkTraffic(t, true)
	c.checkTalk(t)
}

func cleanUp(t *testing.T, c cluster) {
	text, err := os.ReadFile(filepath.Join(c.repository, "deploy/cleanup.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, node := range c.nodes(t) {
		c.kubectlStdin(t, strings.ReplaceAll(string(text), "NODE", node), "apply", "-f", "-")
	}
	selector := "--selector=k8s-app=ip-masq-agent-cleanup"
	c.kubectl(t, "wait", "--namespace=kube-system", "--for=jsonpath={.status.phase}=Succeeded", "pod", selector, "--timeout=80s")
	c.kubectl(t, "delete", "pod", "--namespace=kube-system", selector)
	c.checkTraffic(t, false)
	for _, node := range c.nodes(t) {
		if rules := c.on(t, node, "iptables-nft-save"); strings.Contains(rules, "IP-MASQ") {
			t.Errorf("%s has rules:\n%s", node, rules)
		}
		if pins := c.onNode(t, node, "ls", "/sys/fs/bpf"); strings.Contains(pins, "masq") {
			t.Errorf("%s has pins: %s", node, pins)
		}
	}
}

func classicManifest(t *testing.T, c cluster) {
	c.kubectl(t, "create", "configmap", "ip-masq-agent", "--namespace=kube-system", "--from-literal=config=resyncInterval: 5s\n")
	c.apply(t, "-f", "test/kubernetes/e2e/testdata/classic.yaml")
	c.checkTraffic(t, true)
	// And from there to ours, in place.
	c.apply(t, "-f", iptablesManifest)
	c.checkTraffic(t, true)
	c.kubectl(t, "delete", "configmap", "ip-masq-agent", "--namespace=kube-system")
	deleteAgentOf(t, c, iptablesManifest)
}

func deleteAgentOf(t *testing.T, c cluster, manifest string) {
	t.Helper()
	c.kubectl(t, "delete", "-f", manifest, "--wait")
	cleanUp(t, c)
}
