# SPDX-License-Identifier: Apache-2.0
"""scripts/lab/draw_dashboard.py: reading the dashboard, Prometheus' configuration and answers, the figures."""
import json
import math

import draw_dashboard
import pytest
import yaml
from _dashboard import panels, picture, prometheus
from _dashboard.panels import DashboardPanel, PanelLine
from _dashboard.prometheus import PanelSeries
from _dashboard.session import DashboardRecord, PanelReading

from vllm_pd.errors import PDError

JOBS = PanelLine("sum by (instance) (rate(vllm:pd_jobs_total[$__rate_interval]))", "P {{instance}}")
PANEL = DashboardPanel("Prefill engines", "Jobs", "See docs/operations.md#bounds.", "reqps", True, (JOBS, ))


def series(*values: float | None, **labels: str) -> PanelSeries:
    """Samples at 100, 102, ... seconds; none where a value is None."""
    found = [(100.0 + prometheus.SCRAPE_S * turn, value) for turn, value in enumerate(values) if value is not None]
    return PanelSeries(labels, *zip(*found, strict=True))


def record(*shown: PanelSeries) -> DashboardRecord:
    return DashboardRecord(phases=[("there", 100.0), ("gone", 104.0)], ended_s=108.0, answers=3,
                           readings=[PanelReading(PANEL, JOBS, list(shown))],
                           alerts=[series(1.0, alertname="VllmPdDown", alertstate="pending"),
                                   series(1.0, alertname="VllmPdEngineDegraded", alertstate="firing", reason="peer")])


def test_the_dashboard_is_read():
    found = panels.panels_of(panels.read_dashboard())
    assert {panel.unit for panel in found} <= picture.UNITS.keys()
    assert found[0].title == "Time to first token" and len(found[0].lines) == 3
    (decisions, ) = (panel for panel in found if panel.title == "Decisions")
    assert decisions.stacked and decisions.lines[0].name({"decision": "local", "reason": "cap"}) == "local: cap"


def test_variables_stand_for_everything():
    expression = 'sum(rate(a_total{job=~"$job",instance=~"${instance}"}[$__rate_interval]))'
    assert panels.filled(expression, {"job": "", "instance": ""}, "8s") == (
        'sum(rate(a_total{job=~".*",instance=~".*"}[8s]))')
    with pytest.raises(ValueError, match="no variable instance"):
        panels.filled(expression, {"job": ""}, "8s")


def test_prometheus_gets_the_addresses_of_the_run(tmp_path):
    jobs = [job["job_name"] for job in yaml.safe_load(prometheus.CONFIG.read_text())["scrape_configs"]]
    path = prometheus.write_config(tmp_path, {job: [f"{job}:1"] for job in jobs})
    config = yaml.safe_load(path.read_text())
    assert [job["static_configs"] for job in config["scrape_configs"]] == [[{"targets": [f"{job}:1"]}] for job in jobs]
    assert [prometheus.CONFIG.with_name("alerts.yml").as_posix()] == config["rule_files"]
    with pytest.raises(KeyError, match=jobs[0]):
        prometheus.write_config(tmp_path, {})
    with pytest.raises(PDError, match="there is no no-such-program"):
        prometheus.find_prometheus("no-such-program")


def test_what_is_no_number_is_left_out(monkeypatch):
    reply = {"data": {"result": [{"metric": {"instance": "a"}, "values": [[100, "1.5"], [102, "NaN"], [104, "2"]]},
                                 {"metric": {"instance": "b"}, "values": [[100, "NaN"], [102, "+Inf"]]}]}}
    monkeypatch.setattr(prometheus, "fetch", lambda url, path, timeout_s: (200, json.dumps(reply)))
    (found, ) = prometheus.ask_range("http://x", "a / b", 100.0, 104.0)
    assert found == series(1.5, None, 2.0, instance="a")
    assert (found.mean(100.0, 104.0), found.mean(104.0, 110.0), found.mean(0.0, 100.0)) == (1.5, 2.0, None)
    times, values = found.with_gaps()
    assert times == [100.0, 104.0, 104.0] and values[::2] == [1.5, 2.0] and math.isnan(values[1])
    monkeypatch.setattr(prometheus, "fetch", lambda url, path, timeout_s: (400, '{"error": "no such function"}'))
    with pytest.raises(PDError, match="a / b: no such function"):
        prometheus.ask_range("http://x", "a / b", 100.0, 104.0)


def test_the_figures_have_a_mean_for_each_phase():
    found = draw_dashboard.figures(record(series(1.0, 3.0, 0.12345, instance="p:1"),
                                          series(None, None, 1.0, instance="q")))
    assert found["phases"] == {"there": 4.0, "gone": 4.0}
    assert found["panels"]["Prefill engines: Jobs"][JOBS.expression] == {"P p:1": [2.0, 0.1235], "P q": [None, 1.0]}
    assert found["alerts"] == ["VllmPdDown pending", "VllmPdEngineDegraded firing peer"]
    assert found["lines_without_samples"] == []
    assert draw_dashboard.figures(record())["lines_without_samples"] == ["Jobs: P {{instance}}"]


def test_it_is_seen_whether_anything_was_handed_over():
    assert draw_dashboard.handed_over(record(series(0.0, 0.5)))
    assert not draw_dashboard.handed_over(record(series(0.0, 0.0))) and not draw_dashboard.handed_over(record())


def test_a_picture_is_drawn(tmp_path):
    both = record(series(1.0, 2.0, None, 3.0, instance="p"), series(1.0, instance="q"))
    line = DashboardPanel("Prefill engines", "Other", "", "s", False, (JOBS, ))
    both.readings += [PanelReading(line, JOBS, both.readings[0].series), PanelReading(
        DashboardPanel("Blocks", "Nothing", "", "short", False, (JOBS, )), JOBS, [])]
    picture.draw(both, tmp_path / "a.png", "title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
