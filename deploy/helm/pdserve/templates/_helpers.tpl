{{/* The release's prefix of all names. */}}
{{- define "pdserve.name" -}}
{{- printf "%s" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "pdserve.labels" -}}
{{ include "pdserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "pdserve.selector" -}}
app.kubernetes.io/name: pdserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "pdserve.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{/* Secret with the API key, if there is no key file. */}}
{{- define "pdserve.apiKeySecret" -}}
{{- .Values.auth.apiKeySecret | default (printf "%s-api-key" (include "pdserve.name" .)) -}}
{{- end -}}

{{/* What the API speaks. */}}
{{- define "pdserve.scheme" -}}
{{ if .Values.auth.httpsSecret }}https{{ else }}http{{ end }}
{{- end -}}

{{/* Secret with what nodes show to join. */}}
{{- define "pdserve.joinTokenSecret" -}}
{{- .Values.auth.joinTokenSecret | default (printf "%s-join-token" (include "pdserve.name" .)) -}}
{{- end -}}

{{/* Secret with what Prometheus shows to read metrics. */}}
{{- define "pdserve.metricsTokenSecret" -}}
{{- .Values.auth.metricsTokenSecret | default (printf "%s-metrics-token" (include "pdserve.name" .)) -}}
{{- end -}}

{{- define "pdserve.modelClaim" -}}
{{- .Values.model.cache.existingClaim | default (printf "%s-models" (include "pdserve.name" .)) -}}
{{- end -}}

{{/* Processes read the models file as they start: pods are replaced with it. */}}
{{- define "pdserve.modelsVersion" -}}
{{- with .Values.models }}
annotations:
  pdserve/models-file: {{ sha256sum . }}
{{- end }}
{{- end -}}

{{/* Of a model's name: what names of its objects have of it, 13 characters at most. */}}
{{- define "pdserve.modelWord" -}}
{{- if and (regexMatch "^[a-z0-9]([a-z0-9-]{0,11}[a-z0-9])?$" .) (ne . "shared") -}}
{{- . -}}
{{- else -}}
{{- printf "%s-%s" (regexReplaceAll "[^a-z0-9]+" (lower .) "-" | trimPrefix "-" | trunc 8 | trimSuffix "-" | default "model") (sha256sum . | trunc 4) -}}
{{- end -}}
{{- end -}}

{{/* The sets of nodes, as a list of: `component`; `role`, what its nodes start as; `replicas`; and of
several models `model`, which they are, and `word`, which is in the set's name. */}}
{{- define "pdserve.sets" -}}
{{- $v := .Values }}
{{- $sets := list }}
{{- range $role := has $v.mode (list "colocated" "multiplexed") | ternary (list "decode") (list "prefill" "decode") }}
{{- if $v.models }}
{{- $file := fromToml $v.models }}
{{- range $model, $of := $file.models }}
{{- $least := hasKey $of "min" | ternary (dig "min" $role 0 $of) 1 | int }}
{{- if $least }}{{ $sets = append $sets (dict "component" $role "role" $role "replicas" $least "model" $model "word" (include "pdserve.modelWord" $model)) }}{{ end }}
{{- end }}
{{- with dig "shared" $role 0 $file | int }}{{ $sets = append $sets (dict "component" $role "role" $role "replicas" . "word" "shared") }}{{ end }}
{{- else }}
{{- $sets = append $sets (dict "component" $role "role" $role "replicas" (index $v $role).replicas) }}
{{- end }}
{{- end }}
{{- with int $v.standby.replicas }}
{{- $sets = append $sets (dict "component" "standby" "role" "decode" "replicas" .) }}
{{- end }}
{{- toJson $sets }}
{{- end -}}

{{/* Of one of them: what tells its pods from those of others of its component. */}}
{{- define "pdserve.setLabel" -}}
{{- with .word }}pdserve/nodes-of: {{ . }}{{ end }}
{{- end -}}

{{/* Whether a pool may have no nodes; nothing: no. */}}
{{- define "pdserve.sleeps" -}}
{{- range $pool := list .Values.prefill .Values.decode }}
{{- if and $pool.autoscaling.enabled (eq (int $pool.autoscaling.min) 0) }}yes{{ end }}
{{- end }}
{{- end -}}

{{/* --set arguments of a map of settings. */}}
{{- define "pdserve.settings" -}}
{{- range $name, $value := . }}
- {{ printf "--set=%s=%s" $name (kindIs "slice" $value | ternary (join "," $value) (toString $value)) | quote }}
{{- end }}
{{- end -}}

{{- define "pdserve.modelArguments" -}}
{{- if .Values.models }}
- --models=/etc/pdserve/models/models.toml
{{- end }}
{{- with .Values.model.name }}
- {{ printf "--model=%s" . | quote }}
{{- end }}
{{- with .Values.model.revision }}
- {{ printf "--revision=%s" . | quote }}
{{- end }}
{{- end -}}

{{/* Environment of every process: downloads and caches go to volumes, since the root is read-only. */}}
{{- define "pdserve.environment" -}}
- name: HF_HOME
  value: /models
- name: XDG_CACHE_HOME
  value: /cache
- name: XDG_STATE_HOME
  value: /state
- name: POD_NAME
  valueFrom: { fieldRef: { fieldPath: metadata.name } }
- name: POD_IP
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
{{- with .Values.model.tokenSecret }}
- name: HF_TOKEN
  valueFrom: { secretKeyRef: { name: {{ . }}, key: token } }
{{- end }}
{{- end -}}

{{- define "pdserve.podSecurity" -}}
automountServiceAccountToken: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  fsGroup: 10001
  seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "pdserve.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end -}}

{{- define "pdserve.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* For mTLS, with the name of a Secret or nothing. */}}
{{- define "pdserve.tlsArguments" -}}
{{- if . }}
- --set=security.tls_dir=/etc/pdserve/tls
{{- end }}
{{- end -}}

{{- define "pdserve.tlsMount" -}}
{{- if . }}
- { name: tls, mountPath: /etc/pdserve/tls, readOnly: true }
{{- end }}
{{- end -}}

{{- define "pdserve.tlsVolume" -}}
{{- with . }}
- name: tls
  secret: { secretName: {{ . }} }
{{- end }}
{{- end -}}

{{/* Volumes that pods of all kinds have. */}}
{{- define "pdserve.volumes" -}}
- name: tmp
  emptyDir: {}
- name: cache
  emptyDir: {}
- name: join
  secret: { secretName: {{ include "pdserve.joinTokenSecret" . }} }
- name: models
{{- if or .Values.model.cache.size .Values.model.cache.existingClaim }}
  persistentVolumeClaim: { claimName: {{ include "pdserve.modelClaim" . }} }
{{- else }}
  emptyDir: {}
{{- end }}
{{- if .Values.models }}
- name: models-file
  configMap: { name: {{ include "pdserve.name" . }}-models-file }
{{- end }}
{{- end -}}

{{- define "pdserve.mounts" -}}
- { name: tmp, mountPath: /tmp }
- { name: cache, mountPath: /cache }
- { name: models, mountPath: /models }
- { name: join, mountPath: /etc/pdserve/join, readOnly: true }
{{- if .Values.models }}
- { name: models-file, mountPath: /etc/pdserve/models, readOnly: true }
{{- end }}
{{- end -}}
