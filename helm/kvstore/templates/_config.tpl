{{/* The store's TOML: what values say, and what the chart decides. JSON's scalars and lists are TOML's too. */}}

{{- define "kvstore.toml" -}}
{{- $set := dict "server" (dict "socket" "/run/kvstore/kvstore.sock") -}}
{{- if .Values.http.enabled -}}
{{- $address := ternary (printf "[%s]" .Values.http.address) .Values.http.address (contains ":" .Values.http.address) -}}
{{- $http := dict "listen" (printf "%s:%d" $address (int64 .Values.http.port)) -}}
{{- if include "kvstore.keyringSecret" . -}}{{- $_ := set $http "api_keys" "file:/etc/kvstore/api-keys/keys" -}}{{- end -}}
{{- if include "kvstore.httpTlsSecret" . -}}{{- $_ := set $http "tls_folder" "/etc/kvstore/http-tls" -}}{{- end -}}
{{- $_ := set $set "http" $http -}}
{{- end -}}
{{- if .Values.ssd.enabled -}}
{{- $_ := set $set "tiers.ssd" (dict "path" "/var/lib/kvstore/ssd" "capacity_bytes" .Values.ssd.capacityBytes) -}}
{{- end -}}
{{- if ne .Values.redis.mode "none" -}}
{{- $remote := dict "url" (include "kvstore.redisUrl" .) -}}
{{- if include "kvstore.redisSecret" . -}}
{{- $_ := set $remote "password" "file:/etc/kvstore/redis/password" -}}
{{- with .Values.redis.username -}}{{- $_ := set $remote "username" . -}}{{- end -}}
{{- end -}}
{{- if include "kvstore.redisTlsSecret" . -}}{{- $_ := set $remote "tls_folder" "/etc/kvstore/redis-tls" -}}{{- end -}}
{{- $_ := set $set "tiers.remote" $remote -}}
{{- end -}}
{{- if include "kvstore.masterKeysSecret" . -}}
{{- $_ := set $set "encryption" (dict "keys" "file:/etc/kvstore/master-keys/master.keys") -}}
{{- end -}}
{{- $tiers := .Values.config.tiers | default dict -}}
{{- $given := dict "server" .Values.config.server "http" .Values.config.http "store" .Values.config.store "tiers.dram" $tiers.dram "tiers.ssd" $tiers.ssd "tiers.remote" $tiers.remote -}}
{{- range $section := list "server" "http" "store" "tiers.dram" "tiers.ssd" "tiers.remote" "encryption" -}}
{{- $needsSwitch := has $section (list "http" "tiers.ssd" "tiers.remote") -}}
{{- $keys := merge (dict) (get $set $section | default dict) (get $given $section | default dict) -}}
{{- if and $keys (or (hasKey $set $section) (not $needsSwitch)) }}
[{{ $section }}]
{{- range $key, $value := $keys }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{ end -}}
{{- end -}}
{{- end -}}
