{{- define "deltaforge.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "deltaforge.selector" -}}
app.kubernetes.io/name: deltaforge
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "deltaforge.labels" -}}
{{ include "deltaforge.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- /* What every pod has: not root, nothing mounted that it does not need, kernels in a folder that can be written to. */}}
{{- define "deltaforge.pod" -}}
serviceAccountName: {{ .Values.serviceAccountName }}
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile: {type: RuntimeDefault}
initContainers:
  # Numba does not load machine code from a folder that it cannot write to.
  - name: kernels
    image: {{ include "deltaforge.image" . | quote }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command: [cp, -a, /opt/kernels/., /kernels/]
    securityContext: {{- include "deltaforge.container" . | nindent 6 }}
    resources:
      requests: {cpu: 50m, memory: 64Mi}
      limits: {memory: 128Mi}
    volumeMounts:
      - {name: kernels, mountPath: /kernels}
volumes:
  - {name: kernels, emptyDir: {}}
  - {name: home, emptyDir: {}}
  - {name: storage, emptyDir: {}}
  - {name: work, emptyDir: {}}
  - {name: tmp, emptyDir: {}}
  - name: pipelines
    configMap: {name: {{ .Values.pipelines }}}
{{- end }}

{{- define "deltaforge.container" -}}
readOnlyRootFilesystem: true
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{- define "deltaforge.mounts" -}}
- {name: kernels, mountPath: /opt/kernels}
- {name: home, mountPath: /var/lib/deltaforge}
- {name: storage, mountPath: /opt/dagster/storage}
- {name: work, mountPath: /opt/spark/work}
- {name: tmp, mountPath: /tmp}
- {name: pipelines, mountPath: /etc/deltaforge/pipelines, readOnly: true}
{{- end }}

{{- define "deltaforge.environment" -}}
- configMapRef: {name: {{ .Release.Name }}-settings}
{{- range .Values.secrets }}
- secretRef: {name: {{ . }}}
{{- end }}
{{- end }}
