{{- /* A Service has a name of 63 characters at most, without dots, and "-metrics" comes after this one. */ -}}
{{- define "asyncflow.name" -}}
{{- $name := .Values.fullnameOverride | default (printf "%s-operator" .Release.Name | replace "." "-") | trunc 55 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "%q is no name for a Service: give another release name, or fullnameOverride, of lower-case letters, digits and -, with a letter first" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "asyncflow.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "asyncflow.name" .) -}}
{{- end -}}

{{- define "asyncflow.masterSecret" -}}
{{- .Values.masterKey.existingSecret | default (printf "%s-master" (include "asyncflow.name" .)) -}}
{{- end -}}

{{- define "asyncflow.selector" -}}
app.kubernetes.io/name: asyncflow-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "asyncflow.labels" -}}
{{ include "asyncflow.selector" . }}
app.kubernetes.io/part-of: asyncflow
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "asyncflow.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* What the operator may do in a namespace whose jobs it runs. Server-side apply makes an object by patch and create. */ -}}
{{- define "asyncflow.rules" -}}
- apiGroups: [asyncflow.dev]
  resources: [rljobs]
  verbs: [list, watch, delete]
- apiGroups: [asyncflow.dev]
  resources: [transferqueues, weightsyncs]
  verbs: [list, watch, create, patch]
- apiGroups: [asyncflow.dev]
  resources: [rljobs/status, transferqueues/status, weightsyncs/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps, services, serviceaccounts, persistentvolumeclaims]
  verbs: [list, watch, create, patch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, watch, create, patch]
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [patch]
{{- end -}}
