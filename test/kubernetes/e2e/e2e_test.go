// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"ip-masq-agent/test/kubernetes/chart"
)

const (
	iptablesManifest = "deploy/ip-masq-agent.yaml"
	ebpfManifest     = "deploy/ip-masq-agent-ebpf.yaml"
	anImage          = "registry.example.com/ip-masq-agent:latest" // in manifests
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
		{"without an agent pods are seen", func(t *testing.T, c cluster) { c.checkTraffic(t) }},
		{"the API server takes every manifest", takesManifests},
		{"iptables, by the commands of the README", followREADME},
		{"to ebpf under traffic", switchToEBPF},
		{"back to iptables under traffic", switchBack},
		{"IPv6 too", enableIPv6},
		{"to ebpf with IPv6, by a kustomization", switchWithIPv6},
		{"an agent is killed", killAgent},
		{"deleted, the datapath stays", deleteAgent},
		{"cleaned up, nothing is left", cleanUp},
		{"by Helm", installByHelm},
		{"config is made, edited, broken and deleted", changeConfig},
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
	text := c.readFile(t, "test/kubernetes/e2e/testdata/pods.yaml")
	c.kubectlStdin(t, strings.Replace(text, "NODE", nodes[len(nodes)-1], 1), "apply", "-f", "-")
	for _, node := range nodes {
		c.kubectl(t, "run", "client-"+node, "--image=localhost/probe:e2e", "--image-pull-policy=Never", "--restart=Never",
			"--overrides", `{"spec": {"nodeName": "`+node+`"}}`)
	}
	c.kubectl(t, "wait", "--for=condition=Ready", "pod", "--all", "--timeout=80s")
	eventually(t, func() error { // kube-proxy has the services
		var services []expectation
		for _, f := range []family{ipv4, ipv6} {
			services = append(services, expectation{way("udp", f.clusterIP, port), anybody},
				expectation{way("udp", f.of(nodes[0]), f.nodePort), anybody})
		}
		return c.asks(t, "client-"+nodes[0], services...)
	})
}

// takesManifests has the API server validate what the repository ships. Kinds of
// the Prometheus operator it does not know.
func takesManifests(t *testing.T, c cluster) {
	dry := []string{"apply", "--dry-run=server", "--validate=strict", "--output=name"}
	for _, file := range []string{iptablesManifest, ebpfManifest} {
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

// followREADME runs the commands that ../run has taken from there. What is before
// the first kubectl it has run itself: that made the image.
func followREADME(t *testing.T, c cluster) {
	said := c.on(t, "node1", "bash", "-euc", c.readme)
	for _, want := range []string{"successfully rolled out", "iptables", "10.0.0.0/8"} {
		if !strings.Contains(said, want) {
			t.Errorf("it does not say %q:\n%s", want, said)
		}
	}
	c.checkTraffic(t, ipv4)
	c.kubectl(t, "delete", "configmap", "ip-masq-agent", "--namespace=kube-system")
}

func switchToEBPF(t *testing.T, c cluster) {
	c.startTalk(t, ipv4)
	c.apply(t, "-k", "deploy/kustomize/overlays/ebpf")
	c.checkTraffic(t, ipv4)
	c.checkTalk(t, ipv4)
	if flows := c.agent(t, "node1", "nat", "list"); !strings.Contains(flows, c.podAddress(t, "client-node1", ipv4)) {
		t.Errorf("nat list:\n%s", flows)
	}
}

// switchBack goes to a manifest without BPF, with which the default profile of
// seccomp lets nobody look at maps: open connections go on all the same, and
// status says what is left, until the agent gets the right to end it.
func switchBack(t *testing.T, c cluster) {
	c.startTalk(t, ipv4)
	c.apply(t, "-f", iptablesManifest)
	c.checkTraffic(t, ipv4)
	for _, node := range c.nodes(t) {
		if s := c.status(t, node); !s.Drain.Active || !strings.Contains(strings.Join(s.Warnings, "\n"), "capability BPF") {
			t.Errorf("%s does not say that programs are left: %+v", node, s)
		}
	}
	c.kubectl(t, "patch", "daemonset/ip-masq-agent", "--namespace=kube-system", "--type=json", "--patch",
		`[{"op": "add", "path": "/spec/template/spec/containers/0/securityContext/capabilities/add/-", "value": "BPF"},
		{"op": "add", "path": "/spec/template/spec/containers/0/securityContext/appArmorProfile", "value": {"type": "Unconfined"}}]`)
	c.rolledOut(t)
	c.checkTraffic(t, ipv4)
	for _, node := range c.nodes(t) {
		if drain := c.status(t, node).Drain; !drain.Active || drain.Entries == 0 {
			t.Errorf("%s drains %+v while flows of ebpf are open", node, drain)
		}
	}
	c.checkTalk(t, ipv4)
}

// enableIPv6 needs a list: there is none by default.
func enableIPv6(t *testing.T, c cluster) {
	c.kubectl(t, "create", "configmap", "ip-masq-agent", "--namespace=kube-system",
		"--from-literal=config=nonMasqueradeCIDRs: [10.0.0.0/8, fd00::/8]")
	c.apply(t, "-k", "deploy/kustomize/overlays/ipv6")
	c.checkTraffic(t, ipv4, ipv6)
}

// switchWithIPv6 follows what kustomize/base says about a kustomization of one's
// own, with our image.
func switchWithIPv6(t *testing.T, c cluster) {
	c.startTalk(t, ipv4, ipv6)
	c.apply(t, "-k", c.ownKustomization(t))
	c.checkTraffic(t, ipv4, ipv6)
	c.checkTalk(t, ipv4, ipv6)
	for _, node := range c.nodes(t) {
		for _, serving := range c.status(t, node).Interfaces {
			if serving.SNATv4 != ipv4.of(node) || serving.SNATv6 != ipv6.of(node) {
				t.Errorf("%s serves %+v", node, serving)
			}
		}
	}
}

func killAgent(t *testing.T, c cluster) {
	c.startTalk(t, ipv4, ipv6)
	before := c.agentPod(t, "node1")
	c.kubectl(t, "delete", "pod", "--namespace=kube-system", before, "--force", "--grace-period=0")
	eventually(t, func() error {
		if after := c.agentPod(t, "node1"); after == before || after == "" {
			return errors.New("no new pod yet")
		}
		return nil
	})
	c.rolledOut(t)
	c.checkTraffic(t, ipv4, ipv6)
	c.checkTalk(t, ipv4, ipv6)
}

// changeConfig goes by what the outside sees: exempt, it sees the pod.
func changeConfig(t *testing.T, c cluster) {
	const exempt = "nonMasqueradeCIDRs: [10.0.0.0/8, 203.0.113.0/24]\n"
	pod, own, node := "client-node1", c.podAddress(t, "client-node1", ipv4), ipv4.of("node1")
	seenAs := func(want string) {
		t.Helper()
		eventually(t, func() error { return c.asks(t, pod, expectation{way("tcp", ipv4.outside, port), want}) })
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
	c.startTalk(t, ipv4, ipv6)
	c.kubectl(t, "delete", "-f", ebpfManifest, "--wait")
	c.kubectl(t, "delete", "configmap", "ip-masq-agent", "--namespace=kube-system")
	c.gone(t)
	c.checkTraffic(t, ipv4, ipv6)
	c.checkTalk(t, ipv4, ipv6)
}

// gone waits until no agent is left.
func (c cluster) gone(t *testing.T) {
	t.Helper()
	c.kubectl(t, "wait", "--namespace=kube-system", "--for=delete", "pod", "--selector=k8s-app=ip-masq-agent", "--timeout=80s")
}

func cleanUp(t *testing.T, c cluster) {
	text := c.readFile(t, "deploy/cleanup.yaml")
	for _, node := range c.nodes(t) {
		c.kubectlStdin(t, strings.ReplaceAll(text, "NODE", node), "apply", "-f", "-")
	}
	selector := "--selector=k8s-app=ip-masq-agent-cleanup"
	c.kubectl(t, "wait", "--namespace=kube-system", "--for=jsonpath={.status.phase}=Succeeded", "pod", selector, "--timeout=80s")
	c.kubectl(t, "delete", "pod", "--namespace=kube-system", selector)
	c.checkTraffic(t)
	for _, node := range c.nodes(t) {
		if rules := c.on(t, node, "iptables-nft-save"); strings.Contains(rules, "IP-MASQ") {
			t.Errorf("%s has rules:\n%s", node, rules)
		}
		if pins := c.onNode(t, node, "ls", "/sys/fs/bpf"); strings.Contains(pins, "masq") {
			t.Errorf("%s has pins: %s", node, pins)
		}
	}
}

// installByHelm renders what the README's command installs, with our image.
func installByHelm(t *testing.T, c cluster) {
	command := regexp.MustCompile("`helm install ip-masq-agent ([^ ]+)\n--namespace kube-system --set ([^ `]+)`").FindStringSubmatch(c.readFile(t, "README.md"))
	if command == nil {
		t.Fatal("the README does not say how, or otherwise")
	}
	repository, tag := c.imageParts()
	values, err := chart.Set(strings.NewReplacer("repository=…", "repository="+repository, "tag=…", "tag="+tag).Replace(command[2]))
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := chart.Render(t.Context(), filepath.Join(c.repository, command[1]), values)
	if err != nil {
		t.Fatal(err)
	}
	c.kubectlStdin(t, string(manifest), "apply", "-f", "-")
	c.rolledOut(t)
	c.checkTraffic(t, ipv4)
}

func classicManifest(t *testing.T, c cluster) {
	c.kubectl(t, "delete", "-f", ebpfManifest, "--wait")
	c.gone(t)
	cleanUp(t, c)
	text := c.readFile(t, "test/kubernetes/e2e/testdata/classic.yaml")
	c.kubectl(t, "create", "configmap", "ip-masq-agent", "--namespace=kube-system", "--from-literal=config=resyncInterval: 5s\n")
	c.kubectlStdin(t, strings.ReplaceAll(text, anImage, c.image), "apply", "-f", "-")
	c.rolledOut(t)
	c.checkTraffic(t, ipv4)
	// And from there to ours, in place.
	c.apply(t, "-f", iptablesManifest)
	c.checkTraffic(t, ipv4)
	c.kubectl(t, "delete", "configmap", "ip-masq-agent", "--namespace=kube-system")
	c.kubectl(t, "delete", "-f", iptablesManifest, "--wait")
	c.gone(t)
	cleanUp(t, c)
}
