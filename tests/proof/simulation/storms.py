# SPDX-License-Identifier: Apache-2.0
"""Runs by seed: the seed also draws how bad the weather is."""
import collections
import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace

import vllm_pd.handover.decode
from vllm_pd.decisions.policy import Decision, OwnPolicy, PolicyConfig, PolicyInput, Reason
from vllm_pd.protocol.messages import Role

from .fleet import Plan
from .kernel import Faults

SPLIT = (Role.DECODE, Role.DECODE, Role.PREFILL, Role.PREFILL)
BOTH = (Role.BOTH, Role.BOTH)
FLEETS = (SPLIT, BOTH, (Role.DECODE, Role.PREFILL), (Role.BOTH, Role.DECODE, Role.PREFILL),
          (Role.DECODE, Role.DECODE, Role.DECODE, Role.PREFILL))


def faults_of(seed: int) -> Faults:
    """One run in five is calm; the others are between a bad day and a very bad one."""
    draw = random.Random(seed)
    if seed % 5 == 0:
        return Faults()
    worst = draw.choice((0.02, 0.08, 0.25))
    return Faults(loss=draw.uniform(0, worst), twice=draw.uniform(0, worst), late=draw.uniform(0, worst),
                  late_s=draw.choice((0.5, 3.0, 15.0)), slow_writes=draw.choice((0.0, 0.3)),
                  write_error=draw.uniform(0, worst), notice_loss=draw.uniform(0, worst),
                  notice_twice=draw.uniform(0, worst), kills=draw.randint(0, 6), stops=draw.randint(0, 6),
                  stop_s=draw.choice((2.0, 10.0, 30.0)), broker_restarts=draw.randint(0, 3),
                  aborts=draw.choice((0.0, 0.1, 0.4)))


def storm(seed: int, **changes) -> Plan:
    """The plan of a run."""
    draw = random.Random(f"plan {seed}")
    values = {"roles": FLEETS[seed % len(FLEETS)], "faults": faults_of(seed), "blocks": draw.choice((12, 24, 48)),
              "requests": 60, "load_s": draw.choice((10.0, 30.0)), "settings": {"push_chunks": seed % 2 == 1},
              **changes}
    return Plan(**values)


def storm_between_machines(seed: int, **changes) -> Plan:
    """The same with the engines on two or three machines, and what a network does to these."""
    draw = random.Random(f"machines {seed}")
    faults = faults_of(seed)
    if seed % 5:
        faults = replace(faults, cuts=draw.randint(0, 6), cut_s=draw.choice((4.0, 15.0, 40.0)),
                         false_deaths=draw.randint(0, 6), drifts=draw.choice((0.0, 0.5, 1.0)),
                         agent_problems=draw.choice((0.0, 0.2)))
    return storm(seed, **{"faults": faults, "machines": draw.choice((2, 2, 3)), **changes})


# Prefilled where the first token comes sooner, and never in steps longer than that while others decode.
AUTO = {"max_local_prefill_tokens": "auto", "itl_target_ms": 200}


@contextlib.contextmanager
def counted_decisions(found: "collections.Counter[tuple[bool, Reason]]") -> Iterator[None]:
    """Count (remote, reason) of all decisions of bindings, those that nobody acts on included."""
    real = vllm_pd.handover.decode.decide

    def decide(request: PolicyInput, config: PolicyConfig, own: OwnPolicy | None = None) -> Decision:
        decision = real(request, config, own)
        found[decision.remote, decision.reason] += 1
        return decision

    vllm_pd.handover.decode.decide = decide
    try:
        yield
    finally:
        vllm_pd.handover.decode.decide = real
