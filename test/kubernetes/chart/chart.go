// SPDX-License-Identifier: Apache-2.0

// Package chart renders the Helm chart as `helm install` does, for tests.
package chart

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	chartv2 "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"helm.sh/helm/v4/pkg/strvals"
)

const usualKubernetes = "v1.35.0"

// Load reads a chart's directory.
func Load(dir string) (*chartv2.Chart, error) { return loader.Load(dir) }

// Set reads values as the flag --set gives them.
func Set(text string) (map[string]any, error) { return strvals.Parse(text) }

// Render gives the manifest of a chart's directory with values, which it checks
// against the schema, for a Kubernetes that is maintained.
func Render(ctx context.Context, dir string, values map[string]any) ([]byte, error) {
	return RenderFor(ctx, dir, values, usualKubernetes)
}

// RenderFor is Render for a version of Kubernetes.
func RenderFor(ctx context.Context, dir string, values map[string]any, kubernetes string) ([]byte, error) {
	loaded, err := Load(dir)
	if err != nil {
		return nil, fmt.Errorf("load chart: %w", err)
	}
	release := common.ReleaseOptions{Name: "ip-masq-agent", Namespace: "kube-system", IsInstall: true, Revision: 1}
	version, err := common.ParseKubeVersion(kubernetes)
	if err != nil {
		return nil, err
	}
	capabilities := common.DefaultCapabilities.Copy()
	capabilities.KubeVersion = *version
	all, err := util.ToRenderValues(loaded, values, release, capabilities)
	if err != nil {
		return nil, err
	}
	files, err := (engine.Engine{Strict: true}).RenderWithContext(ctx, loaded, all)
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
