# SPDX-License-Identifier: Apache-2.0
"""What can be said about Kubernetes manifests without a cluster: `problems` reads them as their readers will.

Commands and settings are parsed by our own code and by vLLM, and what they say (ports, files, times, roles) is compared
with what Services, NetworkPolicies, volumes, grace periods and monitors say about the same.
"""
import copy
import json
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from vllm_pd.errors import PDError
from vllm_pd.protocol.messages import Role
from vllm_pd.rpc.secret_files import problem_of_mode
from vllm_pd.settings.engine import PDConfig

ROLES = {"decode": Role.DECODE, "prefill": Role.PREFILL}  # of the components that are engines
IMAGE = re.compile(r"[\w./-]+:(v?\d[\w.-]*)")
LAST_S = {"router": 4, "picker": 5}  # in which each ends the requests that are still open
MARGIN_S = 5  # in which a process ends that has nothing open any more
EPHEMERAL = (32768, 60999)  # net.ipv4.ip_local_port_range
EVERYBODY = {"namespaceSelector": {}}  # the pods of all namespaces, as a peer of a NetworkPolicy
OUTSIDE = {"app": "another"}  # the labels of a pod that is none of the fleet's
# The fields of an InferencePool: kubernetes-sigs/gateway-api-inference-extension v1.0.0, which has the first v1 of it,
# config/crd/bases/inference.networking.k8s.io_inferencepools.yaml. v1.6.0 has appProtocol, too, and takes eight ports.
POOL_FIELDS = {"selector", "targetPorts", "endpointPickerRef"}
PICKER_FIELDS = {"group", "kind", "name", "port", "failureMode"}
Ports = set[tuple[int, int]]  # the first and the last one of each range


@dataclass(frozen=True)
class Readers:
    """`run` parses the arguments of `vllm-pd`, `serve` those of `vllm serve`; both raise for what is wrong. `names` is
    what they can look up. `secret` is a folder with a valid file for each key of the Secret. `schemas` says what is
    wrong with a document by the schema of its kind."""
    run: Callable[[Sequence[str]], dict[str, Any]]
    serve: Callable[[Sequence[str]], dict[str, Any]]
    names: set[str]
    secret: Path
    schemas: Callable[[dict], str]


@dataclass(frozen=True)
class Pod:
    """The pods of a Deployment, each with one container."""
    deployment: dict

    @property
    def name(self) -> str:
        return self.deployment["metadata"]["name"]

    @property
    def labels(self) -> dict[str, str]:
        return self.deployment["spec"]["template"]["metadata"]["labels"]

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def spec(self) -> dict:
        return self.deployment["spec"]["template"]["spec"]

    @property
    def container(self) -> dict:
        [container] = self.spec["containers"]
        return container

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @cached_property
    def env(self) -> dict[str, str]:
        return {one["name"]: one.get("value", "") for one in self.container.get("env", ())}

    @property
    def args(self) -> list[str]:
        """As the kubelet gives them to the process."""
        return [re.sub(r"\$\((\w+)\)", lambda found: self.env.get(found[1], found[0]), word)
                for word in self.container["args"]]

    @property
    def transfer(self) -> dict[str, Any]:
        """--kv-transfer-config of an engine."""
        [text] = [word for word in self.args if word.startswith("--kv-transfer-config=")]
        return json.loads(text.partition("=")[2])

    @property
    def secrets(self) -> list[dict]:
        """The volumes that are Secrets."""
        return [one for one in self.spec["volumes"] if "secret" in one]

    def with_files(self, text: str, folder: Path) -> str:
        """`text` with the places, below `folder`, of those files of Secrets that the container sees."""
        mounts = {one["name"]: one["mountPath"] for one in self.container["volumeMounts"]}
        for volume in self.secrets:
            seen = folder / self.name / volume["name"]
            shutil.rmtree(seen, ignore_errors=True)
            seen.mkdir(parents=True)
            for item in volume["secret"]["items"]:
                (seen / item["path"]).hardlink_to(folder / item["key"])
            if volume["name"] in mounts:
                text = text.replace(f"{mounts[volume['name']]}/", f"{seen}/")
        return text


@dataclass(frozen=True)
class Fleet:
    """All manifests of one fleet."""
    documents: Sequence[dict]

    def all(self, kind: str) -> list[dict]:
        return [one for one in self.documents if one["kind"] == kind]

    @cached_property
    def pods(self) -> list[Pod]:
        return [Pod(one) for one in self.all("Deployment")]

    def of(self, component: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.component == component]

    @property
    def engines(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.component in ROLES]

    def selected(self, selector: dict) -> list[Pod]:
        return [pod for pod in self.pods if selects(selector, pod.labels)]

    def open_ports(self, target: Pod, source: dict[str, str], own_namespace: bool = True) -> Ports | None:
        """To which ports of one pod another may connect, with these labels; None: to all, as no policy is about it."""
        rules = self.rules(target)
        return None if rules is None else {
            (port["port"], port.get("endPort", port["port"])) for rule in rules for port in rule["ports"]
            if any(_is_peer(peer, source, own_namespace) for peer in rule.get("from") or [EVERYBODY])}

    def rules(self, target: Pod) -> list[dict] | None:
        """Who may connect to a pod; None: everybody, as no policy is about it."""
        policies = [one["spec"] for one in self.all("NetworkPolicy")
                    if selects(one["spec"]["podSelector"], target.labels)]
        return [rule for policy in policies for rule in policy["ingress"]] if policies else None

    def peers(self, target: Pod, port: int) -> list[dict]:
        """Who may connect to a port of a pod, as the policies write it."""
        rules = self.rules(target)
        return [EVERYBODY] if rules is None else [
            peer for rule in rules for peer in rule.get("from") or [EVERYBODY] for one in rule["ports"]
            if one["port"] <= port <= one.get("endPort", one["port"])]


def selects(selector: dict, labels: dict[str, str]) -> bool:
    """Whether a label selector, with `In` as its only operator, is about a pod."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    assert all(one["operator"] == "In" for one in selector.get("matchExpressions", ()))
    return (selector.get("matchLabels", {}).items() <= labels.items()
            and all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ())))


def _is_peer(peer: dict, labels: dict[str, str], own_namespace: bool) -> bool:
    namespace = peer.get("namespaceSelector")
    if namespace is None and not own_namespace or namespace:  # a namespace is not known by labels here
        return False
    return selects(peer.get("podSelector", {}), labels)


def problems(documents: Sequence[dict], readers: Readers) -> list[str]:
    """What is wrong, each with the name of the manifest."""
    fleet = Fleet(copy.deepcopy(list(documents)))
    readers.names.clear()
    readers.names.update(one["metadata"]["name"] for one in fleet.all("Service"))
    found = [problem for document in documents if (problem := readers.schemas(document))]
    if found:  # the rest may rely on it
        return found
    checks = (_selectors, _safety, _secrets, _commands, _engines, _brokers, _pickers, _pools, _policies, _gateways,
              _monitors)
    return [problem for check in checks for problem in check(fleet, readers)]


def _selectors(fleet: Fleet, readers: Readers) -> Iterator[str]:
    for pod in fleet.pods:
        if fleet.selected(pod.deployment["spec"]["selector"]) != [pod]:
            yield f"{pod.name}: its selector is not about its own pods alone"
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        for one in fleet.all(kind):
            spec, name = one["spec"], f"{kind} {one['metadata']['name']}"
            selector = spec.get("selector", spec.get("podSelector"))
            pods = fleet.selected({"matchLabels": selector} if kind == "Service" else selector)
            if not pods:
                yield f"{name}: it selects no pod"
            wanted = [port["targetPort"] for port in spec.get("ports", ())] if kind == "Service" else \
                [one["port"] for one in spec.get("podMetricsEndpoints", ())]
            for pod in pods:
                for port in wanted:
                    if port not in pod.ports:
                        yield f"{name}: {pod.name} has no port {port!r}"


def _safety(fleet: Fleet, readers: Readers) -> Iterator[str]:
    for pod in fleet.pods:
        container, context = pod.container, pod.spec.get("securityContext", {})
        if not IMAGE.fullmatch(container["image"]):
            yield f"{pod.name}: {container['image']} has no exact tag"
        if not (context.get("runAsNonRoot") and context.get("runAsUser", 0) > 0):
            yield f"{pod.name}: it may run as root"
        if container["securityContext"]["capabilities"]["drop"] != ["ALL"]:
            yield f"{pod.name}: it keeps capabilities"
        if pod.component not in ROLES and not container["securityContext"].get("readOnlyRootFilesystem"):
            yield f"{pod.name}: it may change its own files"
        if pod.spec.get("enableServiceLinks", True):
            yield f"{pod.name}: Services set its variables"


def _secrets(fleet: Fleet, readers: Readers) -> Iterator[str]:
    folder = SimpleNamespace(st_uid=0, st_mode=stat.S_IFDIR | 0o755)
    for pod in fleet.pods:
        for volume in pod.secrets:
            mode = volume["secret"].get("defaultMode", 0o644)
            if problem_of_mode(SimpleNamespace(st_uid=0, st_mode=stat.S_IFREG | mode), folder):
                yield f"{pod.name}: its Secret has mode {mode:04o}, which our code refuses"
            elif not pod.spec["securityContext"].get("fsGroup"):
                yield f"{pod.name}: it is in no group that may read its Secret"
        key = [one for one in pod.container.get("env", ()) if one["name"] == "VLLM_API_KEY"]
        if pod.component != "broker" and not (key and "secretKeyRef" in key[0].get("valueFrom", {})):
            yield f"{pod.name}: VLLM_API_KEY comes from no Secret"


def _commands(fleet: Fleet, readers: Readers) -> Iterator[str]:
    """Those of broker, router and picker."""
    for pod in fleet.of("broker") + fleet.of("router") + fleet.of("picker"):
        try:
            options = _options(pod, readers)
        except Exception as error:  # of our own, or click's
            yield f"{pod.name}: {error}"
            continue
        if pod.component in LAST_S:
            least = options["unready_s"] + options["grace_s"] + LAST_S[pod.component] + MARGIN_S
            if pod.spec["terminationGracePeriodSeconds"] < least:
                yield f"{pod.name}: {pod.spec['terminationGracePeriodSeconds']} s of grace are less than {least:g}"
            if options["broker"] != fleet.engines[0].transfer["kv_connector_extra_config"]["broker"]:
                yield f"{pod.name}: it has another broker than the engines"


def _options(pod: Pod, readers: Readers) -> dict[str, Any]:
    """What a container's command says. Raises what its parser and its checks do."""
    own = {pod.spec["hostname"]} if "hostname" in pod.spec else set()
    readers.names.update(own)
    try:
        return readers.run([pod.with_files(word, readers.secret) for word in pod.args])
    finally:
        readers.names.difference_update(own)


def _config(pod: Pod, readers: Readers) -> PDConfig:
    """The settings of an engine. Raises ConfigError."""
    transfer = json.loads(pod.with_files(json.dumps(pod.transfer), readers.secret))
    return PDConfig.parse(transfer["kv_role"], transfer["kv_connector_extra_config"])


def _engines(fleet: Fleet, readers: Readers) -> Iterator[str]:
    for pod in fleet.engines:
        try:
            config = _config(pod, readers)
            served = readers.serve(pod.args)
        except (PDError, ValueError) as error:
            yield f"{pod.name}: {error}"
            continue
        if pod.transfer["kv_connector"] != "PDConnector" or config.role != ROLES[pod.component]:
            yield f"{pod.name}: it is a {pod.transfer['kv_connector']} with kv_role {config.role.value}"
        mounts = [one["mountPath"] for one in pod.container["volumeMounts"]]
        if served["model"] not in mounts or "/dev/shm" not in mounts:
            yield f"{pod.name}: its mounts are {mounts}"
        if served["port"] != pod.ports["http"]:
            yield f"{pod.name}: it listens at {served['port']}, and its port http is {pod.ports['http']}"
        leaving = pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        least = int(leaving[1]) + config.drain_timeout_s + MARGIN_S
        if pod.spec["terminationGracePeriodSeconds"] < least:
            yield f"{pod.name}: {pod.spec['terminationGracePeriodSeconds']} s of grace are less than {least:g}"
        if pod.component == "decode" and int(leaving[1]) < 5:
            yield f"{pod.name}: gateways have no time to see that it leaves"
        for probe in ("startupProbe", "readinessProbe"):
            if "/health_generate" not in str(pod.container[probe]["exec"]["command"]):
                yield f"{pod.name}: its {probe} generates nothing"
        if pod.container["livenessProbe"]["httpGet"] != {"path": "/health", "port": "http"}:
            yield f"{pod.name}: its livenessProbe may end an engine that is busy"


def _brokers(fleet: Fleet, readers: Readers) -> Iterator[str]:
    """One that all engines have, and a Service of that name and port where it is ours."""
    urls = {pod.transfer["kv_connector_extra_config"]["broker"] for pod in fleet.engines}
    brokers = fleet.of("broker")
    if len(urls) != 1:
        yield f"the engines have several brokers: {', '.join(sorted(urls))}"
        return
    url = urlsplit(urls.pop())
    services = {one["metadata"]["name"]: one["spec"] for one in fleet.all("Service")}
    if brokers and (url.scheme != "tcp" or url.hostname not in services):
        yield f"{brokers[0].name}: no engine uses it, for their broker is {url.geturl()}"
    elif brokers and (fleet.selected({"matchLabels": services[url.hostname]["selector"]}) != brokers
                      or url.port not in [port["port"] for port in services[url.hostname]["ports"]]):
        yield f"{brokers[0].name}: {url.geturl()} does not lead to it"
    for pod in brokers:
        if pod.deployment["spec"]["replicas"] != 1:
            yield f"{pod.name}: it has {pod.deployment['spec']['replicas']} replicas, each with a part of the engines"
        if pod.deployment["spec"]["strategy"] != {"type": "Recreate"}:
            yield f"{pod.name}: while it is replaced there are two"


def _pickers(fleet: Fleet, readers: Readers) -> Iterator[str]:
    for pod in fleet.of("picker"):
        try:
            options = _options(pod, readers)
        except Exception:  # which `_commands` reports
            continue
        ports = {"grpc": options["port"], "health": options["health_port"], "metrics": options["metrics_port"]}
        if pod.ports != ports:
            yield f"{pod.name}: it listens at {ports}, and its ports are {pod.ports}"
        for probe, service in (("readinessProbe", "readiness"), ("livenessProbe", "liveness")):
            if pod.container[probe]["grpc"] != {"port": options["health_port"], "service": service}:
                yield f"{pod.name}: its {probe} asks {pod.container[probe]['grpc']}"
    for service in fleet.all("Service"):
        components = {pod.component for pod in fleet.selected({"matchLabels": service["spec"]["selector"]})}
        said = [(port["targetPort"], port.get("appProtocol")) for port in service["spec"]["ports"]]
        if "picker" in components and (components != {"picker"} or said != [("grpc", "http2")]):
            yield f"Service {service['metadata']['name']}: gateways find no picker by gRPC alone there: {said}"


def _pools(fleet: Fleet, readers: Readers) -> Iterator[str]:
    """That each InferencePool leads a gateway to the pickers, and to the engines that they name."""
    services = {one["metadata"]["name"]: one["spec"] for one in fleet.all("Service")}
    for one in fleet.all("InferencePool"):
        name, spec = f"InferencePool {one['metadata']['name']}", one["spec"]
        if faults := list(_faults_of_pool(spec)):
            yield from (f"{name}: {fault}" for fault in faults)
            continue
        pods, ports = fleet.selected(spec["selector"]), [port["number"] for port in spec["targetPorts"]]
        if pods != fleet.of("decode"):
            yield f"{name}: it selects {', '.join(pod.name for pod in pods) or 'no pod'}"
        if any(ports != [pod.ports["http"]] for pod in fleet.of("decode")):
            yield f"{name}: no decode engine listens at {ports}"
        picker = spec["endpointPickerRef"]
        service = services.get(picker["name"], {"selector": {}, "ports": []})
        if not fleet.of("picker") or fleet.selected({"matchLabels": service["selector"]}) != fleet.of("picker") \
                or picker["port"]["number"] not in [port["port"] for port in service["ports"]]:
            yield f"{name}: {picker['name']}:{picker['port']['number']} does not lead to a picker"
        if picker.get("failureMode", "FailClose") != "FailClose":
            yield f"{name}: while no picker answers requests go to any engine"


def _faults_of_pool(spec: dict) -> Iterator[str]:
    """What is wrong with the fields of an InferencePool."""
    picker = spec.get("endpointPickerRef", {})
    for key, found, known, needed in (
            ("spec", spec, POOL_FIELDS, POOL_FIELDS),
            ("selector", spec.get("selector", {}), {"matchLabels"}, {"matchLabels"}),
            ("endpointPickerRef", picker, PICKER_FIELDS, {"name", "port"}),
            ("endpointPickerRef.port", picker.get("port", {}), {"number"}, {"number"}),
            *(("targetPorts", port, {"number"}, {"number"}) for port in spec.get("targetPorts", ()))):
        if not needed <= found.keys() <= known:
            yield f"{key} has the fields {', '.join(sorted(found))}; known: {', '.join(sorted(known))}"
    if not spec.get("selector", {}).get("matchLabels") or len(spec.get("targetPorts", ())) != 1:
        yield "it needs labels to select by, and one target port"
    numbers = [port.get("number") for port in (*spec.get("targetPorts", ()), picker.get("port", {}))]
    if not all(type(number) is int and 0 < number < 65536 for number in numbers):
        yield f"its ports are {numbers}"
    if (picker.get("group", ""), picker.get("kind", "Service")) != ("", "Service"):
        yield "its picker is no Service"
    if picker.get("failureMode", "FailClose") not in ("FailOpen", "FailClose"):
        yield f"failureMode is {picker['failureMode']}"


def _policies(fleet: Fleet, readers: Readers) -> Iterator[str]:
    """Open is what the settings open, to those who use it: the table in docs/configuration.md, "Ports"."""
    wanted: dict[tuple[str, str], Ports] = {}
    for pod in fleet.engines:
        settings, http = pod.transfer["kv_connector_extra_config"], pod.ports["http"]
        control, lifeline = int(settings["bind"].rpartition(":")[2]), settings.get("lifeline_port", 0)
        first, last = map(int, pod.env["UCX_TCP_PORT_RANGE"].split("-"))
        for other in ROLES:
            wanted[other, pod.name] = _ranges(control, lifeline, http) | {(first, last)}
        wanted["broker", pod.name] = _ranges(control, http)
        if pod.component == "decode":
            events = next((word for word in pod.args if word.startswith("--kv-events-config=")), None)
            ports = re.findall(r"tcp://\*:(\d+)", events or "")
            for follower in ("router", "picker"):
                wanted[follower, pod.name] = _ranges(http, *map(int, ports)) | ({EPHEMERAL} if events else set())
    for pod in fleet.of("broker"):
        for source in (*ROLES, "broker", "router", "picker"):
            wanted[source, pod.name] = _ranges(pod.ports["broker"])
    deployed = {pod.component: pod for pod in fleet.pods}
    for (source, name), ports in wanted.items():
        if source in deployed:
            [target] = [pod for pod in fleet.pods if pod.name == name]
            found = fleet.open_ports(target, deployed[source].labels)
            clients = fleet.open_ports(target, OUTSIDE) or set()
            if found is not None and found - clients != ports - clients:
                yield f"{name}: open to {source}: {_said(found)}; in use: {_said(ports)}"
    for pod in fleet.pods:
        clients = _ranges(pod.ports["http"]) if pod.component in ("decode", "router") else set()
        for own in (True, False):
            found = fleet.open_ports(pod, OUTSIDE, own)
            if found is not None and not found <= clients:
                yield f"{pod.name}: open to all: {_said(found)}"


def _gateways(fleet: Fleet, readers: Readers) -> Iterator[str]:
    """Those who ask a picker also send the requests, to the engines that it names."""
    for pod in fleet.of("picker"):
        gateways = fleet.peers(pod, pod.ports["grpc"])
        if not gateways:
            yield f"{pod.name}: no gateway may ask it"
        if fleet.rules(pod) is not None and fleet.peers(pod, pod.ports["health"]):
            yield f"{pod.name}: its health checks are open to others than the kubelet"
        for engine in fleet.of("decode"):
            known = fleet.peers(engine, engine.ports["http"])
            if EVERYBODY not in known and any(gateway not in known for gateway in gateways):
                yield f"{engine.name}: closed to gateways that may ask {pod.name}"


def _ranges(*ports: int) -> Ports:
    return {(port, port) for port in ports}


def _said(ports: Ports) -> str:
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in sorted(ports)) or "nothing"


def _monitors(fleet: Fleet, readers: Readers) -> Iterator[str]:
    jobs: dict[str, set[str]] = {}
    for one in fleet.all("PodMonitor"):
        for endpoint in one["spec"]["podMetricsEndpoints"]:
            [job] = [rule["replacement"] for rule in endpoint["relabelings"] if rule["targetLabel"] == "job"]
            if not re.fullmatch("vllm-pd-.*", job):  # as the alerts select
                yield f"PodMonitor {one['metadata']['name']}: no alert is about its job {job}"
            for pod in fleet.selected(one["spec"]["selector"]):
                jobs.setdefault(pod.component, set()).add(job)
    for component, found in jobs.items():
        if len(found) != 1 or component in ROLES and found != jobs.get("decode"):
            yield f"{component}: it is not in one job: {', '.join(sorted(found))}"
    for one in fleet.all("ScaledObject"):
        name, spec = f"ScaledObject {one['metadata']['name']}", one["spec"]
        scaled = [pod for pod in fleet.of("prefill") if pod.name == spec["scaleTargetRef"]["name"]]
        if not scaled or "replicas" in scaled[0].deployment["spec"]:
            yield f"{name}: {spec['scaleTargetRef']['name']} is no prefill Deployment that leaves its replicas to it"
        if not 1 <= spec["minReplicaCount"] <= spec["maxReplicaCount"]:
            yield f"{name}: {spec['minReplicaCount']} to {spec['maxReplicaCount']} engines"
        asked = re.findall(r'job="([^"]+)"', spec["triggers"][0]["metadata"]["query"])
        if jobs and {*asked} != jobs["decode"]:
            yield f"{name}: it asks for the job {', '.join(asked)}"
        for other in spec["triggers"][1:]:  # a planner's, which is no part of the chart
            if other["metadata"]["threshold"] != "1" or 'role="prefill"' not in other["metadata"]["query"]:
                yield f"{name}: it does not follow the prefill engines that are wanted: {other['metadata']['query']}"
