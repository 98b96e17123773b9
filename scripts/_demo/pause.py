# SPDX-License-Identifier: Apache-2.0
"""How long a running answer pauses while a chapter is prefilled: the same two requests with PD and without."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_pd.bench.load import GenerationAnswer
from vllm_pd.bench.serve.drive import EntryPoint, ServedLoad, ServedRequest, send_load
from vllm_pd.bench.serve.figures import timeline
from vllm_pd.bench.serve.pictures import draw_timelines
from vllm_pd.bench.serve.traffic import LoadPoint, LoadRequest, PromptKind, RequestChain

RUNNING_TOKENS, CHAPTER_TOKENS = 80, 1200  # of the running answer; of the chapter's prompt
CHAPTER_ANSWER_TOKENS = 4
LEAD_S = 1.0  # from the running answer's request to the chapter's


@dataclass(frozen=True)
class PauseTrial:
    """The two requests at one server."""
    served: ServedLoad

    @property
    def failed(self) -> list[str]:
        """Why a request has no answer; empty where both have one."""
        return [f"{one.name}: {one.error}" for one in self.served.requests if one.answer is None]

    @property
    def answers(self) -> list[GenerationAnswer | None]:
        """That of the running one, then the chapter's."""
        return [self._one(kind).answer for kind in (PromptKind.SHORT, PromptKind.LONG)]

    @property
    def chapter_tokens(self) -> int:
        """Of the chapter's prompt; 0 where it has no answer."""
        chapter = self._one(PromptKind.LONG).answer
        return chapter.usage[0] if chapter else 0

    @property
    def longest_s(self) -> float | None:
        """The longest time between two tokens of the running answer, of those that overlap the time from the chapter's
        arrival to its first token. None where there is none."""
        running, chapter = self._one(PromptKind.SHORT), self._one(PromptKind.LONG)
        if running.answer is None or chapter.answer is None:
            return None
        from_s, to_s = chapter.at_s, chapter.at_s + chapter.answer.ttft_s
        gaps = itertools.pairwise(running.at_s + arrived_s for arrived_s in running.answer.arrivals_s)
        return max((later - earlier for earlier, later in gaps if later > from_s and earlier < to_s), default=None)

    @property
    def outlasted(self) -> bool:
        """Whether the running answer still ran when the chapter's first token came."""
        running, chapter = self._one(PromptKind.SHORT), self._one(PromptKind.LONG)
        return (running.answer is not None and chapter.answer is not None
                and running.at_s + running.answer.arrivals_s[-1] > chapter.at_s + chapter.answer.ttft_s)

    def as_json(self) -> dict[str, Any]:
        """Its figures, times in seconds, those of `timeline` as in the report of `vllm-pd bench serve`."""
        return {"longest_s": self.longest_s, "outlasted": self.outlasted, "timeline": timeline(self.served)}

    def _one(self, kind: PromptKind) -> ServedRequest:
        return next(one for one in self.served.requests if one.kind is kind)


@dataclass(frozen=True)
class PauseComparison:
    """Both set-ups. `remote`: how many prompts were prefilled remotely with PD."""
    pd: PauseTrial
    off: PauseTrial
    remote: int

    def faults(self) -> list[str]:
        """What is wrong; empty where all is well. How long a pause is, is no fault."""
        failed = [f"beside a chapter, {name}: {error}" for name, trial in (("PD", self.pd), ("PD off", self.off))
                  for error in trial.failed]
        if failed:
            return failed
        found = [f"beside a chapter: the {name} answer differs from that with PD off"
                 for name, ours, theirs in zip(("running", "chapter's"), self.pd.answers, self.off.answers, strict=True)
                 if not ours.same_as(theirs)]
        if self.remote != 1:
            found.append(f"beside a chapter: {self.remote} prompts were prefilled remotely, and it should be the "
                         "chapter's alone")
        return found

    def line(self) -> str:
        """The last line of the demo."""
        return (f"while a chapter of {self.off.chapter_tokens:,} tokens is prefilled, the longest pause of a running "
                f"answer is {_seconds(self.pd)} with PD and {_seconds(self.off)} without, on the same cores")

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        return {"pd": self.pd.as_json(), "off": self.off.as_json(), "remote": self.remote}

    def plot(self, path: Path) -> None:
        """The picture: each token's latency over time, with PD and without."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 5), layout="constrained")
        draw_timelines(figure, {f"{name}: longest pause {_seconds(trial)}": timeline(trial.served)
                                for name, trial in (("with PD", self.pd), ("without PD", self.off))}, line="-")
        figure.suptitle("A running answer while a chapter is prefilled, same cores", fontsize=11)
        figure.savefig(path, dpi=120)


def _seconds(trial: PauseTrial) -> str:
    """The pause in words."""
    if trial.longest_s is None:
        return "not measured"
    return f"{trial.longest_s:.2f} s" + ("" if trial.outlasted else " (it ended before the chapter's first token)")


def try_pause(url: str, model: str, prompts: Sequence[str]) -> PauseTrial:
    """Send the running answer's prompt to the server at `url`, and LEAD_S later the chapter. Returns when both are
    answered, or have failed."""
    running, chapter = prompts
    requests = (LoadRequest("running answer", PromptKind.SHORT, running, RUNNING_TOKENS),
                LoadRequest("chapter", PromptKind.LONG, chapter, CHAPTER_ANSWER_TOKENS))
    point = LoadPoint(1, "chapter", 2 * LEAD_S, lambda: [RequestChain(number * LEAD_S, [one])
                                                         for number, one in enumerate(requests)])
    return PauseTrial(asyncio.run(send_load([EntryPoint(url)], model, point, token_ids=True)))
