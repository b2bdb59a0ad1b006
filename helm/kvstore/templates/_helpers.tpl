{{/* Names, labels and sizes. */}}

{{- define "kvstore.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvstore.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "kvstore.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kvstore.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvstore.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvstore.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvstore.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "kvstore.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* The label of every pod with a store of this release, replicas of other charts included. */}}
{{- define "kvstore.storeLabel" -}}
kvstore-store: {{ include "kvstore.fullname" . }}
{{- end -}}

{{- define "kvstore.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* A size of the store's configuration, an integer or text like "4GiB", in bytes. */}}
{{- define "kvstore.bytes" -}}
{{- $text := toString . -}}
{{- if kindIs "float64" . -}}{{- $text = toString (int64 .) -}}{{- end -}}
{{- $unit := regexFind "[A-Za-z]+$" $text | default "B" -}}
{{- $factor := get (dict "B" 1 "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776) $unit -}}
{{- mul (regexFind "^[0-9]+" $text | int64) $factor -}}
{{- end -}}

{{/* A quantity of Kubernetes like "4Gi" in bytes, rounded down. */}}
{{- define "kvstore.quantityBytes" -}}
{{- $text := toString . -}}
{{- if kindIs "float64" . -}}{{- $text = toString (int64 .) -}}{{- end -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $factors := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- if not (hasKey $factors $unit) -}}{{- fail (printf "kvstore: resources: memory %q: use a unit like Mi or Gi" $text) -}}{{- end -}}
{{- mulf (regexFind "^[0-9.]+" $text | float64) (get $factors $unit) | floor | int64 -}}
{{- end -}}

{{- define "kvstore.dram" -}}
{{- toJson (merge (dict) (dig "tiers" "dram" (dict) .Values.config) (dict "capacity_bytes" "1GiB" "staging_bytes" "64MiB")) -}}
{{- end -}}

{{- define "kvstore.recordsBytes" -}}
{{- include "kvstore.bytes" (dig "store" "records_bytes" "256MiB" .Values.config) -}}
{{- end -}}

{{/* Memory that the store's container needs: the arena, which is its own, records without an ssd, and the process. */}}
{{- define "kvstore.memoryBytes" -}}
{{- $dram := include "kvstore.dram" . | fromJson -}}
{{- $bytes := add (include "kvstore.bytes" $dram.capacity_bytes) (include "kvstore.bytes" $dram.staging_bytes) (include "kvstore.bytes" .Values.memory.overheadBytes) -}}
{{- if not .Values.ssd.enabled -}}{{- $bytes = add $bytes (include "kvstore.recordsBytes" .) -}}{{- end -}}
{{- $bytes -}}
{{- end -}}

{{/* Seconds that a start may take: the arena's memory is touched once, about 0.5 s for each GiB. */}}
{{- define "kvstore.startSeconds" -}}
{{- $dram := include "kvstore.dram" . | fromJson -}}
{{- add .Values.probes.startSeconds (div (include "kvstore.bytes" $dram.capacity_bytes | int64) 1073741824) -}}
{{- end -}}

{{- define "kvstore.isLoopback" -}}
{{- if or (hasPrefix "127." .Values.http.address) (eq .Values.http.address "::1") -}}true{{- end -}}
{{- end -}}

{{/* Whether HTTP can be reached from outside of the pod. */}}
{{- define "kvstore.isServing" -}}
{{- if and .Values.http.enabled (not (include "kvstore.isLoopback" .)) -}}true{{- end -}}
{{- end -}}

{{- define "kvstore.keyringSecret" -}}
{{- with .Values.http.apiKeys -}}
{{- if .existingSecret -}}{{ .existingSecret }}{{- else if .text -}}{{ include "kvstore.fullname" $ }}-api-keys{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvstore.masterKeysSecret" -}}
{{- with .Values.encryption -}}
{{- if .existingSecret -}}{{ .existingSecret }}{{- else if .text -}}{{ include "kvstore.fullname" $ }}-master-keys{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvstore.httpTlsSecret" -}}
{{- if .Values.http.tls.existingSecret -}}{{ .Values.http.tls.existingSecret }}
{{- else if and .Values.certManager.enabled (include "kvstore.isServing" .) -}}{{ include "kvstore.fullname" . }}-http-tls{{- end -}}
{{- end -}}

{{- define "kvstore.redisTlsSecret" -}}
{{- if .Values.redis.tls.enabled -}}
{{- if .Values.redis.tls.secret -}}{{ .Values.redis.tls.secret }}
{{- else if and .Values.certManager.enabled (eq .Values.redis.mode "bundled") -}}{{ include "kvstore.fullname" . }}-redis-tls{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvstore.redisSecret" -}}
{{- if .Values.redis.auth.existingSecret -}}{{ .Values.redis.auth.existingSecret }}
{{- else if eq .Values.redis.mode "bundled" -}}{{ include "kvstore.fullname" . }}-redis{{- end -}}
{{- end -}}

{{- define "kvstore.redisUrl" -}}
{{- if eq .Values.redis.mode "external" -}}{{ .Values.redis.external.url }}
{{- else -}}{{ ternary "rediss" "redis" .Values.redis.tls.enabled }}://{{ include "kvstore.fullname" . }}-redis:6379/0{{- end -}}
{{- end -}}

{{/* Security context of every container: what the restricted Pod Security profile asks for, and a read-only root. */}}
{{- define "kvstore.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: {{ int64 .Values.runAsUser }}
runAsGroup: {{ int64 .Values.runAsUser }}
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvstore.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.runAsUser }}
runAsGroup: {{ int64 .Values.runAsUser }}
fsGroup: {{ int64 .Values.runAsUser }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvstore.scheduling" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
