{{/* Sets the label by which remaining objects are found. */}}
{{- define "kruise.labels" -}}
app.kubernetes.io/part-of: kruise-rs
{{- end }}

{{/* Whether gate KruiseDaemon is on, as the programs read the gates: the last value counts, and its own name before AllBeta. */}}
{{- define "kruise.hasDaemon" -}}
{{- $gates := dict }}
{{- range splitList "," (nospace .Values.featureGates) }}
{{- $gate := splitList "=" . }}
{{- $_ := set $gates (first $gate) (lower (last $gate)) }}
{{- end }}
{{- if ne (default (get $gates "AllBeta") (get $gates "KruiseDaemon")) "false" }}true{{ end }}
{{- end }}

{{/* RUST_LOG, if the level is not one of OpenKruise's numbers. */}}
{{- define "kruise.rustLog" -}}
{{- if not (regexMatch "^[0-9]*$" (toString .)) }}
- name: RUST_LOG
  value: {{ toString . | quote }}
{{- end }}
{{- end }}

{{/* HOST:PORT of a list [host, port]; IPv6 addresses get brackets. */}}
{{- define "kruise.address" -}}
{{- $host := first . -}}
{{- if contains ":" $host }}[{{ $host }}]{{ else }}{{ $host }}{{ end }}:{{ int (last .) }}
{{- end }}

{{/* The token, valid for an hour. Same as the volume that the API server would add, whose token may be valid for a year. */}}
{{- define "kruise.tokenVolume" -}}
- name: token
  projected:
    sources:
    - serviceAccountToken:
        path: token
        expirationSeconds: 3600
    - configMap:
        name: kube-root-ca.crt
        items:
        - key: ca.crt
          path: ca.crt
    - downwardAPI:
        items:
        - path: namespace
          fieldRef:
            fieldPath: metadata.namespace
{{- end }}

{{/* A Deployment of kruise-manager. Keys: root, name, role, label, replicas, resources. */}}
{{- define "kruise.deployment" -}}
{{- $values := .root.Values }}
{{- $manager := $values.manager }}
{{- $webhooks := eq .role "webhooks" }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .name }}
  namespace: {{ $values.installation.namespace }}
  labels:
    control-plane: {{ .label }}
    {{- include "kruise.labels" . | nindent 4 }}
spec:
  replicas: {{ int .replicas }}
  {{- if and $webhooks $manager.hostNetwork }}
  # Two Pods cannot have the same ports of a node: a new one may need the node of an old one.
  strategy:
    rollingUpdate:
      maxSurge: 0
      maxUnavailable: 1
  {{- end }}
  selector:
    matchLabels:
      control-plane: {{ .label }}
  template:
    metadata:
      labels:
        control-plane: {{ .label }}
    spec:
      serviceAccountName: {{ .name }}
      automountServiceAccountToken: false
      {{- with $values.imagePullSecrets }}
      imagePullSecrets:
      {{- toYaml . | nindent 6 }}
      {{- end }}
      {{- if and $webhooks $manager.hostNetwork }}
      hostNetwork: true
      dnsPolicy: ClusterFirstWithHostNet
      {{- end }}
      priorityClassName: system-cluster-critical
      terminationGracePeriodSeconds: 10
      {{- with $manager.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $manager.tolerations }}
      tolerations:
      {{- toYaml . | nindent 6 }}
      {{- end }}
      affinity:
        {{- with $manager.nodeAffinity }}
        nodeAffinity:
          {{- toYaml . | nindent 10 }}
        {{- end }}
        podAntiAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
          - weight: 100
            podAffinityTerm:
              topologyKey: kubernetes.io/hostname
              labelSelector:
                matchLabels:
                  control-plane: {{ .label }}
      topologySpreadConstraints:
      - topologyKey: topology.kubernetes.io/zone
        maxSkew: 1
        whenUnsatisfiable: ScheduleAnyway
        labelSelector:
          matchLabels:
            control-plane: {{ .label }}
      securityContext:
        runAsNonRoot: true
        runAsUser: 65532
        runAsGroup: 65532
        seccompProfile:
          type: RuntimeDefault
      containers:
      - name: manager
        image: {{ printf "%s:%s" $manager.image.repository (default .root.Chart.AppVersion $manager.image.tag) | quote }}
        imagePullPolicy: {{ $manager.image.pullPolicy }}
        command: [/kruise-manager]
        args:
        - {{ printf "--role=%s" .role | quote }}
        - {{ printf "--health-probe-addr=:%d" (int $manager.healthProbe.port) | quote }}
        {{- if $values.secureMetrics.enabled }}
        - --metrics-addr=0
        - {{ printf "--secure-metrics-addr=:%d" (int $manager.metrics.port) | quote }}
        {{- else }}
        - {{ printf "--metrics-addr=%s" (include "kruise.address" (list $manager.metrics.host $manager.metrics.port)) | quote }}
        {{- end }}
        {{- with $values.featureGates }}
        - {{ printf "--feature-gates=%s" . | quote }}
        {{- end }}
        {{- with $manager.loggingFormat }}
        - {{ printf "--log-format=%s" . | quote }}
        {{- end }}
        {{- if and $values.tracing.endpoint (eq .role "controllers") }}
        - {{ printf "--tracing-endpoint=%s" $values.tracing.endpoint | quote }}
        - {{ printf "--tracing-sampling-rate-per-million=%d" (int $values.tracing.samplingRatePerMillion) | quote }}
        {{- end }}
        env:
        - name: POD_NAMESPACE
          valueFrom:
            fieldRef:
              fieldPath: metadata.namespace
        {{- if $webhooks }}
        - name: WEBHOOK_PORT
          value: {{ int $manager.webhook.port | quote }}
        {{- end }}
        {{- include "kruise.rustLog" $manager.log.level | nindent 8 }}
        ports:
        {{- if $webhooks }}
        - name: webhook
          containerPort: {{ int $manager.webhook.port }}
        {{- end }}
        - name: health
          containerPort: {{ int $manager.healthProbe.port }}
        - name: metrics
          containerPort: {{ int $manager.metrics.port }}
        {{- if $webhooks }}
        # API servers send requests until they notice that the Pod is terminating.
        lifecycle:
          preStop:
            sleep:
              seconds: 5
        {{- end }}
        livenessProbe:
          httpGet:
            port: health
            path: /healthz
          initialDelaySeconds: 10
          periodSeconds: 10
          timeoutSeconds: 5
        readinessProbe:
          httpGet:
            port: health
            path: /readyz
          periodSeconds: 2
          timeoutSeconds: 5
        resources:
          {{- toYaml .resources | nindent 10 }}
        securityContext:
          privileged: false
          allowPrivilegeEscalation: false
          readOnlyRootFilesystem: true
          capabilities:
            drop: [ALL]
        volumeMounts:
        - name: token
          mountPath: /var/run/secrets/kubernetes.io/serviceaccount
          readOnly: true
      volumes:
      {{- include "kruise.tokenVolume" . | nindent 6 }}
{{- end }}
