# SPDX-License-Identifier: Apache-2.0
"""The chart and the manifests of deploy/kubernetes: rendered, read as a cluster and our own code would, and equal.

No cluster is asked. Without requirements/kubernetes.txt most are skipped, and say what is missing.
"""
import argparse
import copy
import dataclasses
import functools
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType
from typing import Any

import certifi
import pytest
import render_chart
import yaml
from _wheel import project
from render_chart import BASE, CHART, FOLDER, NAME, NAMESPACE, PROGRAMS

from tests.fakes import certificates
from tests.manifests import OUTSIDE, ROLES, Fleet, Readers, problems
from vllm_pd.handover.metrics import STAGES, HandoverFamilies
from vllm_pd.ops.planner import PlannerFamilies
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.ports import take_free
from vllm_pd.settings.engine import PDConfig

ON_NATS = {"broker": {"embedded": False, "url": "nats://nats.nats:4222"}}
GATEWAYS = {"gateways": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}]}
PICKER = {"picker": {"enabled": True}, "networkPolicy": GATEWAYS}
POOL = {"picker": {"enabled": True, "inferencePool": True, "args": ["--fallbacks=2"]}, "settings": {"ttl_s": 6},
        "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "chat"}}}], **GATEWAYS},
        "podMonitor": {"enabled": True}}
EVERYTHING = {"broker": {"embedded": False, "url": "tls://nats.nats:4222", "natsCa": True}, "router": {"enabled": True},
              "picker": {"enabled": True, "replicas": 2, "tls": {"clientCa": True}, "inferencePool": True},
              "networkPolicy": GATEWAYS,
              "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
              "keda": {"enabled": True, "plannerJob": "vllm-pd-planner"},
              "settings": {"ttl_s": 7.5, "max_local_prefill_tokens": "auto", "max_prefill_tokens": 1_000_000},
              "decode": {"args": ["--tensor-parallel-size=2"], "env": [{"name": "UCX_LOG_LEVEL", "value": "warn"}]},
              "prefill": {"capabilities": ["IPC_LOCK"], "pod": {"tolerations": [{"operator": "Exists"}]}}}
WITH_ROUTER = {"router": {"enabled": True}, "podMonitor": {"enabled": True}, "settings": {"ttl_s": 6}}
UNKNOWN_TO_SCHEMAS = {  # their fields are checked by their readers
    "monitoring.coreos.com/v1", "keda.sh/v1alpha1", "inference.networking.k8s.io/v1"}
KUBECTL = shutil.which("kubectl", path=os.pathsep.join([f"{PROGRAMS}/bin", os.environ["PATH"]]))


def helm() -> ModuleType:
    """Helm as a library."""
    return pytest.importorskip("helm_python", reason="helm-python-sdk missing (requirements/kubernetes.txt)")


def render(values: dict | None = None) -> dict[str, str]:
    """What each file of the chart gives."""
    helm()
    return render_chart.render(values)


@functools.cache
def parse(text: str) -> list[dict]:
    """In C, and once: the parser in Python takes most of the time of a test."""
    return [one for one in yaml.load_all(text, yaml.CSafeLoader) if one is not None]


def documents(texts: Iterable[str]) -> list[dict]:
    """What is in these, for the caller to change."""
    return copy.deepcopy([one for text in texts for one in parse(text)])


def base() -> list[dict]:
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    assert {*names} == {file.name for file in BASE.iterdir()} - {"kustomization.yaml"}
    return documents((BASE / name).read_text() for name in names)


def fault_of_schema(document: dict) -> str:
    """What the schemas of the oldest Kubernetes that the chart takes, and of the newest one known, say."""
    validate = pytest.importorskip("kubernetes_validate",
                                   reason="kubernetes-validate missing (requirements/kubernetes.txt)")
    if document["apiVersion"] in UNKNOWN_TO_SCHEMAS:
        return ""
    return first_fault(validate, json.dumps(document))


@functools.cache
def first_fault(validate: ModuleType, text: str) -> str:
    """Of a document in JSON: most tests have most of them from the test before."""
    document = json.loads(text)
    for version in (re.search(r"[\d.]+", yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"])[0],
                    validate.latest_version()):
        try:
            validate.validate(document, version, strict=True)
        except validate.ValidationError as error:
            return f"{document['kind']} {document['metadata']['name']}: {version}: {error.message}"
    return ""


@pytest.fixture(scope="module")
def serve() -> Callable[[list[str]], dict]:
    """Parses what `vllm serve` is given, by vLLM's own parser."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils import FlexibleArgumentParser
    parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))

    def parse(arguments: list[str]) -> dict:
        try:
            known, unknown = parser.parse_known_args(["--model", *arguments])
        except argparse.ArgumentError as error:
            raise ValueError(f"vllm serve: {error}") from error
        if unknown:
            raise ValueError(f"vllm serve has no {' '.join(unknown)}")
        return vars(known)

    return parse


@pytest.fixture
def readers(parsed, serve, tmp_path, monkeypatch) -> Readers:
    Keys.make(tmp_path / "vllm-pd.keys")
    (tmp_path / "user.creds").write_text("SU" + "A" * 56)
    (tmp_path / "user.creds").chmod(0o600)
    shutil.copy(certifi.where(), tmp_path / "ca.crt")
    (tmp_path / "tls.crt").write_text(certificates.CERTIFICATE)
    (tmp_path / "tls.key").write_text(certificates.KEY)
    names: set[str] = set()

    def look_up(host: str, port: int, *_: Any, **more: Any) -> list[tuple]:
        if host not in names | {"nats.nats", "0.0.0.0"}:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setenv("VLLM_API_KEY", "of a Secret")
    return Readers(parsed, serve, names, tmp_path, fault_of_schema)


def test_the_base_is_what_the_chart_gives():
    kustomization = BASE / "kustomization.yaml"
    assert {file.name: file.read_text() for file in BASE.iterdir() if file != kustomization} == render()


def test_nothing_is_wrong_with_the_base(readers):
    assert problems(base(), readers) == []


@pytest.mark.parametrize("values", [
    ON_NATS, EVERYTHING, WITH_ROUTER, PICKER, POOL, WITH_ROUTER | PICKER, ON_NATS | PICKER,
    {"picker": {"enabled": True, "tls": {"enabled": False}}, "networkPolicy": {"enabled": False}},
    {"networkPolicy": {"enabled": False}}, {"podMonitor": {"enabled": True}}],
    ids=["nats", "everything", "router", "picker", "pool", "router and picker", "nats and picker",
         "picker without TLS and policy", "no policy", "monitor"])
def test_nothing_is_wrong_with_what_the_chart_gives(readers, values):
    assert problems(documents(render(values).values()), readers) == []


@pytest.mark.skipif(KUBECTL is None, reason="kubectl missing, which has kustomize")
def test_the_overlay_is_what_the_chart_gives():
    overlay = FOLDER / "overlays" / "nats"
    done = subprocess.run([KUBECTL, "kustomize", overlay], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")

    def named(found: list[dict]) -> dict:
        return {(one["kind"], one["metadata"]["name"]): one for one in found}

    assert named(documents([done.stdout])) == named(documents(render(ON_NATS).values()))


def test_the_chart_has_no_fault_that_helm_knows():
    for values in (None, EVERYTHING):
        report = helm().chart.lint(CHART, values, strict=True)
        assert [one for one in report["messages"] if one["severity"] > 1] + report["errors"] == []


def test_the_chart_takes_each_setting_that_it_does_not_set_itself(serve):
    """`settings` may have all keys of PDConfig but those that values of their own stand for."""
    keys = {key.name for key in dataclasses.fields(PDConfig)} - {"role"}
    own = {key for values in (None, EVERYTHING) for pod in Fleet(documents(render(values).values())).engines
           for key in pod.transfer["kv_connector_extra_config"]} - EVERYTHING["settings"].keys()
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert schema["settings"]["properties"].keys() == keys - own
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert defaults.keys() | {"global"} == schema.keys()


@pytest.mark.parametrize("values, said", [
    ({"broker": {"replicas": 2}}, r"broker.replicas=2 can't be used: .*: write 1, or "),
    ({"broker": {"url": "nats://nats.nats:4222"}}, r'broker.url="nats://nats.nats:4222" can\'t be used: .*: set brok'),
    ({"broker": {"embedded": False}}, r'broker.url="" can\'t be used: .*: write one like nats://'),
    ({"broker": {"embedded": False, "url": "nats://a:1", "natsCa": True}}, r"broker.natsCa=true can't be used: .*tls:"),
    ({"decode": {"args": ["--data-parallel-size=2"]}}, r'decode.args="--data-parallel-size=2" can\'t be used: '),
    ({"prefill": {"args": ["--port", "1"]}}, r'prefill.args="--port" can\'t be used: '),
    ({"settings": {"lease": 30}}, r"at '/settings': additional properties 'lease' not allowed"),
    ({"settings": {"broker": "nats://a:4222"}}, r"at '/settings': additional properties 'broker' not allowed"),
    ({"broker": {"embedded": False, "url": "kafka://a:1"}}, r"at '/broker/url': 'kafka://a:1' does not match"),
    ({"decode": {"replica": 3}}, r"at '/decode': additional properties 'replica' not allowed"),
    ({"keda": {"minReplicas": 0}}, r"at '/keda/minReplicas': minimum: got 0, want 1"),
    ({"picker": {"enabled": True}}, r"networkPolicy.gateways=\[\] can't be used: .*: write your gateways' pods like "),
    ({"picker": {"inferencePool": True}}, r"picker.inferencePool=true can't be used: .*: set picker.enabled to true"),
    ({"picker": {"tls": {"enabled": False, "clientCa": True}}}, r"picker.tls.clientCa=true can't be used: .*: set pi"),
    (PICKER | {"picker": {"enabled": True, "replicas": 0}}, r"at '/picker/replicas': minimum: got 0, want 1"),
    (PICKER | {"picker": {"enabled": True, "tls": {"secret": ""}}}, r"at '/picker/tls/secret': minLength: got 0"),
    (PICKER | {"picker": {"enabled": True, "tls": {"cert": "x"}}}, r"'/picker/tls': additional properties 'cert' not"),
    *((PICKER | {"picker": {"enabled": True, "args": [word]}}, rf'picker.args="{word}" can\'t be used: .*: leave it ')
      for word in ("--port", "--host=::", "--health-port=1", "--metrics-port=0", "--tls-cert=/x", "--tls-client-ca=/x",
                   "--broker=tcp://a:1", "--keys", "--nats-prefix=x", "--unready-s=0", "--grace-s=1", "--ttl-s=1",
                   "--worker-api-key=sk-1", "--order=prefill-first")),
])
def test_the_chart_refuses_values_that_can_not_work(values, said):
    with pytest.raises(Exception, match=said) as refused:
        render(values)
    assert type(refused.value).__name__ in ("HelmRenderError", "HelmValuesError")


def container(manifests: Fleet, component: str) -> dict:
    return manifests.of(component)[0].container


def edit_transfer(component: str, old: str, new: str) -> Callable[[Fleet], None]:
    """Writes another text into an engine's --kv-transfer-config."""
    def edit(fleet: Fleet) -> None:
        [variable] = [one for one in container(fleet, component)["env"] if one["name"] == "KV_TRANSFER_CONFIG"]
        assert old in variable["value"]
        variable["value"] = variable["value"].replace(old, new)

    return edit


def policy(fleet: Fleet, name: str) -> dict:
    return next(one for one in fleet.all("NetworkPolicy") if one["metadata"]["name"] == f"{NAME}-{name}")["spec"]


def service(fleet: Fleet, name: str) -> dict:
    return next(one for one in fleet.all("Service") if one["metadata"]["name"] == f"{NAME}-{name}")["spec"]


def secret(fleet: Fleet, component: str) -> dict:
    return next(one["secret"] for one in fleet.of(component)[0].spec["volumes"] if "secret" in one)


def spec(fleet: Fleet, component: str) -> dict:
    return fleet.of(component)[0].deployment["spec"]


PLANTED: dict[str, tuple[Callable[[Fleet], object], str]] = {
    "unknown field": (lambda fleet: container(fleet, "decode").update(imagePullPolcy="Always"),
                      r"'imagePullPolcy' was unexpected"),
    "a wrong type": (lambda fleet: spec(fleet, "decode").update(replicas="2"), r"'2' is not of type 'integer'"),
    "a Service of nothing": (lambda fleet: service(fleet, "decode")["selector"].update(
        {"app.kubernetes.io/component": "decoder"}), r"Service vllm-pd-decode: it selects no pod"),
    "a Deployment of others": (lambda fleet: spec(fleet, "decode")["selector"]["matchLabels"].pop(
        "app.kubernetes.io/component"), r"vllm-pd-decode: its selector is not about its own pods alone"),
    "a Service of prefill engines, too": (lambda fleet: service(fleet, "broker").update(selector={
        "app.kubernetes.io/name": "vllm-pd"}), r"vllm-pd-prefill has no port 'broker'"),
    "a port that is closed": (lambda fleet: policy(fleet, "engines")["ingress"][0]["ports"].pop(1),
                              r"vllm-pd-decode: open to prefill: 5702, 8000, 30000-30099; in use: 5702, 5703, "),
    "another port in the settings": (edit_transfer("prefill", "auto:5702", "auto:5704"),
                                     r"vllm-pd-prefill: open to decode: .*; in use: 5703, 5704"),
    "KV open to all": (lambda fleet: policy(fleet, "decode")["ingress"][0]["ports"].append(
        {"port": 30000, "endPort": 30099}), r"vllm-pd-decode: open to all: 8000, 30000-30099"),
    "grace too short": (lambda fleet: fleet.of("decode")[0].spec.update(terminationGracePeriodSeconds=120),
                        r"vllm-pd-decode: 120 s of grace are less than 140"),
    "two brokers": (lambda fleet: spec(fleet, "broker").update(replicas=2), r"it has 2 replicas"),
    "two brokers while one is replaced": (lambda fleet: spec(fleet, "broker").update(
        strategy={"type": "RollingUpdate"}), r"vllm-pd-broker: while it is replaced there are two"),
    "a Secret for all": (lambda fleet: secret(fleet, "prefill").pop("defaultMode"),
                         r"vllm-pd-prefill: its Secret has mode 0644"),
    "a Secret for nobody": (lambda fleet: fleet.of("prefill")[0].spec["securityContext"].pop("fsGroup"),
                            r"vllm-pd-prefill: it is in no group"),
    "no key": (lambda fleet: secret(fleet, "decode")["items"].pop(),
               r"vllm-pd-decode: keys='.*' can't be used: No such file"),
    "a role of another name": (edit_transfer("decode", "kv_consumer", "kv_comsumer"),
                               r"vllm-pd-decode: kv_role='kv_comsumer' can't be used"),
    "the other role": (edit_transfer("decode", "kv_consumer", "kv_producer"), r"PDConnector with kv_role kv_producer"),
    "unknown setting": (edit_transfer("decode", "lifeline_port", "lifeline"), r"lifeline=5703 can't be used"),
    "a broker on NATS beside ours": (lambda fleet: [edit_transfer(name, "vllm-pd-broker:5700", "nats:5700")(
        fleet) for name in ROLES], r"vllm-pd-broker: no engine uses it, for their broker is tcp://nats:5700"),
    "NATS without credentials": (edit_transfer("decode", "tcp://vllm-pd-broker:5700", "nats://nats.nats:4222"),
                                 r"broker='nats://nats.nats:4222' can't be used.*nats_credentials"),
    "two brokers' addresses": (edit_transfer("decode", "vllm-pd-broker:5700", "vllm-pd-decode:5700"),
                               r"the engines have several brokers"),
    "no such broker": (edit_transfer("decode", "vllm-pd-broker:5700", "vllm-pd-brokr:5700"),
                       r"vllm-pd-brokr has no address"),
    "unknown option of the broker": (lambda fleet: container(fleet, "broker")["args"].append("--ttl"),
                                     r"vllm-pd-broker: No such option"),
    "the broker's own name": (lambda fleet: fleet.of("broker")[0].spec.pop("hostname"), r"broker has no address"),
    "unknown option of vLLM": (lambda fleet: container(fleet, "decode")["args"].append("--tensor-paralel=2"),
                               r"vllm serve has no --tensor-paralel"),
    "a probe that ends a busy engine": (lambda fleet: container(fleet, "decode")["livenessProbe"]["httpGet"].update(
        path="/health_generate"), r"its livenessProbe may end an engine that is busy"),
    "root": (lambda fleet: fleet.of("broker")[0].spec["securityContext"].update(runAsNonRoot=False),
             r"vllm-pd-broker: it may run as root"),
    "capabilities": (lambda fleet: container(fleet, "prefill")["securityContext"]["capabilities"].update(drop=["X"]),
                     r"vllm-pd-prefill: it keeps capabilities"),
    "a key in the manifest": (lambda fleet: container(fleet, "decode")["env"].__setitem__(
        2, {"name": "VLLM_API_KEY", "value": "sk-1"}), r"vllm-pd-decode: VLLM_API_KEY comes from no Secret"),
    "a model that is not there": (lambda fleet: container(fleet, "decode")["args"].__setitem__(0, "/models"),
                                  r"vllm-pd-decode: its mounts are"),
    "another HTTP port": (lambda fleet: container(fleet, "decode")["ports"][0].update(containerPort=8001),
                          r"vllm-pd-decode: it listens at 8000, and its port http is 8001"),
    "gone at once": (lambda fleet: container(fleet, "decode").pop("lifecycle"), r"gateways have no time to see"),
    "a probe that asks for too little": (lambda fleet: container(fleet, "decode")["readinessProbe"]["exec"].update(
        command=["curl", "http://127.0.0.1:8000/health"]), r"vllm-pd-decode: its readinessProbe generates nothing"),
    "another port of the broker's Service": (lambda fleet: service(fleet, "broker")["ports"][0].update(port=5701),
                                             r"tcp://vllm-pd-broker:5700 does not lead to it"),
    "no tag": (lambda fleet: container(fleet, "decode").update(image="vllm-pd-engine:latest"), r"has no exact tag"),
    "variables of Services": (lambda fleet: fleet.of("decode")[0].spec.pop("enableServiceLinks"),
                              r"vllm-pd-decode: Services set its variables"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_error_is_found(readers, planted):
    plant, said = PLANTED[planted]
    fleet = Fleet(base())
    plant(fleet)
    found = problems(fleet.documents, readers)
    assert re.search(said, "\n".join(found)), found


def endpoint(fleet: Fleet) -> dict:
    """What is read of the engines."""
    return fleet.all("PodMonitor")[0]["spec"]["podMetricsEndpoints"][0]


def trigger(fleet: Fleet) -> dict:
    """What KEDA asks Prometheus."""
    return fleet.all("ScaledObject")[0]["spec"]["triggers"][0]["metadata"]


MONITORED: dict[str, tuple[Callable[[Fleet], object], str]] = {
    "a job of no alert": (lambda fleet: endpoint(fleet)["relabelings"][0].update(replacement="inference/engine"),
                          r"PodMonitor vllm-pd-engine: no alert is about its job inference/engine"),
    "a port of no pod": (lambda fleet: endpoint(fleet).update(port="metrics"), r"vllm-pd-decode has no port 'metrics'"),
    "engines in two jobs": (lambda fleet: fleet.all("PodMonitor")[2]["spec"]["selector"]["matchExpressions"][0].update(
        values=["router", "prefill"]), r"prefill: it is not in one job"),
    "scaled by another fleet": (lambda fleet: trigger(fleet).update(query=trigger(fleet)["query"].replace(
        NAMESPACE, "other")), r"it asks for the job vllm-pd-engine-other-vllm-pd"),
    "scaled by the decode engines that are wanted": (
        lambda fleet: fleet.all("ScaledObject")[0]["spec"]["triggers"][1]["metadata"].update(
            query='max(vllm:pd_wanted_engines{job="vllm-pd-planner",role="decode"})'),
        r"it does not follow the prefill engines that are wanted: max.*decode"),
    "scaled to nothing": (lambda fleet: fleet.all("ScaledObject")[0]["spec"].update(minReplicaCount=0),
                          r"ScaledObject vllm-pd-prefill: 0 to 8 engines"),
    "a router with another broker": (lambda fleet: container(fleet, "router")["args"].__setitem__(
        3, "--broker=tls://nats.other:4222"), r"vllm-pd-router: it has another broker than the engines"),
    "a scaled decode engine": (lambda fleet: fleet.all("ScaledObject")[0]["spec"].update(
        scaleTargetRef={"name": "vllm-pd-decode"}), r"vllm-pd-decode is no prefill Deployment"),
    "a router that ends its streams": (lambda fleet: fleet.of("router")[0].spec.update(
        terminationGracePeriodSeconds=30), r"vllm-pd-router: 30 s of grace are less than 144"),
    "KV events that are closed": (lambda fleet: policy(fleet, "decode")["ingress"][1]["ports"].pop(1),
                                  r"vllm-pd-decode: open to router: .*; in use: 5557"),
    "a rule about everybody": (lambda fleet: policy(fleet, "picker")["ingress"][1].update({"from": []}),
                               r"vllm-pd-picker: open to all: 9090"),
}


@pytest.mark.parametrize("planted", MONITORED)
def test_a_planted_error_of_what_is_off_by_default_is_found(readers, planted):
    plant, said = MONITORED[planted]
    fleet = Fleet(documents(render(EVERYTHING).values()))
    plant(fleet)
    found = problems(fleet.documents, readers)
    assert re.search(said, "\n".join(found)), found


def picked(fleet: Fleet) -> dict:
    """The InferencePool."""
    return fleet.all("InferencePool")[0]["spec"]


def volume(fleet: Fleet, name: str) -> dict:
    """A volume of the picker."""
    return next(one for one in fleet.of("picker")[0].spec["volumes"] if one["name"] == name)


def drop(fleet: Fleet, *words: str) -> None:
    """Take these out of the picker's command."""
    container(fleet, "picker").update(args=[word for word in container(fleet, "picker")["args"]
                                            if not word.startswith(words)])


OF_PICKER: dict[str, tuple[Callable[[Fleet], object], str]] = {
    "another port of the Service": (lambda fleet: service(fleet, "picker")["ports"][0].update(port=9003),
                                    r"InferencePool vllm-pd-decode: vllm-pd-picker:9002 does not lead to a picker"),
    "a Service of the metrics": (lambda fleet: service(fleet, "picker")["ports"][0].update(targetPort="metrics"),
                                 r"Service vllm-pd-picker: gateways find no picker by gRPC alone there: \[\('metrics'"),
    "a Service without HTTP/2": (lambda fleet: service(fleet, "picker")["ports"][0].pop("appProtocol"),
                                 r"Service vllm-pd-picker: gateways find no picker by gRPC alone there"),
    "a Service of brokers, too": (lambda fleet: service(fleet, "picker")["selector"].pop("app.kubernetes.io/component"),
                                  r"vllm-pd-broker has no port 'grpc'"),
    "another port of the picker": (lambda fleet: container(fleet, "picker")["args"].append("--port=9001"),
                                   r"vllm-pd-picker: it listens at .*'grpc': 9001"),
    "no port for probes": (lambda fleet: drop(fleet, "--health-port"), r"vllm-pd-picker: it listens at .*'health': 0"),
    "KV events that are closed": (lambda fleet: policy(fleet, "decode")["ingress"][1]["ports"].pop(1),
                                  r"vllm-pd-decode: open to picker: .*; in use: 5557, 5657, 8000, 32768-60999"),
    "no KV events": (lambda fleet: container(fleet, "decode")["args"].pop(), r"vllm-pd-decode: open to picker: .*5557"),
    "an engine that is closed to the picker": (
        lambda fleet: policy(fleet, "decode")["ingress"][1]["from"][0]["podSelector"]["matchExpressions"][0].update(
            values=["router"]), r"vllm-pd-decode: open to picker: nothing; in use: 5557"),
    "a broker that is closed": (
        lambda fleet: policy(fleet, "broker")["ingress"][0]["from"][0]["podSelector"]["matchExpressions"][0].update(
            values=["decode", "prefill", "broker", "router"]), r"vllm-pd-broker: open to picker: nothing; in use: 57"),
    "engines that are closed to the gateway": (lambda fleet: policy(fleet, "decode")["ingress"][0]["from"].pop(),
                                               r"vllm-pd-decode: closed to gateways that may ask vllm-pd-picker"),
    "a picker for nobody": (lambda fleet: policy(fleet, "picker")["ingress"].pop(0), r"picker: no gateway may ask it"),
    "a picker for everybody": (lambda fleet: policy(fleet, "picker")["ingress"][0].update({"from": [{
        "namespaceSelector": {}}]}), r"vllm-pd-picker: open to all: 9002"),
    "health checks for gateways": (lambda fleet: policy(fleet, "picker")["ingress"][0]["ports"].append({"port": 9003}),
                                   r"vllm-pd-picker: its health checks are open to others than the kubelet"),
    "a pool of prefill engines": (lambda fleet: picked(fleet)["selector"]["matchLabels"].update(
        {"app.kubernetes.io/component": "prefill"}), r"InferencePool vllm-pd-decode: it selects vllm-pd-prefill"),
    "a pool of all": (lambda fleet: picked(fleet)["selector"]["matchLabels"].pop("app.kubernetes.io/component"),
                      r"InferencePool vllm-pd-decode: it selects vllm-pd-broker, vllm-pd-decode, vllm-pd-prefill"),
    "a pool of nothing": (lambda fleet: picked(fleet)["selector"]["matchLabels"].update(a="b"), r"it selects no pod"),
    "a pool at another port": (lambda fleet: picked(fleet).update(targetPorts=[{"number": 8001}]),
                               r"InferencePool vllm-pd-decode: no decode engine listens at \[8001\]"),
    "a pool of two ports": (lambda fleet: picked(fleet)["targetPorts"].append({"number": 8001}), r"one target port"),
    "a pool that fails open": (lambda fleet: picked(fleet)["endpointPickerRef"].update(failureMode="FailOpen"),
                               r"InferencePool vllm-pd-decode: while no picker answers requests go to any engine"),
    "a way to fail that is none": (lambda fleet: picked(fleet)["endpointPickerRef"].update(failureMode="FailClosed"),
                                   r"InferencePool vllm-pd-decode: failureMode is FailClosed"),
    "a field of x-k8s.io": (lambda fleet: picked(fleet)["endpointPickerRef"].update(portNumber=9002),
                            r"InferencePool vllm-pd-decode: endpointPickerRef has the fields .*portNumber; known: "),
    "a picker without a port": (lambda fleet: picked(fleet)["endpointPickerRef"].pop("port"),
                                r"endpointPickerRef has the fields failureMode, name; known: "),
    "a port that is text": (lambda fleet: picked(fleet)["targetPorts"][0].update(number="8000"), r"ports are \['8000'"),
    "a pool with another picker": (lambda fleet: picked(fleet)["endpointPickerRef"].update(name="vllm-pd-router"),
                                   r"vllm-pd-router:9002 does not lead to a picker"),
    "a picker that is no Service": (lambda fleet: picked(fleet)["endpointPickerRef"].update(kind="Deployment"),
                                    r"InferencePool vllm-pd-decode: its picker is no Service"),
    "no key of the certificate": (lambda fleet: volume(fleet, "tls")["secret"]["items"].pop(1),
                                  r"vllm-pd-picker: --tls-key='.*' can't be used: it can't be read"),
    "no certificates": (lambda fleet: container(fleet, "picker")["volumeMounts"].pop(2),
                        r"vllm-pd-picker: --tls-cert='/tls/tls.crt' can't be used"),
    "a certificate for all": (lambda fleet: volume(fleet, "tls")["secret"].pop("defaultMode"),
                              r"vllm-pd-picker: its Secret has mode 0644"),
    "no keys of the broker": (lambda fleet: volume(fleet, "keys")["secret"]["items"].pop(),
                              r"vllm-pd-picker: --keys='.*' can't be used"),
    "no key of the engines": (lambda fleet: container(fleet, "picker")["env"].pop(),
                              r"vllm-pd-picker: VLLM_API_KEY comes from no Secret"),
    "grace too short": (lambda fleet: fleet.of("picker")[0].spec.update(terminationGracePeriodSeconds=30),
                        r"vllm-pd-picker: 30 s of grace are less than 145"),
    "a restart because no engine works": (lambda fleet: container(fleet, "picker")["livenessProbe"]["grpc"].update(
        service="readiness"), r"vllm-pd-picker: its livenessProbe asks .*'readiness'"),
    "a probe with TLS": (lambda fleet: container(fleet, "picker")["readinessProbe"]["grpc"].update(port=9002),
                         r"vllm-pd-picker: its readinessProbe asks .*9002"),
    "unknown option": (lambda fleet: container(fleet, "picker")["args"].append("--fallback=1"), r"No such option"),
    "prefill first": (lambda fleet: container(fleet, "picker")["args"].append("--order=prefill-first"),
                      r"vllm-pd-picker: --order='prefill-first' can't be used: a picker changes no request"),
    "another broker": (lambda fleet: container(fleet, "picker")["args"].append("--broker=tcp://vllm-pd-decode:5700"),
                       r"vllm-pd-picker: it has another broker than the engines"),
    "files that may be changed": (lambda fleet: container(fleet, "picker")["securityContext"].pop(
        "readOnlyRootFilesystem"), r"vllm-pd-picker: it may change its own files"),
    "metrics of another port": (lambda fleet: fleet.all("PodMonitor")[1]["spec"]["podMetricsEndpoints"][0].update(
        port="http"), r"PodMonitor vllm-pd-picker: vllm-pd-picker has no port 'http'"),
}


@pytest.mark.parametrize("planted", OF_PICKER)
def test_a_planted_error_of_the_picker_is_found(readers, planted):
    plant, said = OF_PICKER[planted]
    fleet = Fleet(documents(render(POOL).values()))
    plant(fleet)
    found = problems(fleet.documents, readers)
    assert re.search(said, "\n".join(found)), found


def test_the_pickers_page_has_values_that_give_the_pool_of_its_route(readers):
    blocks = re.findall(r"```yaml\n(.*?)```", (project.ROOT / "docs" / "picker.md").read_text(), re.DOTALL)
    values, route = (yaml.safe_load(block) for block in blocks[-2:])
    given = documents(render(values).values())
    assert problems(given, readers) == []
    [pool] = Fleet(given).all("InferencePool")
    [rule] = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"group": pool["apiVersion"].partition("/")[0], "kind": pool["kind"],
                                    "name": pool["metadata"]["name"]}]


def test_clients_reach_engines_and_routers_and_no_picker():
    fleet = Fleet(documents(render(EVERYTHING).values()))
    for own in (True, False):
        found = {pod.component: fleet.open_ports(pod, OUTSIDE, own) for pod in fleet.pods}
        assert found == {"decode": {(8000, 8000)}, "prefill": set(), "router": {(8000, 8000)}, "picker": set()}


def test_no_rule_is_about_everybody_because_nobody_is_named():
    """A rule of a NetworkPolicy whose list of peers is empty lets everybody in."""
    for values in ({}, {"router": {"enabled": True}}, {"picker": {"enabled": True}}):
        given = documents(render(values | {"networkPolicy": {"clients": [], "prometheus": [], **GATEWAYS}}).values())
        fleet = Fleet(given)
        assert [rule for one in fleet.all("NetworkPolicy") for rule in one["spec"]["ingress"] if not rule["from"]] == []
        assert [fault for one in given if (fault := fault_of_schema(one))] == []
        for pod in fleet.pods:
            assert fleet.open_ports(pod, OUTSIDE) == set(), pod.name


ASK_HEALTH = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(sys.argv[1]))
print(*(stub.Check(health_pb2.HealthCheckRequest(service=one), timeout=60, wait_for_ready=True).status
        for one in sys.argv[2:]))
"""


@pytest.mark.skipif(not os.environ.get("VLLM_PD_PICKER") and not os.environ.get("CI"),
                    reason="the packages of the extra `picker` are not installed")
def test_the_picker_answers_its_probes_and_gateways_as_its_manifest_says(tmp_path):
    """The command of the container, at other ports. No engine is there, so it is alive and not ready."""
    pod = Fleet(documents(render(POOL).values())).of("picker")[0]
    Keys.make(tmp_path / "vllm-pd.keys")
    (tmp_path / "tls.crt").write_text(certificates.CERTIFICATE)
    (tmp_path / "tls.key").write_text(certificates.KEY)
    ports = {name: take_free("127.0.0.1") for name in (*pod.ports, "broker")}
    args = pod.with_files("\n".join(pod.args), tmp_path).replace("=/model", f"={os.environ['VLLM_PD_MODEL']}").replace(
        "0.0.0.0", "127.0.0.1").replace("vllm-pd-broker:5700", f"127.0.0.1:{ports['broker']}")
    for name, port in pod.ports.items():
        args = args.replace(f"port={port}", f"port={ports[name]}")
    environment = {**os.environ, "VLLM_API_KEY": "of a Secret", "PYTHONPATH": os.environ.get("VLLM_PD_PICKER", "")}
    process = subprocess.Popen([sys.executable, "-m", "vllm_pd.cli", *args.split("\n")], env=environment)
    try:
        services = [pod.container[probe]["grpc"]["service"] for probe in ("livenessProbe", "readinessProbe")]
        done = subprocess.run([sys.executable, "-c", ASK_HEALTH, f"127.0.0.1:{ports['health']}", *services],
                              env=environment, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "1 2\n"), done.stderr
        shown = ssl.get_server_certificate(("127.0.0.1", ports["grpc"]), timeout=60)
        assert shown.strip() == certificates.CERTIFICATE.strip()
        with urllib.request.urlopen(f"http://127.0.0.1:{ports['metrics']}/metrics", timeout=60) as page:
            assert b"vllm:pd_router_requests_total" in page.read()
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_jobs_are_those_of_the_alerts_and_the_figure_for_scaling_is_one_of_ours():
    fleet = Fleet(documents(render(EVERYTHING).values()))
    alerts = (project.ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    patterns = re.findall(r'job=~"([^"]+)"', alerts)
    jobs = {one["metadata"]["name"]: one["spec"]["podMetricsEndpoints"][0]["relabelings"][0]["replacement"]
            for one in fleet.all("PodMonitor")}
    assert jobs == {f"{NAME}-{one}": f"vllm-pd-{one}-{NAMESPACE}-{NAME}" for one in ("engine", "router", "picker")}
    assert patterns and all(re.fullmatch(pattern, job) for pattern in patterns for job in jobs.values())
    [scaled] = fleet.all("ScaledObject")
    query, wanted = (one["metadata"]["query"] for one in scaled["spec"]["triggers"])
    assert wanted == f'max({PlannerFamilies().wanted.describe()[0].name}{{job="vllm-pd-planner",role="prefill"}})'
    [(family, stages)] = re.findall(r'(vllm:\w+)_sum\{job="[^"]+",stage=~"([^"]+)"\}', query)
    assert family == HandoverFamilies(["model_name"]).handover.describe()[0].name and {*stages.split("|")} <= {*STAGES}


class Engine(BaseHTTPRequestHandler):
    """Answers as an engine with the key "k" does, with `status` for those who have it."""
    status = 200

    def do_GET(self) -> None:
        known = self.path == "/health_generate" and self.headers["Authorization"] == "Bearer k"
        self.send_response(self.status if known else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.parametrize("status, key, passes", [(200, "k", True), (503, "k", False), (200, "other", False)])
def test_the_probe_asks_with_the_key_and_fails_where_nothing_is_generated(monkeypatch, status, key, passes):
    monkeypatch.setattr(Engine, "status", status)
    program, option, text = Fleet(base()).of("decode")[0].container["readinessProbe"]["exec"]["command"]
    assert (program, option) == ("python3", "-c")
    with HTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert ":8000/" in text
        text = text.replace(":8000/", f":{server.server_port}/")
        done = subprocess.run([sys.executable, "-c", text], env={"VLLM_API_KEY": key}, capture_output=True, timeout=60)
    assert (done.returncode == 0) is passes, done.stderr
