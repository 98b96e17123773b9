# SPDX-License-Identifier: Apache-2.0
"""Part `death`: the prefill engine is killed while it computes and writes for a decode engine.

Each question that the decode engine was asked must get its right answer, because what the dead engine does not deliver
the decode engine computes itself, and no block may stay set aside for writes that can't come any more.
"""
from __future__ import annotations

import asyncio
import contextlib
import math
import time

import psutil

from _gpu_check.child import PartRun
from _gpu_check.engines import (
    PAIR_S,
    answer_faults,
    attempts,
    await_peer,
    known_answers,
    metrics_of,
    plain_pair,
    prepare,
    started_pair,
    wrong_answers,
)
from _gpu_check.results import PartFailed

KILL_AFTER = 0.25  # of the questions
MOMENT_S = 0.05  # from the next questions to the death: they are with the prefill engine then


def check_death(run: PartRun) -> None:
    """`--prompts` prompts; the engine is killed after a quarter of them. Raises PartFailed for a wrong answer, for
    blocks that are not given back, and where nothing was under way at the death."""
    from _connectors.questions import answer_all
    from _demo.rest import left_over

    from vllm_pd.bench.connection import served_model

    v1 = prepare(run)
    if not run.settings.at_once:
        known_answers(run, run.settings.prompts)
    with started_pair(run, plain_pair(run, v1)) as pair:
        url, model = pair.urls[0], served_model(pair.urls[0])
        questions = known_answers(run, run.settings.prompts)
        await_peer(url, model, pair.broker, PAIR_S)
        prompts = [prompt for prompt, _ in questions]
        first = math.ceil(KILL_AFTER * len(prompts))

        async def ask() -> list:
            found = await answer_all(url, model, prompts[:first], margin=0.0)
            rest = asyncio.create_task(answer_all(url, model, prompts[first:], margin=0.0))
            await asyncio.sleep(MOMENT_S)
            run.note(asked_before=first)
            began_s = time.monotonic()
            kill_with_children(pair.pids[1])
            found += await rest
            run.note(seconds_until_the_last_answer=round(time.monotonic() - began_s, 2))
            return found

        answers = asyncio.run(ask())
        wrong = wrong_answers(questions, answers)
        run.note(prompts=len(questions), wrong=wrong, interrupted=attempts_lost(url), metrics=metrics_of(url))
        leaks = left_over({"decode": url}, model)
    judge_death(len(questions), wrong, leaks, run.figures["interrupted"])


def attempts_lost(url: str) -> int:
    """How many attempts of the engine at `url` the death has ended."""
    return attempts(url, "failed", "expired")


def judge_death(prompts: int, wrong: list[int], leaks: list[str], interrupted: int) -> None:
    """Raises PartFailed unless all is as it must be. `interrupted`: attempts that the death has ended."""
    faults = answer_faults(prompts, wrong, leaks)
    if not interrupted:
        faults.append("nothing was under way at the prefill engine when it was killed, so this shows nothing: try "
                      "again, or write a larger --prompts")
    if faults:
        raise PartFailed("; ".join(faults))


def kill_with_children(pid: int) -> None:
    """SIGKILL to a process and all below it, at once, so that none can react to another's end."""
    top = psutil.Process(pid)
    for process in (top, *top.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
