# SPDX-License-Identifier: Apache-2.0
"""What `vllm-pd bench dp` makes of what groups show: fed with groups of which it is known."""

import json
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from vllm_pd.bench import commands
from vllm_pd.bench.dp import measure, report
from vllm_pd.bench.dp.probe import DUMMY, FORWARD
from vllm_pd.cli import app
from vllm_pd.errors import ConfigError

STEP_S = 0.01


class Played:
    """Two ranks: each request takes a pass of rank 0 for each token, then both run `drain` dummies; `sent` messages."""

    size = 2
    ranks = (0, 1)

    def __init__(self, name: str, turns: list[str], drain: int, sent: int) -> None:
        self.name, self.turns, self.drain, self.sent = name, turns, drain, sent
        self.pids, self.process = {}, SimpleNamespace(pid=-1)
        self.now_s = 0.0

    def start_probe(self) -> None:
        self.probes = [{"steps": [], "messages": 0, "collectives": 0} for _ in range(2)]
        self.turns.append(self.name)

    def take_probe(self) -> list[dict]:
        for probe in self.probes:
            start_s = probe["steps"][-1][1]
            probe["steps"] += [(start_s + STEP_S * n, start_s + STEP_S * (n + 1), DUMMY, 0) for n in range(self.drain)]
            probe["messages"] += self.sent
        probes, self.probes = self.probes, []
        return probes

    def generate(self, prompt: list[int], rank: int, max_tokens: int, stop_token_ids: tuple = ()) -> Future:
        tokens = list(range(200, 200 + max_tokens))
        if stop_token_ids:
            tokens = tokens[: tokens.index(stop_token_ids[0]) + 1]
        sent_s, times_s = self.now_s, []
        for _ in tokens:
            for number, kind in enumerate([FORWARD, DUMMY]):
                begun_s = self.now_s + 0.002 * (number + 1)
                if vars(self).get("probes"):
                    self.probes[number]["steps"].append((begun_s, begun_s + STEP_S, kind, 1))
            self.now_s += STEP_S
            times_s.append(self.now_s)
        answer: Future = Future()
        answer.set_result({"tokens": tokens, "sent": sent_s, "times": times_s, "first": sent_s + 0.02,
                           "ended": self.now_s})  # fmt: skip
        return answer

    def tokens(self, asked: list[Future]) -> list[list[int]]:
        return [each.result()["tokens"] for each in asked]


@pytest.fixture
def bench(tmp_path, monkeypatch) -> measure.DpBench:
    monkeypatch.setattr(measure.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(measure, "_silence", lambda groups: [{"idle_cpu_percent": 1.0, "idle_front_cpu_percent": 0.0}
                                                            for _ in groups])  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"]}))
    compared = (measure.DpVariant("waves"), measure.DpVariant("ours"))
    return measure.DpBench(models=(tmp_path, ), sizes=(2, ), variants=compared, bursts=6, requests=4, rounds=3)


def test_the_trees_take_turns_and_get_the_same(bench):
    """Each is first in every other burst and round; figures are of what the group has shown."""
    turns: list[str] = []
    groups = [Played("waves", turns, drain=20, sent=7), Played("ours", turns, drain=1, sent=2)]
    waves, ours = measure.measure_groups(bench, [measure.MeasuredGroup(group) for group in groups])
    after_warm_up = turns[2:]
    assert after_warm_up[:4] == ["waves", "ours", "ours", "waves"] and len(after_warm_up) == 2 * (6 + 3)
    real = [each["passes_per_load"] - each["dummies_per_load"] for each in (waves, ours)]
    assert real[0] == real[1] > 4  # of rank 0; rank 1 has run a dummy beside each, and then both have come to rest
    assert [each["dummies_per_load"] for each in (waves, ours)] == [real[0] + 40, real[0] + 2]
    assert [each["messages_per_load"] for each in (waves, ours)] == [14, 4]
    for kind in ("itl_alone_ms", "itl_beside_ms"):
        assert ours[kind]["p50"] == pytest.approx(10) and ours[kind]["samples"] == 3 * (measure.DECODED_TOKENS - 1)
    assert ours["ttft_beside_ms"]["samples"] == ours["ttft_long_ms"]["samples"] == 1
    assert [each["drain_dummies"]["mean"] for each in (waves, ours)] == [20, 1]
    assert [each["messages_per_burst"] for each in (waves, ours)] == [14, 4]
    assert waves["wake_up_ms"]["p50"] == pytest.approx(4) and waves["ttft_idle_ms"]["max"] == pytest.approx(20)
    assert waves["tokens_digest"] == ours["tokens_digest"] and len(ours["tokens_per_s_rounds"]) == 3
    assert waves["tokens_per_s_ratio"] == 1 and measure._ratio([2, 9, 4], [1, 3, 4]) == 2
    assert len(ours["steps"]) == 2  # the picture's, rank by rank


def test_the_report_has_a_column_for_each_group(bench, tmp_path):
    """And says when groups of one model gave different tokens."""
    groups = [Played("waves", [], 20, 7), Played("ours", [], 1, 2)]
    about = {"model": "m", "experts": False, "size": 2}
    figures = measure.measure_groups(bench, [measure.MeasuredGroup(group) for group in groups])
    entries = [about | {"tree": group.name} | each for group, each in zip(groups, figures, strict=True)]
    assert measure.same_tokens(entries)
    assert not measure.same_tokens([*entries, entries[0] | {"tokens_digest": "0"}])
    assert len(report.table({"entries": entries}).columns) == 3
    report.picture({"entries": entries}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_other_tokens_end_the_command_with_1(tmp_path, monkeypatch):
    for same in (True, False):
        found = {"entries": [], "same_tokens": same}
        monkeypatch.setattr(measure, "measure", lambda *_, found=found: found)
        monkeypatch.setattr(commands, "print_table", lambda table: None)
        options = ["--model", str(tmp_path), "--output", str(tmp_path / "out.json")]
        done = CliRunner().invoke(app, ["bench", "dp", *options])
        assert done.exit_code == (0 if same else 1) and json.loads((tmp_path / "out.json").read_text()) == found


@pytest.mark.parametrize("key, given", [("bursts", 2), ("rounds", 0), ("requests", 0), ("sizes", (1, ))])
def test_b80_what_cannot_be_measured_is_refused(bench, key, given):
    """B80: the message names the option."""
    with pytest.raises(ConfigError, match=rf"--{key.removesuffix('s') if key == 'sizes' else key}"):
        measure.DpBench(**(vars(bench) | {key: given})).check()


def test_few_samples_have_no_99th_percentile():
    """Of 30 it would be the largest by another name."""
    assert measure.spread([1.0] * 29 + [2.0], 1) == {"samples": 30, "mean": 1.0333, "p50": 1, "max": 2}
    assert measure.spread(range(200), 1)["p99"] == 197
    assert report._spread(measure.spread([0.5] * 30)) == "p50 500.0 max 500.0"
    assert "p99" in report._spread(measure.spread([0.5] * 100)) and report._spread(None) == "-"


def test_what_is_compared(tmp_path):
    """The other tree, the same with another interval, and this one on each backend asked for."""
    names = [each.name for each in measure.variants(tmp_path, ["shared-memory", "network"], 16)]
    assert names == ["other", "other, every 16", "shared-memory", "network"]
    assert [each.name for each in measure.variants(None, ["network"], 0)] == ["network"]
    with pytest.raises(ConfigError, match="--backend"):
        measure.variants(None, ["pigeons"], 0)
    with pytest.raises(ConfigError, match="--stop-every"):
        measure.variants(None, ["network"], 16)


def test_b80_a_tree_that_is_not_there_is_refused(bench, tmp_path):
    """B80: the message names the option."""
    with pytest.raises(ConfigError, match="--other"):
        measure.DpBench(**(vars(bench) | {"variants": measure.variants(tmp_path, ["network"], 0)})).check()
