{{/* Helpers for a tier take a dict: root (the top scope) and tier (gateway, verifier, drafter or redis). */}}

{{- define "paceline.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{- .Values.fullnameOverride | default $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "paceline.name" -}}
{{- include "paceline.fullname" .root }}-{{ .tier -}}
{{- end -}}

{{- define "paceline.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .tier }}
{{- end -}}

{{- define "paceline.labels" -}}
{{ include "paceline.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "paceline.metadata" -}}
name: {{ include "paceline.name" . }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "paceline.labels" . | nindent 2 }}
{{- end -}}

{{/* The scalable workload of a tier. */}}
{{- define "paceline.kind" -}}
{{- if ne .tier "verifier" -}}Deployment
{{- else -}}{{ ternary "LeaderWorkerSet" "StatefulSet" (gt (int .root.Values.verifier.hosts) 1) }}
{{- end -}}
{{- end -}}

{{- define "paceline.image" -}}
{{- $image := .root.Values.image -}}
{{- $values := get .root.Values .tier -}}
{{- $variant := "" -}}
{{- if eq ($values.engine | default "") "vllm" }}{{ $variant = "-vllm" -}}
{{- else if and .root.Values.simulate (ne .tier "gateway") }}{{ $variant = "-simulated" }}{{ end -}}
{{- $named := printf "%s/%s%s:%s" $image.repository .tier $variant ($image.tag | default .root.Chart.AppVersion) -}}
{{- with get $image.digest .tier }}{{ $named = printf "%s@%s" $named . }}{{ end -}}
{{- $values.image | default $named -}}
{{- end -}}

{{/* Ports of a service with a model; its Service, probes and NetworkPolicy read them here. */}}
{{- define "paceline.ports" -}}
{{- $ports := dict "verifier" (dict "grpc" 8101 "metrics" 8102 "health" 8103) "drafter" (dict "grpc" 8201 "metrics" 8202 "health" 8203) -}}
{{- get $ports . | toJson -}}
{{- end -}}

{{- define "paceline.redis.secret" -}}
{{- .Values.redis.secret | default (include "paceline.name" (dict "root" . "tier" "redis")) -}}
{{- end -}}

{{- define "paceline.redis.own" -}}
{{- if not (or .Values.redis.url .Values.redis.secret) }}yes{{ end -}}
{{- end -}}
