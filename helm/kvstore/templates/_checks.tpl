{{/* What the schema cannot say. Each message names the value and what to do. */}}

{{- define "kvstore.checks" -}}
{{- $v := .Values -}}
{{- if and (include "kvstore.isServing" .) (not (include "kvstore.keyringSecret" .)) -}}
{{- fail "kvstore: http.address is not loopback, so http.apiKeys.existingSecret is required: a Secret with the keyring that `kvstore keys` makes" -}}
{{- end -}}
{{- if and (include "kvstore.isServing" .) (not (include "kvstore.httpTlsSecret" .)) -}}
{{- fail "kvstore: http.address is not loopback, so http.tls.existingSecret or certManager.enabled is required" -}}
{{- end -}}
{{- if and $v.http.apiKeys.existingSecret $v.http.apiKeys.text -}}
{{- fail "kvstore: give one of http.apiKeys.existingSecret and http.apiKeys.text" -}}
{{- end -}}
{{- if and $v.events.enabled (not $v.events.open) (not (and $v.events.keysSecret $v.events.clients)) -}}
{{- fail "kvstore: events.enabled needs events.keysSecret and events.clients, or events.open where networkPolicy.eventsFrom keeps out everybody else" -}}
{{- end -}}
{{- if and $v.events.open $v.events.keysSecret -}}
{{- fail "kvstore: give one of events.keysSecret and events.open" -}}
{{- end -}}
{{- if and $v.events.open $v.events.clients -}}
{{- fail "kvstore: events.open lets in everybody, so events.clients keeps out nobody: give one of them" -}}
{{- end -}}
{{- if and $v.events.enabled $v.events.open (not $v.networkPolicy.enabled) -}}
{{- fail "kvstore: events.open without networkPolicy.enabled lets in everybody: give events.keysSecret and events.clients instead" -}}
{{- end -}}
{{- if and $v.encryption.existingSecret $v.encryption.text -}}
{{- fail "kvstore: give one of encryption.existingSecret and encryption.text" -}}
{{- end -}}
{{- if and $v.certManager.enabled (not $v.certManager.issuerRef.name) -}}
{{- fail "kvstore: certManager.enabled needs certManager.issuerRef.name" -}}
{{- end -}}
{{- if eq $v.redis.mode "external" -}}
{{- if not $v.redis.external.url -}}{{- fail "kvstore: redis.mode is external, so redis.external.url is required" -}}{{- end -}}
{{- if ne $v.redis.tls.enabled (hasPrefix "rediss" $v.redis.external.url) -}}
{{- fail "kvstore: redis.tls.enabled and a redis.external.url that begins with rediss go together" -}}
{{- end -}}
{{- end -}}
{{- if and (eq $v.redis.mode "bundled") $v.redis.tls.enabled (not (include "kvstore.redisTlsSecret" .)) -}}
{{- fail "kvstore: redis.tls.enabled with the bundled server needs redis.tls.secret or certManager.enabled" -}}
{{- end -}}
{{- if and (eq $v.redis.mode "bundled") (not $v.redis.username) -}}
{{- fail "kvstore: the bundled Redis admits no default user: redis.username is required" -}}
{{- end -}}
{{- if and (eq $v.ssd.volume "hostPath") $v.ssd.enabled (ne $v.mode "daemonset") -}}
{{- fail "kvstore: ssd.volume hostPath needs mode daemonset: two pods on a node cannot share the folder" -}}
{{- end -}}
{{- if and $v.replica.enabled (not $v.replica.container.image) -}}
{{- fail "kvstore: replica.enabled needs replica.container with an image" -}}
{{- end -}}
{{- if and $v.replica.enabled (eq $v.mode "daemonset") -}}
{{- fail "kvstore: replica.enabled goes with mode sidecar" -}}
{{- end -}}
{{- if and (or $v.metrics.podMonitor.enabled $v.metrics.serviceMonitor.enabled) (not (and (include "kvstore.isServing" .) $v.metrics.keySecret)) -}}
{{- fail "kvstore: metrics are scraped over HTTP: http.enabled on the pod's network, and metrics.keySecret with a key of scope admin are required" -}}
{{- end -}}
{{- if and $v.metrics.serviceMonitor.enabled (not $v.service.enabled) -}}
{{- fail "kvstore: metrics.serviceMonitor.enabled needs service.enabled" -}}
{{- end -}}
{{- $needed := include "kvstore.memoryBytes" . | int64 -}}
{{- with dig "limits" "memory" "" $v.resources -}}
{{- if lt (include "kvstore.quantityBytes" . | int64) $needed -}}
{{- fail (printf "kvstore: resources.limits.memory is %v, the store needs %d bytes: config.tiers.dram.capacity_bytes and staging_bytes, memory.overheadBytes, and without ssd config.store.records_bytes" . $needed) -}}
{{- end -}}
{{- end -}}
{{- end -}}
