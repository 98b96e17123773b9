{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}

{{- /* Labels of a component, by which it is selected. Takes (the root, its name). */ -}}
{{- define "vllm-pd.labels" -}}
app.kubernetes.io/name: vllm-pd
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- /* A label selector of these components. Takes (the root, names...). */ -}}
{{- define "vllm-pd.selector" -}}
matchLabels: {app.kubernetes.io/name: vllm-pd, app.kubernetes.io/instance: {{ (index . 0).Release.Name }}}
matchExpressions: [{key: app.kubernetes.io/component, operator: In, values: [{{ join ", " (rest .) }}]}]
{{- end -}}

{{- define "vllm-pd.broker" -}}
{{- .Values.broker.url | default (printf "tcp://%s-broker:5700" .Release.Name) -}}
{{- end -}}

{{- define "vllm-pd.on-nats" -}}
{{- if not (hasPrefix "tcp://" (include "vllm-pd.broker" .)) }}yes{{ end -}}
{{- end -}}

{{- /* Whether anything follows the KV events and the load of decode engines. */ -}}
{{- define "vllm-pd.follows" -}}
{{- if or .Values.router.enabled .Values.picker.enabled }}yes{{ end -}}
{{- end -}}

{{- /* What router and picker are told of the fleet. */ -}}
{{- define "vllm-pd.fleet-args" -}}
- --broker={{ include "vllm-pd.broker" . }}
- --keys=/etc/vllm-pd/vllm-pd.keys
{{- if include "vllm-pd.on-nats" . }}
- --nats-credentials=/etc/vllm-pd/user.creds
- --nats-prefix={{ .Values.settings.nats_prefix | default "vllm_pd" }}
{{- if .Values.broker.natsCa }}
- --nats-ca=/etc/vllm-pd/ca.crt
{{- end }}
{{- end }}
{{- with .Values.settings.ttl_s }}
- --ttl-s={{ . }}
{{- end }}
- --tokenizer={{ .Values.model.path }}
- --unready-s={{ .Values.decode.preStopS }}
- --grace-s={{ .Values.decode.drainTimeoutS }}
{{- end -}}

{{- /* Prometheus' job of the engines, routers or pickers, which the alerts add up by. Takes (the root, "engine", "router" or
"picker"). */ -}}
{{- define "vllm-pd.job" -}}
vllm-pd-{{ index . 1 }}-{{ (index . 0).Release.Namespace }}-{{ (index . 0).Release.Name }}
{{- end -}}

{{- /* --kv-transfer-config of an engine. Takes (the root, kv_role, the engine's values). */ -}}
{{- define "vllm-pd.transfer" -}}
{{- $root := index . 0 -}}
{{- $settings := dict "broker" (include "vllm-pd.broker" $root) "bind" "tcp://auto:5702" "lifeline_port" 5703
    "keys" "/etc/vllm-pd/vllm-pd.keys" "drain_timeout_s" (index . 2).drainTimeoutS -}}
{{- if include "vllm-pd.on-nats" $root }}
  {{- $_ := set $settings "nats_credentials" "/etc/vllm-pd/user.creds" -}}
  {{- if $root.Values.broker.natsCa }}{{ $_ := set $settings "nats_ca" "/etc/vllm-pd/ca.crt" }}{{ end -}}
{{- end -}}
{{- dict "kv_connector" "PDConnector" "kv_role" (index . 1)
    "kv_connector_extra_config" (merge $settings $root.Values.settings) | toJson -}}
{{- end -}}

{{- /* Who runs, and what of the Secret it sees: root owns the files, and the group may read them. */ -}}
{{- define "vllm-pd.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false # vLLM reads variables like VLLM_PORT, which a Service named "vllm" would set
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "vllm-pd.keys" -}}
- name: keys
  secret:
    secretName: {{ .Values.secret }}
    defaultMode: 0440
    items:
    - {key: vllm-pd.keys, path: vllm-pd.keys}
    {{- if include "vllm-pd.on-nats" . }}
    - {key: user.creds, path: user.creds}
    {{- if .Values.broker.natsCa }}
    - {key: ca.crt, path: ca.crt}
    {{- end }}
    {{- end }}
{{- end -}}

{{- /* A probe's command: one token on the path of a completion. The route needs the server's key, so it is no httpGet. */ -}}
{{- define "vllm-pd.generates" -}}
exec:
  command:
  - python3
  - -c
  - |
    import os, urllib.request
    key = {"Authorization": "Bearer " + os.environ["VLLM_API_KEY"]}
    urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:8000/health_generate", headers=key), timeout=55)
{{- end -}}

{{- /* Refuses values that values.schema.json can't see to be wrong. */ -}}
{{- define "vllm-pd.check" -}}
{{- $broker := .Values.broker -}}
{{- if and $broker.embedded $broker.url }}
  {{- fail (printf "broker.url=%q can't be used: broker.embedded is true, and a fleet has one broker: set broker.embedded to false, or leave broker.url empty" $broker.url) }}
{{- end }}
{{- if not (or $broker.embedded $broker.url) }}
  {{- fail "broker.url=\"\" can't be used: broker.embedded is false, and engines without a broker have no peers: write one like nats://nats.nats:4222, or set broker.embedded to true" }}
{{- end }}
{{- if and $broker.embedded (ne (int $broker.replicas) 1) }}
  {{- fail (printf "broker.replicas=%d can't be used: each broker would know a part of the engines: write 1, or set broker.embedded to false and broker.url to a NATS cluster of three servers" (int $broker.replicas)) }}
{{- end }}
{{- if and $broker.natsCa (not (hasPrefix "tls://" $broker.url)) }}
  {{- fail (printf "broker.natsCa=true can't be used: broker.url=%q has no certificate: write tls://, or set broker.natsCa to false" $broker.url) }}
{{- end }}
{{- $picker := .Values.picker -}}
{{- if and $picker.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.gateways) }}
  {{- fail "networkPolicy.gateways=[] can't be used: picker.enabled is true, and no gateway could ask it: write your gateways' pods like [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: gateway}}}], or set picker.enabled to false" }}
{{- end }}
{{- if and $picker.inferencePool (not $picker.enabled) }}
  {{- fail "picker.inferencePool=true can't be used: picker.enabled is false, and an InferencePool needs a picker: set picker.enabled to true, or picker.inferencePool to false" }}
{{- end }}
{{- if and $picker.tls.clientCa (not $picker.tls.enabled) }}
  {{- fail "picker.tls.clientCa=true can't be used: picker.tls.enabled is false, and gateways without TLS show no certificate: set picker.tls.enabled to true, or picker.tls.clientCa to false" }}
{{- end }}
{{- range $picker.args }}
  {{- if regexMatch "^--(host|port|metrics-port|health-port|tls-.*|broker|keys|nats-.*|ttl-s|unready-s|grace-s|worker-api-key|order)(=|$)" . }}
    {{- fail (printf "picker.args=%q can't be used: the chart sets it, its key belongs into the Secret, or a picker has no choice there: leave it out; certificates are in picker.tls, the broker in `broker`, times in decode.preStopS and decode.drainTimeoutS" .) }}
  {{- end }}
{{- end }}
{{- range $name := list "decode" "prefill" }}
  {{- range (index $.Values $name).args }}
    {{- if regexMatch "^--(host|port|uds|ssl-.*|root-path|api-key|served-model-name|kv-transfer-config|kv-events-config|data-parallel.*)(=|$)" . }}
      {{- fail (printf "%s.args=%q can't be used: the chart sets it, or has no ports for it: leave it out; settings are in `settings`, engines instead of data-parallel ranks in %s.replicas" $name . $name) }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end -}}
