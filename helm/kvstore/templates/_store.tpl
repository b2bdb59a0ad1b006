{{/*
The store in a pod. Other charts that depend on this one include, with the subchart as context
(`.Subcharts.kvstore`, or what its alias is):

  kvstore.initContainers   the store as a native sidecar (sidecar.kind native)
  kvstore.containers       the store as an ordinary container (sidecar.kind container)
  kvstore.volumes          its volumes
  kvstore.replicaMounts    volumeMounts of the replica's container
  kvstore.replicaEnv       environment of the replica's container
  kvstore.storeLabel       label of the pod
  kvstore.podSecurity      securityContext of the pod
*/}}

{{- define "kvstore.initContainers" -}}
{{- if eq .Values.sidecar.kind "native" -}}
- {{ include "kvstore.container" (dict "root" . "place" "native") | indent 2 | trim }}
{{- end -}}
{{- end -}}

{{- define "kvstore.containers" -}}
{{- if eq .Values.sidecar.kind "container" -}}
- {{ include "kvstore.container" (dict "root" . "place" "container") | indent 2 | trim }}
{{- end -}}
{{- end -}}

{{- define "kvstore.replicaMounts" -}}
- name: kvstore-socket
  mountPath: /run/kvstore
{{- end -}}

{{- define "kvstore.replicaEnv" -}}
- name: KVSTORE_SOCKET
  value: /run/kvstore/kvstore.sock
{{- end -}}

{{/* Takes root, and place: native, container or daemonset. */}}
{{- define "kvstore.container" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
name: kvstore
image: {{ include "kvstore.image" $root }}
imagePullPolicy: {{ $values.image.pullPolicy }}
{{- if eq .place "native" }}
restartPolicy: Always
{{- end }}
args:
  - serve
  - --config
  - /etc/kvstore/config/config.toml
  {{- with $values.events }}
  {{- if .enabled }}
  - --events
  - tcp://*:{{ int64 .port }}
  - --events-replay
  - tcp://*:{{ int64 .replayPort }}
  {{- with .topic }}
  - --events-topic
  - {{ . | quote }}
  {{- end }}
  {{- if .open }}
  - --events-open
  {{- else }}
  - --events-keys
  - /etc/kvstore/events
  {{- end }}
  {{- with .args }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- end }}
  {{- end }}
env:
  {{- include "kvstore.replicaEnv" $root | nindent 2 }}
  {{- if or $values.tracing.endpoint $values.events.enabled }}
  - name: KVSTORE_POD_NAME
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  {{- end }}
  {{- if $values.events.enabled }}
  - name: KVSTORE_POD_IP
    valueFrom:
      fieldRef:
        fieldPath: status.podIP
  {{- end }}
  {{- with $values.tracing.endpoint }}
  - name: OTEL_EXPORTER_OTLP_ENDPOINT
    value: {{ . | quote }}
  - name: OTEL_TRACES_SAMPLER
    value: parentbased_traceidratio
  - name: OTEL_TRACES_SAMPLER_ARG
    value: {{ $values.tracing.sampleRatio | toString | quote }}
  - name: OTEL_RESOURCE_ATTRIBUTES
    value: k8s.pod.name=$(KVSTORE_POD_NAME)
  {{- end }}
  {{- with $values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if or (include "kvstore.isServing" $root) $values.events.enabled }}
ports:
  {{- if include "kvstore.isServing" $root }}
  - name: kvstore-http
    containerPort: {{ int64 $values.http.port }}
    protocol: TCP
  {{- end }}
  {{- if $values.events.enabled }}
  - name: kvstore-events
    containerPort: {{ int64 $values.events.port }}
    protocol: TCP
  - name: kvstore-replay
    containerPort: {{ int64 $values.events.replayPort }}
    protocol: TCP
  {{- end }}
{{- end }}
{{- if or (eq .place "daemonset") $values.sidecar.waitForStore }}
startupProbe:
  {{- include "kvstore.probe" (dict "root" $root "path" "/readyz") | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: {{ int64 $values.probes.timeoutSeconds }}
  failureThreshold: {{ div (add (include "kvstore.startSeconds" $root) 4) 5 }}
{{- end }}
livenessProbe:
  {{- include "kvstore.probe" (dict "root" $root "path" "/healthz") | nindent 2 }}
  {{- if not (or (eq .place "daemonset") $values.sidecar.waitForStore) }}
  initialDelaySeconds: {{ include "kvstore.startSeconds" $root }}
  {{- end }}
  periodSeconds: {{ int64 $values.probes.periodSeconds }}
  timeoutSeconds: {{ int64 $values.probes.timeoutSeconds }}
  failureThreshold: {{ int64 $values.probes.failureThreshold }}
{{- if or (eq .place "daemonset") $values.sidecar.gateReadiness }}
readinessProbe:
  {{- include "kvstore.probe" (dict "root" $root "path" "/readyz") | nindent 2 }}
  periodSeconds: {{ int64 $values.probes.periodSeconds }}
  timeoutSeconds: {{ int64 $values.probes.timeoutSeconds }}
{{- end }}
lifecycle:
  preStop:
    exec:
      {{- if eq .place "container" }}
      command: [sh, -c, "sleep {{ int64 $values.sidecar.preStopSeconds }}; exec kvstore flush --timeout 10"]
      {{- else }}
      command: [kvstore, flush, --timeout, "10"]
      {{- end }}
resources:
  {{- $memory := include "kvstore.memoryBytes" $root }}
  {{- $computed := dict "requests" (dict "memory" $memory) "limits" (dict "memory" $memory) }}
  {{- if and $values.ssd.enabled (eq $values.ssd.volume "emptyDir") }}
  {{- /* So that the scheduler finds a node with the room, which the slab takes at the start. */}}
  {{- $_ := set $computed.requests "ephemeral-storage" (include "kvstore.ssdVolumeBytes" $root) }}
  {{- end }}
  {{- toYaml (merge (dict) (deepCopy $values.resources) $computed) | nindent 2 }}
securityContext:
  {{- include "kvstore.containerSecurity" $root | nindent 2 }}
volumeMounts:
  {{- include "kvstore.replicaMounts" $root | nindent 2 }}
  - name: kvstore-config
    mountPath: /etc/kvstore/config
    readOnly: true
  - name: kvstore-tmp
    mountPath: /tmp
  {{- if $values.ssd.enabled }}
  - name: kvstore-ssd
    mountPath: /var/lib/kvstore
  {{- end }}
  {{- range $name, $secret := include "kvstore.secretFolders" $root | fromJson }}
  - name: kvstore-{{ $name }}
    mountPath: /etc/kvstore/{{ $name }}
    readOnly: true
  {{- end }}
{{- end -}}

{{/* Asks over HTTP where the kubelet can, else by a command in the container. */}}
{{- define "kvstore.probe" -}}
{{- $values := .root.Values -}}
{{- if and (include "kvstore.isServing" .root) (not $values.http.tls.requireClientCertificate) -}}
httpGet:
  path: {{ .path }}
  port: {{ int64 $values.http.port }}
  scheme: HTTPS
{{- else -}}
exec:
  command: [kvstore, stats, --timeout, {{ $values.probes.timeoutSeconds | int64 | toString | quote }}]
{{- end -}}
{{- end -}}

{{/* Secrets as folders of /etc/kvstore: for each the Secret, and the files taken from it (key to file name). */}}
{{- define "kvstore.secretFolders" -}}
{{- $folders := dict -}}
{{- if .Values.http.enabled -}}
{{- with include "kvstore.keyringSecret" . -}}
{{- $_ := set $folders "api-keys" (dict "secret" . "items" (dict (ternary "keys" $.Values.http.apiKeys.key (empty $.Values.http.apiKeys.existingSecret)) "keys")) -}}
{{- end -}}
{{- with include "kvstore.httpTlsSecret" . -}}
{{- $items := dict "tls.crt" "tls.crt" "tls.key" "tls.key" -}}
{{- if $.Values.http.tls.requireClientCertificate -}}{{- $_ := set $items "ca.crt" "ca.crt" -}}{{- end -}}
{{- $_ := set $folders "http-tls" (dict "secret" . "items" $items) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.events.enabled (not .Values.events.open) -}}
{{- $items := dict "server.key_secret" "server.key_secret" -}}
{{- range .Values.events.clients -}}
{{- $_ := set $items (printf "%s.key" .) (printf "clients/%s.key" .) -}}
{{- end -}}
{{- $_ := set $folders "events" (dict "secret" .Values.events.keysSecret "items" $items) -}}
{{- end -}}
{{- with include "kvstore.masterKeysSecret" . -}}
{{- $_ := set $folders "master-keys" (dict "secret" . "items" (dict (ternary "master.keys" $.Values.encryption.key (empty $.Values.encryption.existingSecret)) "master.keys")) -}}
{{- end -}}
{{- if ne .Values.redis.mode "none" -}}
{{- with include "kvstore.redisSecret" . -}}
{{- $_ := set $folders "redis" (dict "secret" . "items" (dict $.Values.redis.auth.key "password")) -}}
{{- end -}}
{{- with include "kvstore.redisTlsSecret" . -}}
{{- $items := dict "ca.crt" "ca.crt" -}}
{{- if eq $.Values.redis.mode "external" -}}{{- $items = dict -}}{{- end -}}
{{- $_ := set $folders "redis-tls" (dict "secret" . "items" $items) -}}
{{- end -}}
{{- end -}}
{{- toJson $folders -}}
{{- end -}}

{{- define "kvstore.volumes" -}}
- name: kvstore-socket
  {{- if eq .Values.mode "daemonset" }}
  hostPath:
    path: {{ .Values.daemonset.socketFolder }}
    type: {{ ternary "DirectoryOrCreate" "Directory" .Values.daemonset.prepareFolder }}
  {{- else }}
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
  {{- end }}
- name: kvstore-config
  configMap:
    name: {{ include "kvstore.fullname" . }}
- name: kvstore-tmp
  emptyDir:
    medium: Memory
    sizeLimit: 16Mi
{{- if .Values.ssd.enabled }}
{{- $bytes := include "kvstore.ssdVolumeBytes" . }}
- name: kvstore-ssd
  {{- if eq .Values.ssd.volume "hostPath" }}
  hostPath:
    path: {{ .Values.ssd.hostPath }}
    type: {{ ternary "DirectoryOrCreate" "Directory" .Values.daemonset.prepareFolder }}
  {{- else if eq .Values.ssd.volume "ephemeral" }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .Values.ssd.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ $bytes | quote }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $bytes | quote }}
  {{- end }}
{{- end }}
{{- range $name, $folder := include "kvstore.secretFolders" . | fromJson }}
- name: kvstore-{{ $name }}
  secret:
    secretName: {{ $folder.secret }}
    defaultMode: 288
    {{- with $folder.items }}
    items:
      {{- range $key, $path := . }}
      - key: {{ $key }}
        path: {{ $path }}
      {{- end }}
    {{- end }}
{{- end }}
{{- end -}}

{{- define "kvstore.ssdVolumeBytes" -}}
{{- $bytes := include "kvstore.bytes" .Values.ssd.capacityBytes | int64 -}}
{{- add $bytes (div $bytes 10) (include "kvstore.recordsBytes" .) 268435456 -}}
{{- end -}}

{{/* Changes whenever pods have to be replaced to take up a new configuration. */}}
{{- define "kvstore.podAnnotations" -}}
checksum/config: {{ include "kvstore.toml" . | sha256sum }}
{{- with .Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvstore.podLabels" -}}
{{ include "kvstore.storeLabel" . }}
{{- with .Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}
