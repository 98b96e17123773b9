# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench serve` from beginning to end.

In each round every arm has its turn, in an order that is drawn: its engines are started, warmed up and given the load
of that round, point after point, and ended. The same load goes to every arm. The report is kept after each turn. An arm
whose engines do not start is not tried again; the others go on.
"""

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from vllm_pd.bench.connection import LoadError, served_model
from vllm_pd.bench.report import ShowLine
from vllm_pd.bench.serve import choices
from vllm_pd.bench.serve.arms import Arm, ArmKind, ArmPlan, FleetSettings, plan_arm
from vllm_pd.bench.serve.comparison import AnswerBook, compared
from vllm_pd.bench.serve.drive import EntryPoint, send_each, send_load
from vllm_pd.bench.serve.figures import SloLimits, point_figures, timeline
from vllm_pd.bench.serve.fleets import RunningArm, running
from vllm_pd.bench.serve.settings import ServeBench
from vllm_pd.bench.serve.traffic import points, warm_up
from vllm_pd.bench.serve.watch import EngineWatch
from vllm_pd.bench.servers import log_to
from vllm_pd.errors import PDError

Keep = Callable[[dict[str, Any]], object]  # gets the report as far as it is


class ServeRun:
    """One run. `report` is what it has found so far."""

    def __init__(self, bench: ServeBench, show: ShowLine, log: TextIO) -> None:
        choices.check(bench)
        self._bench, self._shape, self._show = bench, choices.shape_of(bench), show
        self._say = log_to(log)
        self._arms = choices.chosen(bench)
        self._fleet = FleetSettings("") if bench.given else choices.fleet(bench)
        self._book = AnswerBook()
        for arm in self._arms:  # a setting that can't be used is an error before anything starts
            if arm.kind is not ArmKind.GIVEN:
                plan_arm(arm, self._fleet)
        self.report: dict[str, Any] = {"settings": settings_of(bench), "arms": {}, "failed": {}, "different": [],
                                       "compared": 0}

    def measure(self, keep: Keep) -> dict[str, Any]:
        """All rounds. The report, which `keep` gets after each turn of an arm."""
        draw = random.Random(self._shape.seed)
        for turn in range(self._bench.rounds):
            for arm in draw.sample(self._arms, len(self._arms)) if turn else self._arms:
                if arm.name in self.report["failed"]:
                    continue
                try:
                    self._take_turn(arm, turn)
                except (PDError, OSError) as error:
                    self.report["failed"][arm.name] = str(error)
                    self._show(f"round {turn + 1}, {arm.name} failed: {error}")
                self.report["compared"], self.report["table"] = self._book.compared, compared(self.report)
                keep(self.report)
        return self.report

    def _take_turn(self, arm: Arm, turn: int) -> None:
        where = f"round {turn + 1} of {self._bench.rounds}, {arm.name}"
        if arm.kind is ArmKind.GIVEN:
            ready = RunningArm(tuple(map(EntryPoint, arm.urls)), tuple(map(EntryPoint, arm.behind)))
            self._serve(arm, turn, ready, f"at {', '.join(arm.urls)}")
            return
        plan: ArmPlan = plan_arm(arm, self._fleet)
        self._show(f"{where}: starting {plan.where}")
        with running(plan, self._say, self._bench.timeout_s) as ready:
            self._serve(arm, turn, ready, plan.where)

    def _serve(self, arm: Arm, turn: int, ready: RunningArm, where: str) -> None:
        """Sends all points of the round and adds what they were, up to the one that fails."""
        model = served_model(ready.entries[0].url)
        asyncio.run(send_each((*ready.behind, *ready.entries), model, warm_up(self._shape, self._bench.warm_up),
                              self._bench.token_ids))
        limits = SloLimits(self._bench.ttft_slo, self._bench.itl_slo)
        found: list[dict[str, Any]] = []
        for point in points(self._shape, turn, arm.with_long):
            used_s = ready.cpu_s()
            with EngineWatch(ready.engines) as watch:
                served = asyncio.run(send_load(ready.entries, model, point, self._bench.token_ids))
            cores = len(self._fleet.cores)
            share = (ready.cpu_s() - used_s) / served.took_s / cores if cores and ready.pids else None
            figures = point_figures(point, served, limits, share) | {"handover": watch.figures()}
            self.report["different"] += self._book.add(arm.name, turn, point.label, served)
            self._show(_progress(self._bench, arm, turn, figures))
            if not figures["requests"]:
                errors = [one.error for one in served.requests]
                raise LoadError(f"no request was {'answered: ' + errors[0] if errors else 'to be sent'}")
            known = self.report["arms"].setdefault(arm.name, {"where": where, "rounds": []})
            known.setdefault("timeline", timeline(served))
            if not found:
                known["rounds"].append({"round": turn, "points": found})
            found.append(figures)


def _progress(bench: ServeBench, arm: Arm, turn: int, figures: dict[str, Any]) -> str:
    """How far it is, in one line."""
    of_kinds = ", ".join(f"{kind} TTFT p50 {figures[kind]['ttft_ms']['p50']:,.0f} ms" for kind in ("short", "long")
                         if figures[kind]["ttft_ms"])
    itl, pause = figures["short"]["itl_ms"], figures["short"]["pause_ms"]
    gaps = f", ITL p99 / max {itl['p99']:,.0f} / {itl['max']:,.0f} ms, pause p90 {pause['p90']:,.0f} ms" if itl else ""
    return (f"round {turn + 1} of {bench.rounds}, {arm.name}, {figures['label']}: {figures['requests']} answers, "
            f"{figures['failed']} failed{gaps}, {of_kinds}")


def settings_of(bench: ServeBench) -> dict[str, Any]:
    """The options for the report, without paths of this machine and without the prompts of a trace."""
    found = asdict(bench)
    found["load"].pop("trace")
    found.pop("programs")
    for key in ("model", "trace", "state", "export"):
        found[key] = Path(found[key]).name if found[key] else None
    found["serve_args"] = [Path(word).name if word.startswith("/") else word for word in bench.serve_args]
    return {**found, "host_cores": os.cpu_count()}


def good(report: dict[str, Any]) -> bool:
    """Whether every arm was measured, and all answers were the same."""
    return bool(report["arms"]) and not report["failed"] and not report["different"]
