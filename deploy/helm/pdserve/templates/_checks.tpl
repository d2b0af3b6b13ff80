{{/* What the schema cannot say in words that help: everything is checked before anything is made. */}}
{{- define "pdserve.checks" -}}
{{- $v := .Values }}
{{- include "pdserve.checkNames" . }}
{{- range $path, $size := dict "model.cache.size" $v.model.cache.size "coordinator.storage" $v.coordinator.storage "prefill.sharedMemory" $v.prefill.sharedMemory "decode.sharedMemory" $v.decode.sharedMemory }}
{{- if $size }}{{ include "pdserve.checkQuantity" (list $path $size) }}{{ end }}
{{- end }}
{{- if ne (empty $v.auth.coordinatorTlsSecret) (empty $v.auth.nodeTlsSecret) }}
{{- fail "auth: coordinatorTlsSecret and nodeTlsSecret belong together: give both for mTLS, or none" }}
{{- end }}
{{- if and $v.coordinator.storeUrl (not (regexMatch "^postgres(ql)?://[^:@/\\s]+@[^/\\s]+/\\S+$" $v.coordinator.storeUrl)) }}
{{- fail (printf "coordinator.storeUrl: %q must be postgresql://USER@HOST/DATABASE, without a password (storePasswordSecret)" $v.coordinator.storeUrl) }}
{{- end }}
{{- if and $v.inferencePool.enabled (not $v.inferencePool.endpointPicker) }}
{{- fail "inferencePool.endpointPicker: name the service of your endpoint picker, or leave inferencePool.enabled false" }}
{{- end }}
{{- include "pdserve.checkPorts" (list "coordinator" (dict "port" $v.coordinator.port "grpcPort" $v.coordinator.grpcPort)) }}
{{- include "pdserve.checkResources" (list "coordinator" $v.coordinator.resources) }}
{{- include "pdserve.checkSettings" (list . "coordinator" $v.coordinator.settings) }}
{{- range $role := list "prefill" "decode" }}
{{- include "pdserve.checkPool" (list $ $role (index $v $role)) }}
{{- end }}
{{- if $v.models }}
{{- include "pdserve.checkModels" . }}
{{- end }}
{{- if eq $v.mode "multiplexed" }}
{{- include "pdserve.checkMultiplexed" $v.decode }}
{{- end }}
{{- end -}}

{{/* Names of objects, and words that become arguments. */}}
{{- define "pdserve.checkNames" -}}
{{- $names := dict "model.tokenSecret" .Values.model.tokenSecret "model.cache.existingClaim" .Values.model.cache.existingClaim "model.cache.storageClass" .Values.model.cache.storageClass "coordinator.storePasswordSecret" .Values.coordinator.storePasswordSecret "coordinator.storageClass" .Values.coordinator.storageClass "inferencePool.endpointPicker" .Values.inferencePool.endpointPicker }}
{{- range $name, $value := .Values.auth }}
{{- if hasSuffix "Secret" $name }}{{ $_ := set $names (printf "auth.%s" $name) $value }}{{ end }}
{{- end }}
{{- range $path, $name := $names }}
{{- if and $name (not (regexMatch "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$" $name)) }}
{{- fail (printf "%s: %q is no name of an object: it has lower-case letters, digits, dots and hyphens; a key or token itself goes into a Secret" $path $name) }}
{{- end }}
{{- end }}
{{- if not .Values.image.repository }}{{ fail "image.repository: name the image" }}{{ end }}
{{- range $path, $word := dict "image.repository" .Values.image.repository "image.tag" .Values.image.tag "model.name" .Values.model.name "model.revision" .Values.model.revision "prefill.rdma" .Values.prefill.rdma "decode.rdma" .Values.decode.rdma }}
{{- if regexMatch "\\s" $word }}{{ fail (printf "%s: %q has a blank in it" $path $word) }}{{ end }}
{{- end }}
{{- end -}}

{{/* Of these: the path, and its value. */}}
{{- define "pdserve.checkQuantity" -}}
{{- $path := first . }}
{{- $text := last . | toString }}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]+)?$" $text) }}
{{- fail (printf "%s: %q is no quantity: write 8Gi, 500m or a number" $path $text) }}
{{- end }}
{{- end -}}

{{/* Of these: the part, and its ports by name. */}}
{{- define "pdserve.checkPorts" -}}
{{- $part := first . }}
{{- $seen := dict }}
{{- range $name, $port := last . }}
{{- $key := $port | int | toString }}
{{- if hasKey $seen $key }}
{{- fail (printf "%s: %s and %s are both port %s: each needs a port of its own" $part (get $seen $key) $name $key) }}
{{- end }}
{{- $_ := set $seen $key $name }}
{{- end }}
{{- end -}}

{{/* Of these: the part, and its resources. */}}
{{- define "pdserve.checkResources" -}}
{{- $part := first . }}
{{- $resources := last . }}
{{- range $kind := list "requests" "limits" }}
{{- range $name, $value := index $resources $kind }}
{{- include "pdserve.checkQuantity" (list (printf "%s.resources.%s.%s" $part $kind $name) $value) }}
{{- end }}
{{- end }}
{{- $wanted := dig "requests" "memory" "" $resources | toString }}
{{- $most := dig "limits" "memory" "" $resources | toString }}
{{- if and $wanted $most (gt (include "pdserve.bytes" $wanted | float64) (include "pdserve.bytes" $most | float64)) }}
{{- fail (printf "%s.resources: the request of memory, %s, is more than the limit, %s" $part $wanted $most) }}
{{- end }}
{{- end -}}

{{/* Of these: the chart, the part, and its settings. Their names are in settings.txt, by `make kustomize`. */}}
{{- define "pdserve.checkSettings" -}}
{{- $part := index . 1 }}
{{- $kind := eq $part "coordinator" | ternary "coordinator" "node" }}
{{- $known := list }}
{{- range (first .).Files.Lines "settings.txt" }}
{{- if hasPrefix (printf "%s " $kind) . }}{{ $known = append $known (trimPrefix (printf "%s " $kind) .) }}{{ end }}
{{- end }}
{{- $own := dict "engine.device" "device" "engine.tensor_parallel" "tensorParallel" "engine.pipeline_parallel" "pipelineParallel" "engine.rank_hosts" "hosts" "multiplexed" "mode" "standby" "standby.replicas" }}
{{- range $name, $_ := index . 2 }}
{{- if and (ne $part "coordinator") (hasKey $own $name) }}
{{- fail (printf "%s.settings: %s is set by the chart's value %s: leave it out here" $part $name (get $own $name)) }}
{{- end }}
{{- if not (has $name $known) }}
{{- $near := list }}
{{- range $known }}
{{- if or (and (contains "." $name) (eq (regexFind "^[a-z]+[.]" .) (regexFind "^[a-z]+[.]" $name))) (hasSuffix (printf ".%s" $name) .) }}{{ $near = append $near . }}{{ end }}
{{- end }}
{{- fail (printf "%s.settings: there is no setting %s of a %s; there are %s" $part $name $kind (join ", " ($near | default $known))) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of these: the chart, the role, and its values. */}}
{{- define "pdserve.checkPool" -}}
{{- $role := index . 1 }}
{{- $pool := index . 2 }}
{{- $ports := dict "port" $pool.port "metricsPort" $pool.metricsPort "kvPort" $pool.kvPort "kvPort + 1 (nccl)" (add $pool.kvPort 1) "kvPort + 2 (ucx)" (add $pool.kvPort 2) }}
{{- if gt (int $pool.hosts) 1 }}{{ $_ := set $ports "rankPort" $pool.rankPort }}{{ end }}
{{- include "pdserve.checkPorts" (list $role $ports) }}
{{- include "pdserve.checkResources" (list $role $pool.resources) }}
{{- include "pdserve.checkSettings" (list (first .) $role $pool.settings) }}
{{- $scaling := $pool.autoscaling }}
{{- if gt (int $scaling.min) (int $scaling.max) }}
{{- fail (printf "%s.autoscaling: min %d is more than max %d" $role (int $scaling.min) (int $scaling.max)) }}
{{- end }}
{{- if and $scaling.enabled (not (regexMatch "^https?://\\S+$" $scaling.prometheus)) }}
{{- fail (printf "%s.autoscaling.prometheus: %q must be the URL of the Prometheus that scrapes the coordinators" $role $scaling.prometheus) }}
{{- end }}
{{- $kv := get $pool.settings "engine.kv_memory" | default "auto" | toString }}
{{- $most := dig "limits" "memory" "" $pool.resources | toString }}
{{- if and (eq $pool.device "cpu") (ne $kv "auto") $most (ge (include "pdserve.bytes" $kv | float64) (include "pdserve.bytes" $most | float64)) }}
{{- fail (printf "%s: engine.kv_memory %s does not fit into resources.limits.memory %s, which has to hold the weights, too: raise the limit" $role $kv $most) }}
{{- end }}
{{- end -}}

{{/* What a models file can say, and what cannot be said beside it. */}}
{{- define "pdserve.checkModels" -}}
{{- $v := .Values }}
{{- $file := fromToml $v.models }}
{{- if $file.Error }}{{ fail (printf "models: %s: give a file's text, by --set-file models=models.toml" $file.Error) }}{{ end }}
{{- if not (kindIs "map" $file.models) }}{{ fail "models: a models file has at least one [models.NAME]" }}{{ end }}
{{- if gt (int (dig "shared" "at_once" 1 $file)) 1 }}{{ fail "models: shared.at_once: a pod has one model awake at a time: leave it out" }}{{ end }}
{{- range $name, $value := dict "model.name" $v.model.name "model.revision" $v.model.revision "model.servedName" $v.model.servedName "prefill.autoscaling.enabled" $v.prefill.autoscaling.enabled "decode.autoscaling.enabled" $v.decode.autoscaling.enabled "standby.replicas" $v.standby.replicas }}
{{- if $value }}{{ fail (printf "%s: the models file says what is served, by how many nodes: leave it out" $name) }}{{ end }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- $pool := index $v $role }}
{{- if gt (int $pool.hosts) 1 }}{{ fail (printf "%s.hosts: %d: a node of a models file has one" $role (int $pool.hosts)) }}{{ end }}
{{- $stays := or (ne $pool.device "cpu") (gt (int $pool.tensorParallel) 1) (gt (int $pool.pipelineParallel) 1) }}
{{- if and $stays (dig "shared" $role 0 $file) }}{{ fail (printf "models: shared.%s: nodes on GPUs, or of several processes, stay with their model: give the models a min" $role) }}{{ end }}
{{- end }}
{{- end -}}

{{/* A node of this mode computes alone, on the cores of a CPU. */}}
{{- define "pdserve.checkMultiplexed" -}}
{{- if ne .device "cpu" }}{{ fail (printf "decode.device: %s: mode multiplexed splits the cores of a CPU" .device) }}{{ end }}
{{- range $name, $value := dict "tensorParallel" .tensorParallel "pipelineParallel" .pipelineParallel "hosts" .hosts }}
{{- if gt (int $value) 1 }}{{ fail (printf "decode.%s: %d: in mode multiplexed a node is one process" $name (int $value)) }}{{ end }}
{{- end }}
{{- end -}}

{{/* Bytes of 8Gi, 500M, 16GiB or 2GB. */}}
{{- define "pdserve.bytes" -}}
{{- $text := . | trimSuffix "B" }}
{{- $number := regexFind "^[0-9.]+" $text }}
{{- $unit := trimPrefix $number $text | trim | upper }}
{{- $units := dict "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "KI" 1024.0 "MI" 1048576.0 "GI" 1073741824.0 "TI" 1099511627776.0 "PI" 1125899906842624.0 }}
{{- printf "%f" (mulf (float64 ($number | default "0")) (get $units $unit | default 1.0)) }}
{{- end -}}
