# SPDX-License-Identifier: Apache-2.0
"""Step times against stock vLLM, in pairs: the plugin installed and off, the plugin on without a job, and a connector
that does nothing, whose share is vLLM's own.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from _bench_step.pairs import StepPair, StepVerdict, judge
from _bench_step.turns import StepWorker
from _bench_step.worker import TURNS, StepLoad, has_plugin

from _bench_v1.installations import BenchInstallation
from _bench_v1.waiting import PARKING

WORKER = Path(__file__).resolve().parents[1] / "_bench_step" / "worker_v1.py"
STEPS = {"engine": 8, "scheduler": 100}  # of a round: short, so that other work on the machine hits all of it
EMPTY = "any connector"  # without a goal
IN_TURNS = "on, in one process"  # with the plugin and without it, in turns: the process is the same
GOALS = {"stock again": 1.0, "off": 1.0, EMPTY: None, "on": 1.02}


@dataclass(frozen=True)
class StepFigures:
    """Of one kind of steps. `verdicts` by what was compared with stock; `about`: what each process said of itself."""
    verdicts: dict[str, StepVerdict]
    about: dict[str, dict]

    def as_dict(self) -> dict:
        """For JSON."""
        about = {name: {key: value for key, value in one.items() if key != "vllm"} for name, one in self.about.items()}
        return {"verdicts": {name: asdict(one) for name, one in self.verdicts.items()}, "about": about}


@dataclass(frozen=True)
class StepComparison:
    """What is compared, and how. `broker`: the address of one that runs."""
    stock: BenchInstallation
    plugin: BenchInstallation
    broker: str
    model: str
    core: int
    processes: int
    rounds: int
    log: Path

    def measure(self, kind: str, say: Callable[[str], None]) -> StepFigures:
        """Run `processes` sets of workers one after another. In each round every worker has its turn, in an order that
        alternates."""
        load = StepLoad(kind, self.model, 8, 32, 1024, 32, prefix_caching=True)
        names = ["stock", *GOALS]
        goals = goals_of(kind)
        started = ["stock", *goals]
        pairs: dict[str, list[StepPair]] = {name: [] for name in goals}
        about: dict[str, dict] = {}
        for number in range(self.processes):
            workers: dict[str, StepWorker] = {}
            try:
                for name in started if number % 2 == 0 else reversed(started):
                    workers[name] = self._start(name, load)
                about = {name: worker.ready().about for name, worker in workers.items()}
                for turn in range(self.rounds):
                    order = names[turn % len(names):] + names[:turn % len(names)]
                    timed = {name: workers[name].steps(STEPS[kind])
                             for name in (order if turn // len(names) % 2 == 0 else reversed(order))}
                    for name in GOALS:
                        pairs[name].append(StepPair.of(number, timed["stock"], timed[name]))
                    if IN_TURNS in goals:
                        both = {has_plugin(2 * turn + half): workers[IN_TURNS].steps(STEPS[kind]) for half in (0, 1)}
                        pairs[IN_TURNS].append(StepPair.of(number, both[False], both[True]))
            finally:
                for worker in workers.values():
                    worker.close()
            say(f"{kind}: processes {number + 1} of {self.processes}")
        return StepFigures({name: judge(kind, found) for name, found in pairs.items()}, about)

    def _start(self, name: str, load: StepLoad) -> StepWorker:
        where = self.stock if name.startswith("stock") or name == EMPTY else self.plugin
        command = [where.python, str(WORKER), json.dumps(asdict(load))]
        if name in ("on", IN_TURNS):
            command.append(json.dumps({"kv_connector": "PDConnector", "kv_role": "kv_both",
                                       "kv_connector_extra_config": {"broker": self.broker}}))
            command += [TURNS] if name == IN_TURNS else []
        elif name == EMPTY:
            command.append(json.dumps(PARKING))  # its requests are too short for it
        return StepWorker(command, where.environment(Path(__file__).parent), self.core, self.log)


def goals_of(kind: str) -> dict[str, float | None]:
    """What is compared of this kind of steps, with the goals."""
    return GOALS | ({IN_TURNS: GOALS["on"]} if kind == "engine" else {})


def untouched(about: dict, stock: dict) -> bool:
    """Whether a process in which the plugin is off is as without it (B91): nothing wrapped, the threads of `stock`, and
    no module but those that register the name."""
    ours = {"vllm_pd", "vllm_pd.errors", "vllm_pd.extras", "vllm_pd.model", "vllm_pd.model.installation",
            "vllm_pd.model.offloading", "vllm_pd.v1", "vllm_pd.v1.plugin"}
    return not about["wrapped"] and about["threads"] == stock["threads"] and set(about["plugin_modules"]) <= ours
