{{/* The checkpoint of a tier and its source, as JSON: model is the flag's value; volume and claim belong to /weights;
fetch is true if an init container fills it. */}}
{{- define "paceline.weights" -}}
{{- $model := .root.Values.model -}}
{{- $sources := dict "gateway" ($model.tokenizer | default $model.target) "verifier" $model.target "drafter" $model.draft -}}
{{- $source := get $sources .tier -}}
{{- $kind := regexFind "^[a-z]+://" $source | trimSuffix "://" -}}
{{- $rest := trimPrefix (printf "%s://" $kind) $source -}}
{{- $own := (get .root.Values .tier).weights -}}
{{- $found := dict "model" $source -}}
{{- if eq $kind "hf" -}}
{{- $_ := set $found "fetch" true -}}
{{- $_ := set $found "claim" ($own.claim | default dict) -}}
{{- $_ := set $found "volume" ($own.volume | default (dict "emptyDir" dict)) -}}
{{- else if eq $kind "pvc" -}}
{{- $place := splitn "/" 2 $rest -}}
{{- $_ := set $found "model" (printf "/weights/%s" ($place._1 | default "") | trimSuffix "/") -}}
{{- $_ := set $found "volume" (dict "persistentVolumeClaim" (dict "claimName" $place._0 "readOnly" true)) -}}
{{- else if eq $kind "image" -}}
{{- $place := splitn "#" 2 $rest -}}
{{- $_ := set $found "model" (printf "/weights/%s" ($place._1 | default "" | trimPrefix "/") | trimSuffix "/") -}}
{{- $_ := set $found "volume" (dict "image" (dict "reference" $place._0 "pullPolicy" .root.Values.image.pullPolicy)) -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* Environment of services that read /weights: the Hub's cache, offline. */}}
{{- define "paceline.weights.env" -}}
{{- if (include "paceline.weights" . | fromJson).fetch -}}
- {name: HF_HOME, value: /weights}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end -}}
{{- end -}}

{{/* Init containers: first those in the values, then the checkpoint fetch. */}}
{{- define "paceline.init" -}}
{{- $values := get .root.Values .tier -}}
{{- $weights := include "paceline.weights" . | fromJson -}}
{{- if or $values.initContainers $weights.fetch -}}
initContainers:
  {{- with $values.initContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if $weights.fetch }}
  - name: fetch
    image: {{ include "paceline.image" . }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [paceline, models, fetch]
    args:
      - {{ $weights.model | quote }}
      {{- if eq .tier "gateway" }}
      - --tokenizer-only
      {{- end }}
    {{- include "paceline.container" . | nindent 4 }}
    env:
      - {name: HOME, value: /tmp}
      - {name: HF_HOME, value: /weights}
      {{- with .root.Values.model.token }}
      {{- if .secret }}
      - name: HF_TOKEN
        valueFrom: {secretKeyRef: {{ dict "name" .secret "key" .key | toJson }}}
      {{- end }}
      {{- end }}
      {{- include "paceline.env.own" . | nindent 6 }}
    # The service's own requests, so that the pod requests no more; but no GPU.
    {{- $resources := dict }}
    {{- range $kind, $amounts := $values.resources }}
    {{- $_ := set $resources $kind (pick $amounts "cpu" "memory" "ephemeral-storage") }}
    {{- end }}
    resources:
      {{- toYaml $resources | nindent 6 }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: weights, mountPath: /weights}
      {{- with $values.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
  {{- end }}
{{- end -}}
{{- end -}}
