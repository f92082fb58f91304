{{- define "doll.labels" -}}
app.kubernetes.io/name: doll
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "doll.selector" -}}
app.kubernetes.io/name: doll
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "doll.name" -}}
{{ printf "%s-%s" .root.Release.Name .role | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "doll.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- /* A role that the others name in commands: its pods are those of a Job with another name after each upgrade. */ -}}
{{- define "doll.exec" -}}
kubectl -n {{ .root.Release.Namespace }} exec $(kubectl -n {{ .root.Release.Namespace }} get pods -o name -l app.kubernetes.io/instance={{ .root.Release.Name }},app.kubernetes.io/component={{ .role }} | head -n 1) -- doll
{{- end }}

{{- /* Labels with which Kueue admits a Job, or a pod of a worker, from a queue. */ -}}
{{- define "doll.queueLabels" -}}
{{- $labels := dict }}
{{- with .name }}
{{- $_ := set $labels "kueue.x-k8s.io/queue-name" . }}
{{- end }}
{{- with .priorityClass }}
{{- $_ := set $labels "kueue.x-k8s.io/priority-class" . }}
{{- end }}
{{- with $labels }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{- /* What users put on the pods of a role, and on all: a Kueue queue, karpenter.sh/do-not-disrupt. */ -}}
{{- define "doll.podLabels" -}}
{{- toYaml (merge (dict "app.kubernetes.io/component" .role) (include "doll.labels" .root | fromYaml) (.values.podLabels | default dict) .root.Values.podLabels) }}
{{- end }}

{{- define "doll.podAnnotations" -}}
{{- toJson (merge (.own | default dict) (.values.podAnnotations | default dict) .root.Values.podAnnotations) }}
{{- end }}

{{- /* The pod of a role: .root, .role, .args, .resources; the job file, no rights, nothing of the node. */ -}}
{{- define "doll.podSpec" -}}
{{- if .once }}
restartPolicy: Never
{{- else if .runsToEnd }}
restartPolicy: OnFailure
{{- end }}
serviceAccountName: {{ .account | default (include "doll.name" (dict "root" .root "role" "job")) }}
automountServiceAccountToken: {{ .token | default false }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- if gt (int .replicas) 1 }}
topologySpreadConstraints: # over zones and nodes, where there are several
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "doll.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
containers:
  - name: {{ .container | default .role }}
    image: {{ include "doll.image" .root }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    args: {{ toJson .args }}
    env:
      - {name: DOLL_JOB, value: /job/job.yaml}
      - {name: DOLL_HEALTH_PORT, value: {{ .healthPort | default "8080" | quote }}}
      {{- if .healthHost }}
      - {name: DOLL_HEALTH_HOST, value: {{ .healthHost | quote }}}
      {{- end }}
      - {name: DOLL_FINAL_EXIT_CODE, value: "0"}
      {{- range $name, $value := .root.Values.env }}
      - {name: {{ $name }}, value: {{ $value | quote }}}
      {{- end }}
      {{- if .runsToEnd }}
      - {name: DOLL_STOPPED_EXIT_CODE, value: "143"} # a Job replaces a pod that was stopped, not one that has ended
      {{- end }}
      {{- if .indexed }}
      - name: DOLL_JOINER
        valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
      {{- end }}
      {{- if .fresh }}
      - {name: DOLL_FRESH, value: "1"}
      {{- end }}
    {{- with concat .root.Values.secrets (.values.secrets | default list) }}
    envFrom:
      {{- range . }}
      - secretRef: {name: {{ . }}}
      {{- end }}
    {{- end }}
    {{- if .healthHost }}
    ports: [{name: metrics, containerPort: {{ .healthPort }}}]
    {{- end }}
    {{- if .httpScheme }}
    ports: [{name: http, containerPort: 8000}]
    readinessProbe: {httpGet: {path: /v2/health/ready, port: http, scheme: {{ .httpScheme }}}, periodSeconds: 5, timeoutSeconds: 5}
    lifecycle: {preStop: {exec: {command: [sleep, "5"]}}} # until no service sends requests here any more
    {{- end }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
    resources: {{ toJson .resources }}
    {{- if .page }}
    {{- /* It listens on loopback, where only an exec and a port-forward reach it, and a kubelet's request does not. */ -}}
    {{- $ask := printf "import urllib.request as r; r.urlopen('http://127.0.0.1:%s/', timeout=5)" .page }}
    startupProbe: {exec: {command: [python, -c, {{ $ask | quote }}]}, periodSeconds: 5, timeoutSeconds: 10, failureThreshold: 60}
    livenessProbe: {exec: {command: [python, -c, {{ $ask | quote }}]}, periodSeconds: 30, timeoutSeconds: 10, failureThreshold: 4}
    {{- else if not .once }}
    startupProbe: {exec: {command: [doll, health]}, periodSeconds: 5, timeoutSeconds: 10, failureThreshold: 60}
    livenessProbe: {exec: {command: [doll, health]}, periodSeconds: 30, timeoutSeconds: 10, failureThreshold: 4}
    {{- end }}
    volumeMounts:
      - {name: job, mountPath: /job, readOnly: true}
      - {name: tmp, mountPath: /tmp}
      - {name: runs, mountPath: /var/lib/doll/runs}
      {{- if and .root.Values.checkpoints.existingClaim (not (has .role (list "worker" "stage"))) }}
      - {name: checkpoints, mountPath: {{ .root.Values.checkpoints.mountPath }}}
      {{- end }}
      {{- range $folder, $secret := .root.Values.secretFiles }}
      - {name: secret-{{ $secret }}, mountPath: {{ $folder }}, readOnly: true}
      {{- end }}
volumes:
  - name: job
    configMap: {name: {{ include "doll.name" (dict "root" .root "role" "job") }}}
  - {name: tmp, emptyDir: {}}
  - {name: runs, emptyDir: {}}
  {{- if and .root.Values.checkpoints.existingClaim (not (has .role (list "worker" "stage"))) }}
  - {name: checkpoints, persistentVolumeClaim: {claimName: {{ .root.Values.checkpoints.existingClaim }}}}
  {{- end }}
  {{- range $folder, $secret := .root.Values.secretFiles }}
  - {name: secret-{{ $secret }}, secret: {secretName: {{ $secret }}}}
  {{- end }}
{{- end }}
