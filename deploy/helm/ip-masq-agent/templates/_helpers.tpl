{{/* SPDX-License-Identifier: Apache-2.0 */}}

{{- define "ip-masq-agent.labels" -}}
k8s-app: ip-masq-agent
app.kubernetes.io/name: ip-masq-agent
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "ip-masq-agent.exposed" -}}
{{- if or .Values.metrics.exposed .Values.metrics.podMonitor.enabled }}true{{ end }}
{{- end }}

{{/* The agent's arguments. A flag that nobody set is not passed: Helm takes what is null away. */}}
{{- define "ip-masq-agent.args" -}}
- --datapath={{ .Values.datapath }}
{{- if .Values.enableIPv6 }}
- --enable-ipv6
{{- end }}
{{- with .Values.flags }}
{{- if .masqChain }}
- --masq-chain={{ .masqChain }}
{{- end }}
{{- if kindIs "bool" (get . "nomasqAllReservedRanges") }}
- --nomasq-all-reserved-ranges={{ .nomasqAllReservedRanges }}
{{- end }}
{{- if kindIs "bool" (get . "randomFully") }}
- --random-fully={{ .randomFully }}
{{- end }}
{{- if .toPorts }}
- --to-ports={{ .toPorts }}
{{- end }}
{{- if .nodePortRange }}
- --node-port-range={{ .nodePortRange }}
{{- end }}
{{- if .invalid }}
- --invalid={{ .invalid }}
{{- end }}
{{- if .interfaces }}
- --interfaces={{ join "," .interfaces }}
{{- end }}
{{- if get . "natTableSize" }}
- --nat-table-size={{ int .natTableSize }}
{{- end }}
{{- if kindIs "bool" (get . "fastPath") }}
- --fast-path={{ .fastPath }}
{{- end }}
{{- if .logFormat }}
- --log-format={{ .logFormat }}
{{- end }}
{{- if not (kindIs "string" (get . "v")) }}
- --v={{ int .v }}
{{- end }}
{{- end }}
{{- if include "ip-masq-agent.exposed" . }}
- --metrics-bind-address=:{{ int .Values.metrics.port }}
{{- else if ne (int .Values.metrics.port) 9613 }}
- --metrics-bind-address=127.0.0.1:{{ int .Values.metrics.port }}
{{- end }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* What the datapath needs, and no more. */}}
{{- define "ip-masq-agent.capabilities" -}}
- NET_ADMIN
- NET_RAW
{{- if eq .Values.datapath "ebpf" }}
- BPF
- PERFMON
{{- if .Values.kernelsBefore511 }}
- SYS_RESOURCE
{{- end }}
{{- end }}
{{- end }}

{{/* How to say that ebpf runs without AppArmor: by a field, since Kubernetes 1.30. */}}
{{- define "ip-masq-agent.unconfined" -}}
{{- if eq .Values.datapath "ebpf" -}}
{{- semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version | ternary "field" "annotation" -}}
{{- end -}}
{{- end }}

{{- define "ip-masq-agent.annotations" -}}
{{- if eq (include "ip-masq-agent.unconfined" .) "annotation" }}
container.apparmor.security.beta.kubernetes.io/ip-masq-agent: unconfined
{{- end }}
{{- with .Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end }}
