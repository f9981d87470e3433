{{- define "p2pdist.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Labels of an object; with a list of the root and a component, of that component's. */}}
{{- define "p2pdist.labels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: p2pdist
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end }}

{{/* The name of a tracker by its number, from 1. */}}
{{- define "p2pdist.tracker" -}}
p2pdist-tracker{{ if gt (int .) 1 }}-{{ . }}{{ end }}
{{- end }}

{{/* The URLs of all trackers. */}}
{{- define "p2pdist.urls" -}}
{{- $urls := list -}}
{{- range $number := untilStep 1 (int (add1 .Values.tracker.count)) 1 -}}
{{- $urls = append $urls (printf "https://%s.%s.svc:7070" (include "p2pdist.tracker" $number) $.Release.Namespace) -}}
{{- end -}}
{{ join "," $urls }}
{{- end }}

{{/* What the container of each verb may: nothing beyond its own process. */}}
{{- define "p2pdist.closed" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "p2pdist.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}
