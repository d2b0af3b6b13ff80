{{/* The pod of a node. Of these: `root`, the chart; `component`, the set that it is in; `role`, what
it starts as; `model`, of several, or nothing; and `pool`, its values. */}}
{{- define "pdserve.nodePod" -}}
{{- $root := .root }}
{{- $role := .role }}
{{- $pool := .pool }}
{{- $name := include "pdserve.name" $root }}
{{ include "pdserve.podSecurity" $root }}
terminationGracePeriodSeconds: {{ add $pool.drainSeconds 20 }}
{{- include "pdserve.placement" $pool | nindent 0 }}
containers:
  - name: node
    image: {{ include "pdserve.image" $root }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    {{- include "pdserve.containerSecurity" $root | nindent 4 }}
    args:
      - {{ $role }}
      - --node-id=$(POD_NAME)
      - --host=$(POD_IP)
      - --set=security.join_token_file=/etc/pdserve/join/token
      {{- include "pdserve.tlsArguments" $root.Values.auth.nodeTlsSecret | nindent 6 }}
      - --port={{ $pool.port }}
      - --metrics-port={{ $pool.metricsPort }}
      - --set=kv_port={{ $pool.kvPort }}
      - --coordinators={{ $name }}-coordinators:{{ $root.Values.coordinator.grpcPort }} # all of them
      - --set=timeouts.drain_s={{ $pool.drainSeconds }}
      - --device={{ $pool.device }}
      - --tensor-parallel={{ $pool.tensorParallel }}
      {{- if $pool.pipelineParallel }}
      - --set=engine.pipeline_parallel={{ $pool.pipelineParallel }}
      {{- end }}
      {{- if eq .component "standby" }}
      - --set=standby=true
      {{- end }}
      {{- if eq $root.Values.mode "multiplexed" }}
      - --set=multiplexed=true
      {{- end }}
      {{- if gt (int $pool.hosts) 1 }}
      - {{ printf "--rank-hosts=%s" (include "pdserve.rankHosts" .) }}
      {{- end }}
      {{- include "pdserve.modelArguments" $root | nindent 6 }}
      {{- with .model }}
      - {{ printf "--model=%s" . | quote }}
      {{- end }}
      {{- include "pdserve.settings" $pool.settings | nindent 6 }}
    env:
      {{- include "pdserve.environment" $root | nindent 6 }}
    ports:
      - { name: grpc, containerPort: {{ $pool.port }} }
      - { name: metrics, containerPort: {{ $pool.metricsPort }} }
      - { name: kv, containerPort: {{ $pool.kvPort }} }
    startupProbe: # until its weights are loaded
      httpGet: { path: /health, port: metrics{{ if $root.Values.auth.nodeTlsSecret }}, scheme: HTTPS{{ end }} }
      periodSeconds: 5
      failureThreshold: {{ div (add $pool.startSeconds 4) 5 }}
    readinessProbe: # not by gRPC, for which Kubernetes would need a certificate
      httpGet: { path: /health, port: metrics{{ if $root.Values.auth.nodeTlsSecret }}, scheme: HTTPS{{ end }} }
      periodSeconds: 2
      failureThreshold: 1
    livenessProbe: # a node that is sick ends by itself
      tcpSocket: { port: grpc }
      periodSeconds: 10
      failureThreshold: 6
    {{- include "pdserve.nodeParts" . | nindent 4 }}
{{ include "pdserve.nodeVolumes" . }}
{{- end -}}

{{/* The pod of a node's further hosts. */}}
{{- define "pdserve.rankPod" -}}
{{- $root := .root }}
{{- $pool := .pool }}
{{ include "pdserve.podSecurity" $root }}
{{- include "pdserve.placement" $pool | nindent 0 }}
containers:
  - name: rank
    image: {{ include "pdserve.image" $root }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    {{- include "pdserve.containerSecurity" $root | nindent 4 }}
    args:
      - rank
      - --host=$(POD_IP)
      - --port={{ $pool.rankPort }}
      - --set=security.join_token_file=/etc/pdserve/join/token
      - --device={{ $pool.device }}
      {{- include "pdserve.tlsArguments" $root.Values.auth.nodeTlsSecret | nindent 6 }}
      {{- include "pdserve.modelArguments" $root | nindent 6 }}
    env:
      {{- include "pdserve.environment" $root | nindent 6 }}
    ports:
      - { name: rank, containerPort: {{ $pool.rankPort }} }
    {{- include "pdserve.nodeParts" . | nindent 4 }}
{{ include "pdserve.nodeVolumes" . }}
{{- end -}}

{{/* Addresses of a node's further hosts, by the names that a LeaderWorkerSet gives them. */}}
{{- define "pdserve.rankHosts" -}}
{{- $addresses := list }}
{{- range $number := until (int .pool.hosts) }}
{{- if $number }}
{{- $address := printf "$(POD_NAME)-%d.%s-%s:%v" $number (include "pdserve.name" $.root) $.component $.pool.rankPort }}
{{- $addresses = append $addresses $address }}
{{- end }}
{{- end }}
{{- join "," $addresses }}
{{- end -}}

{{/* What the containers of all hosts have. */}}
{{- define "pdserve.nodeParts" -}}
{{- $root := .root }}
{{- $pool := .pool }}
resources:
  {{- if $pool.resources.requests }}
  requests:
    {{- toYaml $pool.resources.requests | nindent 4 }}
  {{- end }}
  limits:
    {{- with $pool.resources.limits }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if eq $pool.device "cuda" }}
    {{- $hosts := int $pool.hosts }}
    {{- $ranks := mul $pool.tensorParallel (default $hosts (int $pool.pipelineParallel)) }}
    {{- if mod $ranks $hosts }}
    {{- fail (printf "hosts: %d GPUs of a node cannot be shared out among %d hosts" $ranks $hosts) }}
    {{- end }}
    nvidia.com/gpu: {{ div $ranks $hosts }}
    {{- end }}
    {{- with $pool.rdma }}
    {{ . }}: 1
    {{- end }}
volumeMounts:
  {{- include "pdserve.mounts" $root | nindent 2 }}
  {{- include "pdserve.tlsMount" $root.Values.auth.nodeTlsSecret | nindent 2 }}
  - { name: state, mountPath: /state }
  {{- if $pool.sharedMemory }}
  - { name: shared-memory, mountPath: /dev/shm }
  {{- end }}
{{- end -}}

{{- define "pdserve.nodeVolumes" -}}
{{- $root := .root }}
{{- $pool := .pool }}
volumes:
  {{- include "pdserve.volumes" $root | nindent 2 }}
  {{- include "pdserve.tlsVolume" $root.Values.auth.nodeTlsSecret | nindent 2 }}
  - name: state
    emptyDir: {}
  {{- with $pool.sharedMemory }}
  - name: shared-memory
    emptyDir: { medium: Memory, sizeLimit: {{ . }} }
  {{- end }}
{{- end -}}
