// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	chartv2 "helm.sh/helm/v4/pkg/chart/v2"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"

	"ip-masq-agent/test/kubernetes/chart"
)

// deploy is the directory under test.
const deploy = "../../../deploy"

func readFile(t *testing.T, elements ...string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(elements...))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// kustomize builds a directory below deploy/kustomize.
func kustomize(t *testing.T, dir string) []byte {
	t.Helper()
	resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).
		Run(filesys.MakeFsOnDisk(), filepath.Join(deploy, "kustomize", dir))
	if err != nil {
		t.Fatal(err)
	}
	text, err := resources.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func loadChart(t *testing.T) *chartv2.Chart {
	t.Helper()
	loaded, err := chart.Load(filepath.Join(deploy, "helm", "ip-masq-agent"))
	if err != nil {
		t.Fatal(err)
	}
	return loaded
}

// helm renders the chart with values, which are YAML, and checks them against
// the schema.
func helm(t *testing.T, values string) ([]byte, error) {
	t.Helper()
	var parsed map[string]any
	if err := yaml.UnmarshalStrict([]byte(values), &parsed); err != nil {
		t.Fatal(err)
	}
	return chart.Render(t.Context(), filepath.Join(deploy, "helm", "ip-masq-agent"), parsed)
}

// objects decodes all documents of a manifest: unknown fields, duplicate keys
// and unknown kinds are errors, but for kinds that Kubernetes does not bring.
func objects(t *testing.T, text []byte) []runtime.Object {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{appsv1.AddToScheme, corev1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	var found []runtime.Object
	documents := utilyaml.NewDocumentDecoder(io.NopCloser(bytes.NewReader(text)))
	buffer := make([]byte, len(text)+1)
	for {
		n, err := documents.Read(buffer)
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			t.Fatal(err)
		}
		document := buffer[:n]
		if len(bytes.TrimSpace(document)) == 0 || bytes.Contains(document, []byte("apiVersion: monitoring.coreos.com/")) {
			continue
		}
		object, _, err := decoder.Decode(document, nil, nil)
		if err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		found = append(found, object)
	}
}

// daemonSet is the one that a manifest has.
func daemonSet(t *testing.T, text []byte) *appsv1.DaemonSet {
	t.Helper()
	for _, object := range objects(t, text) {
		if set, ok := object.(*appsv1.DaemonSet); ok {
			return set
		}
	}
	t.Fatal("no DaemonSet")
	return nil
}
