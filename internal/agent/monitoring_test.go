// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"
)

// monitoring is where the rules and the dashboard are.
const monitoring = "../../deploy/monitoring"

func readMonitoring(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(monitoring, name))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func promtool(t *testing.T, args ...string) {
	t.Helper()
	check := exec.CommandContext(t.Context(), "promtool", args...)
	check.Dir = monitoring
	if said, err := check.CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, said)
	}
}

func TestAlerts(t *testing.T) {
	promtool(t, "check", "rules", "alerts.yaml")
	promtool(t, "test", "rules", "alerts_test.yaml")
	for _, rule := range alerts(t) {
		if !bytes.Contains(readMonitoring(t, "alerts_test.yaml"), []byte("alertname: "+rule+"\n")) {
			t.Errorf("no test sees %s fire", rule)
		}
	}
}

func alerts(t *testing.T) (names []string) {
	t.Helper()
	for _, match := range regexp.MustCompile(`alert: (\w+)`).FindAllSubmatch(readMonitoring(t, "alerts.yaml"), -1) {
		names = append(names, string(match[1]))
	}
	if len(names) == 0 {
		t.Fatal("no alerts")
	}
	return names
}

// The operator's form is made of the plain one, with -update.
func TestPrometheusRuleIsMadeOfAlerts(t *testing.T) {
	head, groups, found := strings.Cut(string(readMonitoring(t, "alerts.yaml")), "\ngroups:")
	if !found {
		t.Fatalf("no groups behind\n%s", head)
	}
	rule := `# SPDX-License-Identifier: Apache-2.0
#
# Made of alerts.yaml by a test: go test ./internal/agent -run PrometheusRule -update
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ip-masq-agent
  namespace: kube-system
  labels:
    k8s-app: ip-masq-agent
spec:
  groups:` + strings.ReplaceAll(groups, "\n  ", "\n    ")
	golden(t, filepath.Join(monitoring, "prometheusrule.yaml"), rule)

	var alone, within struct {
		Groups yaml.Node
		Spec   struct{ Groups yaml.Node }
	}
	if err := yaml.Unmarshal(readMonitoring(t, "alerts.yaml"), &alone); err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal([]byte(rule), &within); err != nil {
		t.Fatal(err)
	}
	text := func(n *yaml.Node) string {
		var value any
		if err := n.Decode(&value); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(value)
	}
	if diff := cmp.Diff(text(&alone.Groups), text(&within.Spec.Groups)); diff != "" {
		t.Errorf("they say different things (-alerts.yaml +prometheusrule.yaml):\n%s", diff)
	}
}

// existing are the metrics that there are, histograms with their three names.
func existing(t *testing.T) map[string]bool {
	t.Helper()
	page, err := os.ReadFile("testdata/metrics_busy.txt")
	if err != nil {
		t.Fatal(err)
	}
	names := make(map[string]bool)
	for _, match := range regexp.MustCompile(`(?m)^(\w+)[{ ]`).FindAllSubmatch(page, -1) {
		names[string(match[1])] = true
	}
	return names
}

func TestDashboardAndAlertsUseWhatExists(t *testing.T) {
	used := make(map[string]bool)
	for _, file := range []string{"dashboard.json", "alerts.yaml", "alerts_test.yaml"} {
		names := regexp.MustCompile(metricPrefix+`\w+`).FindAllString(string(readMonitoring(t, file)), -1)
		for _, name := range names {
			used[name] = true
			if !existing(t)[name] {
				t.Errorf("%s uses %s, which does not exist", file, name)
			}
		}
	}
	for name := range existing(t) {
		ofHistogram := strings.HasSuffix(name, "_sum") || strings.HasSuffix(name, "_count")
		if !used[name] && !ofHistogram {
			t.Errorf("%s is in no panel and in no alert", name)
		}
	}
}

// The page for operators explains each metric and each alert.
func TestOperationsExplainsAll(t *testing.T) {
	page := string(readMonitoring(t, "../../docs/operations.md"))
	for name := range existing(t) {
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			name = strings.TrimSuffix(name, suffix)
		}
		if short := strings.TrimPrefix(name, metricPrefix); !strings.Contains(page, "`"+short+"`") && !strings.Contains(page, "`"+short+"{") {
			t.Errorf("says nothing of %s", name)
		}
	}
	for _, name := range alerts(t) {
		if !strings.Contains(page, "| "+name+" |") {
			t.Errorf("says nothing of %s", name)
		}
	}
}

// Each query of the dashboard is one that Prometheus takes.
func TestDashboardQueries(t *testing.T) {
	var dashboard struct {
		Panels []struct {
			ID          int
			Type, Title string
			Targets     []struct{ Expr string }
			GridPos     struct{ X, Y, W, H int }
		}
	}
	if err := json.Unmarshal(readMonitoring(t, "dashboard.json"), &dashboard); err != nil {
		t.Fatal(err)
	}
	var rules strings.Builder
	rules.WriteString("groups:\n- name: dashboard\n  rules:\n")
	ids := make(map[int]bool)
	for _, panel := range dashboard.Panels {
		if ids[panel.ID] || panel.GridPos.X+panel.GridPos.W > 24 || panel.Title == "" {
			t.Errorf("panel %+v", panel)
		}
		ids[panel.ID] = true
		if len(panel.Targets) == 0 && panel.Type != "row" {
			t.Errorf("%s shows nothing", panel.Title)
		}
		for i, target := range panel.Targets {
			expr := strings.ReplaceAll(target.Expr, "$__rate_interval", "5m")
			fmt.Fprintf(&rules, "  - record: panel:%d:%d\n    expr: %q\n", panel.ID, i, expr)
		}
	}
	file := filepath.Join(t.TempDir(), "dashboard.yaml")
	if err := os.WriteFile(file, []byte(rules.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "check", "rules", file)
}
