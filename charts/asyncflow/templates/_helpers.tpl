{{- /* The name of a Service has at most 63 characters and no dots; "-metrics" is appended to this name. */ -}}
{{- define "asyncflow.name" -}}
{{- $name := .Values.fullnameOverride | default (printf "%s-operator" .Release.Name | replace "." "-") | trunc 55 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "%q is not a valid name of a Service: choose a release name, or set fullnameOverride, with lower-case letters, digits and - only, and a letter first" $name) -}}
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

{{- /* The operator's rights in a namespace whose jobs it runs. Server-side apply needs patch and create to create an object. */ -}}
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
