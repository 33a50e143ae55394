{{/* Common fields of all pod specs, before the containers. */}}
{{- define "paceline.pod" -}}
{{- $values := get .root.Values .tier -}}
serviceAccountName: {{ include "paceline.name" . }}
automountServiceAccountToken: false
# Otherwise Kubernetes sets PACELINE_PORT and the like for a Service named paceline, and these are names of settings.
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  {{- include "paceline.security" (dict "scope" . "field" "podSecurityContext") | nindent 2 }}
{{- range $field := list "priorityClassName" "runtimeClassName" "nodeSelector" "tolerations" "affinity" }}
{{- with get $values $field }}
{{ $field }}: {{ toJson . }}
{{- end }}
{{- end }}
topologySpreadConstraints:
  {{- range $values.topologySpreadConstraints | default (list (dict "topologyKey" "kubernetes.io/hostname" "maxSkew" 1 "whenUnsatisfiable" "ScheduleAnyway")) }}
  {{- $selector := dict "labelSelector" (dict "matchLabels" (include "paceline.selector" $ | fromYaml)) }}
  - {{ merge (deepCopy .) $selector | toJson }}
  {{- end }}
{{- end -}}

{{/* Security context of a pod or container: the chart's, overridden by the tier's; null drops a field. */}}
{{- define "paceline.security" -}}
{{- $context := deepCopy (get .scope.root.Values .field) -}}
{{- range $name, $value := get (get .scope.root.Values .scope.tier) .field | default dict -}}
{{- $_ := set $context $name $value -}}
{{- end -}}
{{- range $name, $value := $context }}
{{- if not (kindIs "invalid" $value) }}
{{ $name }}: {{ toJson $value }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Labels of a tier's pods. Workers of a verifier on several hosts belong to no Service. */}}
{{- define "paceline.podLabels" -}}
{{- $worker := eq (.host | default "") "worker" -}}
{{- include "paceline.selector" (dict "root" .root "tier" (ternary "verifier-host" .tier $worker)) -}}
{{- with (get .root.Values .tier).podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Common fields of all containers. */}}
{{- define "paceline.container" -}}
securityContext:
  {{- include "paceline.security" (dict "scope" . "field" "securityContext") | nindent 2 }}
{{- end -}}

{{/* Environment of the three services; a setting's variable is its flag in capitals. */}}
{{- define "paceline.env" -}}
{{- $values := get .root.Values .tier -}}
- name: PACELINE_REPLICA_ID
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: PACELINE_ZONE
  {{- if .root.Values.zone }}
  value: {{ .root.Values.zone | quote }}
  {{- else }}
  # Empty if Kubernetes does not copy the node's label to pods.
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['topology.kubernetes.io/zone']"}}
  {{- end }}
- name: PACELINE_HOST
  value: {{ ternary "::" "0.0.0.0" .root.Values.ipv6 | quote }}
- name: PACELINE_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ include "paceline.redis.secret" .root }}, key: url}}
{{- if .root.Values.tls.enabled }}
- name: PACELINE_TLS_DIR
  value: /etc/paceline/tls
{{- end }}
{{- with .root.Values.tracing.endpoint }}
- name: PACELINE_OTLP_TRACES_ENDPOINT
  value: {{ . | quote }}
{{- if ne $.tier "drafter" }}
- name: PACELINE_TRACE_SAMPLE_RATIO
  value: {{ $.root.Values.tracing.sampleRatio | toJson | quote }}
{{- end }}
{{- end }}
{{- range $flag, $value := $values.settings }}
- name: PACELINE_{{ $flag | upper | replace "-" "_" }}
  value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
{{- with include "paceline.weights.env" . }}
{{ . }}
{{- end }}
{{- with include "paceline.env.own" . }}
{{ . }}
{{- end }}
{{- end -}}

{{/* Environment from a tier's values. */}}
{{- define "paceline.env.own" -}}
{{- $values := get .root.Values .tier -}}
{{- range $name, $value := $values.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- with $values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "paceline.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .root.Values.model.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/paceline/tls, readOnly: true}
{{- end }}
{{- if (include "paceline.weights" . | fromJson).volume }}
- {name: weights, mountPath: /weights, readOnly: true}
{{- end }}
{{- with (get .root.Values .tier).extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "paceline.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 2Gi}
{{- with .root.Values.model.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ get .root.Values.tls.secrets .tier }}
    defaultMode: 0440
    items:
      - {key: ca.crt, path: ca.pem}
      - {key: tls.crt, path: tls.pem}
      - {key: tls.key, path: tls.key}
{{- end }}
{{- $weights := include "paceline.weights" . | fromJson }}
{{- if and $weights.volume (not $weights.claim) }}
- {{ merge (dict "name" "weights") $weights.volume | toJson }}
{{- end }}
{{- with (get .root.Values .tier).extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Pods restart when files that they read at start change. */}}
{{- define "paceline.annotations" -}}
{{- $annotations := deepCopy ((get .root.Values .tier).podAnnotations | default dict) -}}
{{- if not .root.Values.redis.secret -}}
{{- $_ := set $annotations "checksum/redis" (printf "%s %s" .root.Values.redis.url .root.Values.redis.password | sha256sum) -}}
{{- end -}}
{{- with $annotations -}}
annotations: {{ toJson . }}
{{- end }}
{{- end -}}
