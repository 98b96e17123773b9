# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts of deploy/ are about figures that engines and routers have, and say where to read on.

The families are those that vLLM's front end and our router declare in this process; what the alerts do over time
Prometheus' own `promtool` says.
"""
import re
import shutil
import subprocess
from collections import Counter
from http import HTTPStatus
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from _dashboard import panels
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.unit.test_documents import anchors
from tests.v1.metric_expressions import (
    ExpressionCheck,
    ExpressionFault,
    SampleFamily,
    legend_labels,
    sample_families,
)
from tests.v1.simulated import Engine
from vllm_pd.decisions.policy import Reason
from vllm_pd.handover import metrics
from vllm_pd.handover.metrics import HandoverFamilies
from vllm_pd.ops.planner import PlannerFamilies
from vllm_pd.peer.degraded import DegradedReason
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.routes import FORWARDED
from vllm_pd.rpc.codec import FrameFault

FOLDER = panels.ROOT / "deploy" / "prometheus"
PLACE = re.compile(r"\bdocs/[\w./]+\.md#[\w-]+")
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool missing: apt-get install prometheus")


def rules() -> list[dict]:
    return [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


RULES = {rule["alert"]: rule for rule in rules()}
DASHBOARD = panels.read_dashboard()
PANELS = {f"{panel.row}: {panel.title}": panel for panel in panels.panels_of(DASHBOARD)}
VARIABLES = panels.variables_of(DASHBOARD)


@pytest.fixture(scope="module")
def check(model_folder) -> ExpressionCheck:
    """Knows all that is on the /metrics of an engine of V1, of a router and of a planner, and what Prometheus adds."""
    jobs = [one["job_name"] for one in yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]]
    added = frozenset({"job", "instance"})
    config = Engine(model_folder).config
    config.model_config.served_model_name = "the-model"
    PrometheusStatLogger(config, [0])
    stock = [one for one in REGISTRY._collector_to_names if isinstance(one, MetricWrapperBase)]
    unregister_vllm_metrics()
    ours = HandoverFamilies(by_engine=True)._families()
    router = [one for one in vars(RouterMetrics()).values() if isinstance(one, MetricWrapperBase)]
    planner = [one for one in vars(PlannerFamilies()).values() if isinstance(one, MetricWrapperBase)]
    families = {**sample_families([*stock, *ours, *router, *planner], added), "up": SampleFamily(added, counts=False)}
    values = {
        ("", "job"): jobs,
        ("vllm:pd_decisions_total", "decision"): ("remote", "local", "refused"),
        ("vllm:pd_decisions_total", "reason"): list(Reason),
        ("vllm:pd_degraded", "reason"): list(DegradedReason),
        ("vllm:pd_attempts_total", "outcome"): metrics.OUTCOMES,
        ("vllm:pd_handover_seconds_bucket", "stage"): metrics.STAGES,
        ("vllm:pd_frames_dropped_total", "kind"): [f"link_frame_{fault}" for fault in FrameFault],
        ("vllm:pd_router_requests_total", "status"): ["broken", *(str(int(status)) for status in HTTPStatus)],
        ("vllm:pd_router_requests_total", "path"): FORWARDED,
    }
    return ExpressionCheck(families, values)


def unknown_places(text: str) -> list[str]:
    """The places that a text names which do not exist; a note where it names none."""
    places = PLACE.findall(text)
    missing = [place for place in places if not _exists(place)]
    return missing if places else [f"names no place in docs/: {text}"]


def _exists(place: str) -> bool:
    file, _, anchor = place.partition("#")
    return (panels.ROOT / file).is_file() and anchor in anchors(panels.ROOT / file)


def test_all_families_are_seen(check):
    """Of vLLM, of ours and of the router, with their labels."""
    assert check.families["vllm:inter_token_latency_seconds_bucket"].labels >= {"model_name", "engine", "le", "job"}
    assert check.families["vllm:pd_decisions_total"] == SampleFamily(
        frozenset({"model_name", "engine", "decision", "reason", "job", "instance"}), counts=True)
    assert not check.families["vllm:pd_parked_blocks"].counts
    assert check.families["vllm:pd_wanted_engines"].labels == {"role", "job", "instance"}
    assert check.families["vllm:pd_router_tries_total"].labels == {"worker", "outcome", "job", "instance"}


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_a_panel_shows_what_there_is(check, panel):
    assert unknown_places(panel.description) == []
    for line in panel.lines:
        labels = check.result(panels.filled(line.expression, VARIABLES, "1m"))
        assert set(legend_labels(line.legend)) == labels, line


def test_the_variables_are_about_what_there_is(check):
    for query in VARIABLES.values():
        values = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        expression = values[1] if values else re.fullmatch(r"query_result\((.+)\)", query)[1]
        labels = check.result(panels.filled(expression, VARIABLES, "1m"))
        assert not values or values[2] in labels


def test_the_dashboard_can_be_imported():
    """Each panel has a place of its own and an id, and takes its data from the source that is chosen."""
    drawn = DASHBOARD["panels"]
    assert len({panel["id"] for panel in drawn}) == len(drawn) and 12 <= len(PANELS) <= 20
    for one, other in combinations([panel["gridPos"] for panel in drawn], 2):
        assert (one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
                or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"])
    sources = [one["name"] for one in DASHBOARD["templating"]["list"] if one["type"] == "datasource"]
    for panel in drawn:
        for part in (panel, *panel["targets"]) if panel["type"] != "row" else ():
            assert part["datasource"] == {"type": "prometheus", "uid": f"${{{sources[0]}}}"}
    assert unknown_places(DASHBOARD["description"]) == []


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_alert_is_about_what_there_is_and_says_what_to_do(check, rule):
    labels = check.result(rule["expr"])
    assert set(rule["labels"]) == {"severity"} and rule["labels"]["severity"] in ("warning", "critical")
    assert re.fullmatch(r"[1-9]\d?m", rule["for"])
    assert unknown_places(rule["annotations"]["description"]) == []
    assert rule["annotations"].keys() == {"summary", "description"}
    assert set(legend_labels(" ".join(rule["annotations"].values()))) <= labels


@pytest.mark.parametrize("expression, fault", [
    ("sum(rate(vllm:pd_decision_total[5m]))", "there is no family vllm:pd_decision_total"),
    ("sum(rate(vllm:pd_decisions[5m]))", "there is no family vllm:pd_decisions"),
    ("rate(vllm:pd_handover_seconds[5m])", "there is no family"),
    ("vllm:pd_degraded{cause=\"peer\"} > 0", "has no label cause"),
    ("sum by (worker) (vllm:pd_parked_blocks)", "by worker: there is no such label"),
    ("vllm:pd_degraded{reason=\"brokr\"} > 0", "reason of vllm:pd_degraded is never brokr"),
    ("vllm:pd_degraded{reason=~\"broker|pear\"} > 0", "is never pear"),
    ("up{job=\"vllm\"} == 0", "job of up is never vllm"),
    ("vllm:pd_parked_blocks{engine=\"0\"}", "what values engine of vllm:pd_parked_blocks has is not known"),
    ("sum(rate(vllm:pd_jobs_total[5m])", "unclosed left parenthesis"),
    ("rate(vllm:pd_parked_blocks[5m])", "is a gauge: no rate of it"),
    ("sum(vllm:pd_jobs_total)", "is a counter: its rate"),
    ("rate(vllm:pd_jobs_total)", "expected type range vector|expected type matrix"),
    ("histogram_quantile(0.9, sum(rate(vllm:pd_parked_seconds_bucket[5m])))", "has no label le"),
    ("rate(vllm:pd_attempts_total[5m]) / rate(vllm:pd_jobs_total[5m])", "the two sides of `/` have different labels"),
    ("vllm:pd_parked_blocks / on (instance) vllm:pd_held_blocks", "is not known here"),
    ("sum without (engine) (vllm:pd_parked_blocks)", "is not known here"),
    ("delta(vllm:pd_parked_blocks[5m])", "is not known here"),
])
def test_a_fault_is_found(check, expression, fault):
    with pytest.raises(ExpressionFault, match=fault):
        check.result(expression)


def test_a_variable_or_a_place_that_is_not_there_is_found():
    with pytest.raises(ValueError, match="has no variable jobs"):
        panels.filled('up{job=~"$jobs"}', VARIABLES, "1m")
    assert unknown_places("docs/operations.md#quarantine-grows") == []
    assert unknown_places("docs/operations.md#quarantine-shrinks") == ["docs/operations.md#quarantine-shrinks"]
    assert unknown_places("docs/operation.md#quarantine-grows") == ["docs/operation.md#quarantine-grows"]
    assert len(unknown_places("see the documents")) == 1
    assert list(legend_labels("{{a}} {{ $labels.b }} {{ $value }} {{ $value | humanize }}")) == ["a", "b"]


def test_prometheus_reads_the_composed_services():
    """At the ports that compose.yaml gives them; all are on the loopback."""
    jobs = {one["job_name"]: one["static_configs"][0]["targets"]
            for one in yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]}
    composed = yaml.safe_load((FOLDER.parent / "compose.yaml").read_text())["services"]
    commands = {name: " ".join(composed[name]["command"]) for name in ("prefill", "decode", "router")}
    places = {name: "127.0.0.1:" + re.search(r"--port[= ](\d+)", command)[1] for name, command in commands.items()}
    assert jobs == {"vllm-pd-engine": [places["prefill"], places["decode"]], "vllm-pd-router": [places["router"]],
                    "vllm-pd-picker": []}, "there is no picker in compose.yaml"


def promtool(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *words], cwd=folder, capture_output=True, text=True, timeout=120)


@needs_promtool
def test_prometheus_reads_the_files():
    done = promtool(FOLDER, "check", "config", "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


def test_each_alert_has_a_case_in_which_it_fires():
    cases = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    fires = Counter(name for case in cases for query in case["promql_expr_test"] for sample in query["exp_samples"]
                    for name in re.findall(r'alertname="(\w+)"', sample["labels"]))
    assert fires.keys() == RULES.keys()
    assert all("interval" in case for case in cases), "without it promtool has no samples: no alert fires"


@needs_promtool
def test_the_alerts_fire_when_they_should():
    done = promtool(FOLDER, "test", "rules", "alerts_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("change", [
    lambda rule: {"expr": f"({rule['expr']}) > 1e9 < 0"}, lambda rule: {"expr": "vector(1)"},
    lambda rule: {"for": "2h"}, lambda rule: {"for": "0m"},
], ids=["never", "always", "too late", "too early"])
def test_the_cases_find_alerts_that_fire_at_the_wrong_time(tmp_path, change):
    """Each of them is named."""
    broken = [rule | change(rule) for rule in RULES.values()]
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": broken}]}))
    shutil.copy(FOLDER / "alerts_test.yml", tmp_path)
    done = promtool(tmp_path, "test", "rules", "alerts_test.yml")
    assert done.returncode == 1, done.stdout + done.stderr
    assert [name for name in RULES if name not in done.stdout + done.stderr] == []
