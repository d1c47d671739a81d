// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	chartv2 "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
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
	chart, err := loader.Load(filepath.Join(deploy, "helm", "ip-masq-agent"))
	if err != nil {
		t.Fatal(err)
	}
	return chart
}

// helm renders the chart with values, which are YAML, and checks them against
// the schema.
func helm(t *testing.T, values string) ([]byte, error) {
	t.Helper()
	var parsed map[string]any
	if err := yaml.UnmarshalStrict([]byte(values), &parsed); err != nil {
		t.Fatal(err)
	}
	release := common.ReleaseOptions{Name: "ip-masq-agent", Namespace: "kube-system", IsInstall: true, Revision: 1}
	chart := loadChart(t)
	all, err := util.ToRenderValues(chart, parsed, release, common.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	files, err := (engine.Engine{Strict: true}).RenderWithContext(t.Context(), chart, all)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if text := strings.TrimSpace(files[name]); strings.HasSuffix(name, ".yaml") && text != "" {
			out.WriteString("---\n" + text + "\n")
		}
	}
	return out.Bytes(), nil
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
