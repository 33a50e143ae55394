{{/* The pod of a verifier or a drafter; the two differ in model and GPUs. With `host` the pod is the `leader` or a
`worker` of a target on several hosts; the leader is the verifier, workers run Ray. */}}
{{- define "paceline.engine" -}}
{{- $host := .host | default "" -}}
{{- $worker := eq $host "worker" -}}
{{- $values := get .root.Values .tier -}}
{{- $ports := include "paceline.ports" .tier | fromJson -}}
{{- $cache := (include "paceline.weights" . | fromJson).fetch -}}
{{- $vllm := eq ($values.engine | default "paceline") "vllm" -}}
{{- $simulate := .root.Values.simulate -}}
metadata:
  labels:
    {{- include "paceline.podLabels" . | nindent 4 }}
  {{- include "paceline.annotations" . | nindent 2 }}
spec:
  {{- include "paceline.pod" . | nindent 2 }}
  terminationGracePeriodSeconds: {{ add $values.drainSeconds ($values.graceSeconds | default 0) 15 }}
  {{- with include "paceline.init" . }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    - name: {{ .tier }}
      image: {{ include "paceline.image" . }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      {{- if $worker }}
      command: [sh, -c, 'exec ray start --address="$LWS_LEADER_ADDRESS:6379" --block']
      {{- else if $vllm }}
      {{- if $host }}
      command: [sh, -c, 'ray start --head --port=6379 --include-dashboard=false && exec "$@"', sh, paceline, verifier]
      {{- else }}
      # The entry point of vLLM's own images starts its server.
      command: [paceline, verifier]
      {{- end }}
      args:
        - --engine=vllm
        {{- range $values.vllmArgs }}
        - {{ printf "--vllm-arg=%s" . | quote }}
        {{- end }}
      {{- else if $simulate }}
      args: [--engine=simulated, {{ printf "--profile=%s" $simulate | quote }}]
      {{- end }}
      {{- include "paceline.container" . | nindent 6 }}
      env:
        - name: PACELINE_MODEL
          value: {{ (include "paceline.weights" . | fromJson).model | quote }}
        {{- if eq .tier "verifier" }}
        - name: PACELINE_MODEL_NAME
          value: {{ .root.Values.model.name | quote }}
        - name: PACELINE_GRACE_S
          value: {{ $values.graceSeconds | quote }}
        {{- end }}
        {{- if $vllm }}
        # The pod's user has no home in vLLM's images, and vLLM caches compiled code there.
        - {name: HOME, value: /tmp}
        {{- end }}
        {{- if $cache }}
        - {name: XDG_CACHE_HOME, value: /cache}
        {{- end }}
        - name: PACELINE_DEVICE
          value: {{ ternary "cuda" "cpu" $values.gpu }}
        - name: PACELINE_PORT
          value: {{ $ports.grpc | quote }}
        - name: PACELINE_METRICS_PORT
          value: {{ $ports.metrics | quote }}
        # Plain text: the kubelet's probes have no certificate.
        - name: PACELINE_HEALTH_PORT
          value: {{ $ports.health | quote }}
        # Clients connect to the pod itself: a session's stream must reach this replica and no other.
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: PACELINE_ANNOUNCE
          value: {{ printf (ternary "[$(POD_IP)]:%v" "$(POD_IP):%v" .root.Values.ipv6) $ports.grpc | quote }}
        # The replica id for `paceline drain` below.
        - name: PACELINE_REPLICA
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        {{- include "paceline.env" . | nindent 8 }}
      {{- if not $worker }}
      ports:
        {{- range $name, $port := $ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
      # Health is SERVING once the model is loaded, until SIGTERM.
      startupProbe:
        grpc: {port: {{ $ports.health }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $values.startSeconds 4) 5 }}
      readinessProbe:
        grpc: {port: {{ $ports.health }}}
        periodSeconds: 5
        timeoutSeconds: 5
      livenessProbe:
        # Liveness of the process, not of its engine: a stuck engine ends its process by itself.
        grpc: {port: {{ $ports.health }}, service: liveness}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      lifecycle:
        preStop:
          exec:
            command: [paceline, drain, --timeout-s={{ $values.drainSeconds }}]
      {{- end }}
      {{- $resources := deepCopy $values.resources }}
      {{- if $values.gpu }}
      {{- $_ := set $resources "limits" (merge ($resources.limits | default dict) (dict $values.gpuResource 1)) }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        {{- include "paceline.mounts" . | nindent 8 }}
        {{- if $cache }}
        # A restarted container reuses compiled code and learned step times from here.
        - {name: weights, mountPath: /cache, subPath: cache}
        {{- end }}
        {{- if $vllm }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
  volumes:
    {{- include "paceline.volumes" . | nindent 4 }}
    {{- if $vllm }}
    # Shared memory of vLLM's processes.
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: 8Gi}
    {{- end }}
{{- end -}}
