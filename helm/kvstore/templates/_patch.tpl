{{/* A strategic merge patch of a Deployment or StatefulSet: lists of containers and volumes merge by name. */}}
{{- define "kvstore.patch" -}}
spec:
  template:
    metadata:
      labels:
        {{- include "kvstore.podLabels" . | nindent 8 }}
      annotations:
        {{- include "kvstore.podAnnotations" . | nindent 8 }}
    spec:
      securityContext:
        {{- include "kvstore.podSecurity" . | nindent 8 }}
      {{- with include "kvstore.initContainers" . }}
      initContainers:
        {{- . | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ .Values.sidecar.replicaContainer }}
          env:
            {{- include "kvstore.replicaEnv" . | nindent 12 }}
          securityContext:
            runAsNonRoot: true
            runAsUser: {{ int64 .Values.runAsUser }}
          volumeMounts:
            {{- include "kvstore.replicaMounts" . | nindent 12 }}
        {{- with include "kvstore.containers" . }}
        {{- . | nindent 8 }}
        {{- end }}
      volumes:
        {{- include "kvstore.volumes" . | nindent 8 }}
{{- end -}}
