# SPDX-License-Identifier: Apache-2.0
"""Which worker gets a request: a pure function of the request, of what is known of the workers, and of a seeded draw.

The KV policy computes a score for each worker. Its unit is the time to prefill this prompt:
- overlap: the share of the prompt's blocks that the worker holds, times `overlap_weight`;
- minus waiting: the tokens that wait there, over the prompt's tokens, times `waiting_weight`;
- minus remote: the requests that wait there for a remote prefill, times `remote_weight`;
- minus blocks: the share of its KV blocks in use, times `blocks_weight`.
So a short prompt goes where little waits, whatever it hits. A long one goes where its prefix is cached, unless the
queue there costs more than the hit saves. For a worker that does not report its load, each request that this router has
open there costs `open_weight`.

A hit weighs more than the time it saves for this prompt, because a second copy of a prefix takes KV blocks from other
prompts. The default weights gave the most hits in `vllm-pd bench router --hit-rate` without longer waits.
"""
import math
import operator
import random
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Protocol

import msgspec
from xxhash import xxh3_64_intdigest

from vllm_pd.errors import ConfigError
from vllm_pd.settings.options import Option

EQUAL = 1e-9  # scores that differ by less are a tie
MAX_SHOWN = 8  # scores in `Choice.scores`
MAX_HEADER_CHARS = 2048
TYPICAL_TOKENS = 512  # assumed length of a prompt that was not tokenised


class Policy(StrEnum):
    """How a worker is chosen."""
    KV = "kv"  # by overlap and load
    ROUND_ROBIN = "round-robin"
    LEAST_LOAD = "least-load"
    CONSISTENT_HASH = "consistent-hash"


class ChoiceReason(StrEnum):
    """Why a worker was chosen; the label of a counter."""
    ONLY = "only"  # it was the only candidate
    OVERLAP = "overlap"  # it alone holds most of the prompt
    LOAD = "load"  # others hold as much or more of the prompt, but have more load
    TIE = "tie"  # drawn from several with the best score
    DRAWN = "drawn"  # drawn with `temperature` although others had better scores
    TURN = "turn"  # round robin
    HASH = "hash"  # consistent hashing


class RoutingPolicyConfig(msgspec.Struct, frozen=True):
    """The operator's weights, see the module; all 0 or more. `temperature` is in the unit of the score: 0 takes the
    best, and the greater it is the more often a worse one is drawn."""
    policy: Annotated[Policy, Option(
        "kv (prefix overlap minus load), round-robin, least-load or consistent-hash.",
        parse=lambda text: text.replace("_", "-"))] = Policy.KV
    overlap_weight: Annotated[float, Option("Weight of a completely cached prompt; 1 is a prefill of it.")] = 6.0
    waiting_weight: Annotated[float, Option("Weight of the tokens that wait for prefill.")] = 1.0
    remote_weight: Annotated[float, Option("Weight of each remote prefill under way.")] = 0.1
    blocks_weight: Annotated[float, Option("Weight of the used share of the KV cache.")] = 2.0
    open_weight: Annotated[float, Option("Weight of each open request at an engine that reports no load.")] = 0.5
    temperature: Annotated[float, Option("0 takes the best score; the higher, the more often others.")] = 0.0

    def check(self) -> "RoutingPolicyConfig":
        """Returns itself. Raises ConfigError for an invalid value."""
        for key in ("overlap_weight", "waiting_weight", "remote_weight", "blocks_weight", "open_weight", "temperature"):
            value = getattr(self, key)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise ConfigError(key, value, "give a number, 0 or more")
        if self.policy not in set(Policy):
            raise ConfigError("policy", self.policy, f"give one of {', '.join(Policy)}")
        return self


class PlacementRequest(msgspec.Struct, frozen=True):
    """What a policy needs to know of a request. `prompt_tokens` and `prompt_blocks` (full blocks) are 0 where the
    prompt was not tokenised. `key` is for consistent hashing. `turn` counts its like, for round robin."""
    prompt_tokens: int = 0
    prompt_blocks: int = 0
    key: str = ""
    turn: int = 0


class ReportedLoad(Protocol):
    """A worker's load as it reports it (`vllm_pd.events.messages.EngineLoad`)."""
    remote_prefilling: int  # requests
    queued_prefill_tokens: int  # prompt tokens of waiting and running requests that are not computed yet
    used_blocks: int
    total_blocks: int


class Candidate(msgspec.Struct, frozen=True):
    """A worker that may get the request. `load` is its last report, None where there is none or only an old one.
    `sent_tokens` are the prompt tokens sent there since that report which it does not hold. `in_flight` is the number
    of requests that this router has open there. `prompt_blocks` is the number of the prompt's blocks at this worker's
    block size; 0 means as in the request."""
    name: str
    overlap_blocks: int = 0
    in_flight: int = 0
    load: ReportedLoad | None = None
    sent_tokens: int = 0
    prompt_blocks: int = 0


class Score(msgspec.Struct, frozen=True):
    """A worker's score: `total` is `overlap` minus the other terms."""
    name: str
    overlap: float
    waiting: float
    remote: float
    blocks: float
    total: float


class Choice(msgspec.Struct, frozen=True):
    """The chosen worker, and why. `scores` has the best candidates' and the chosen one's, best first; empty with
    policies that don't score."""
    worker: str
    policy: Policy
    reason: ChoiceReason
    overlap_blocks: int
    prompt_blocks: int
    candidates: int
    scores: tuple[Score, ...] = ()

    def header(self) -> str:
        """The explanation for an HTTP header: one line of ASCII, if the workers' names are ASCII."""
        parts = [f"policy={self.policy}", f"reason={self.reason}", f"worker={self.worker}",
                 f"hit={self.overlap_blocks}/{self.prompt_blocks}", f"of={self.candidates}"]
        for score in self.scores:
            if score.name == self.worker:
                parts.append(f"score={score.total:.3f}")
                parts.append(f"overlap={score.overlap:.3f} waiting={-score.waiting:.3f} remote={-score.remote:.3f} "
                             f"blocks={-score.blocks:.3f}")
            else:
                parts.append(f"{score.name}={score.total:.3f}")
        if 0 < len(self.scores) < self.candidates:
            parts.append(f"others={self.candidates - len(self.scores)}")
        text = "; ".join(parts)
        return text if len(text) <= MAX_HEADER_CHARS else text[:MAX_HEADER_CHARS] + "..."


def choose(config: RoutingPolicyConfig, request: PlacementRequest, candidates: Sequence[Candidate],
           rng: random.Random) -> Choice | None:
    """The worker for this request; None without candidates. The order of the candidates does not matter."""
    if not candidates:
        return None
    shown: list[Score] = []
    if config.policy is Policy.ROUND_ROBIN:
        ordered = sorted(candidates, key=_name)
        chosen, reason = ordered[request.turn % len(ordered)], ChoiceReason.TURN
    elif config.policy is Policy.CONSISTENT_HASH:
        chosen, reason = max(candidates, key=lambda c: _affinity(request.key, c.name)), ChoiceReason.HASH
    else:
        overlap_weight = config.overlap_weight if config.policy is Policy.KV else 0.0
        ordered = sorted(candidates, key=_name)
        scores = [score(config, request, candidate, overlap_weight) for candidate in ordered]
        chosen, reason = _best(config.temperature, request, ordered, scores, rng)
        scores.sort(key=lambda s: -s.total)
        shown = scores[:MAX_SHOWN]
        if not any(s.name == chosen.name for s in shown):  # it was drawn
            shown[-1] = next(s for s in scores if s.name == chosen.name)
    if len(candidates) == 1:
        reason = ChoiceReason.ONLY
    return Choice(chosen.name, config.policy, reason, chosen.overlap_blocks,
                  chosen.prompt_blocks or request.prompt_blocks, len(candidates), tuple(shown))


def score(config: RoutingPolicyConfig, request: PlacementRequest, candidate: Candidate, overlap_weight: float) -> Score:
    """The candidate's score, in the unit of the module's docstring."""
    prompt_blocks = candidate.prompt_blocks or request.prompt_blocks
    share = candidate.overlap_blocks / prompt_blocks if prompt_blocks else 0.0
    load = candidate.load
    if load is None:
        waiting, remote, blocks = config.open_weight * candidate.in_flight, 0.0, 0.0
    else:
        prompt_tokens = request.prompt_tokens or TYPICAL_TOKENS
        waiting = config.waiting_weight * (load.queued_prefill_tokens + candidate.sent_tokens) / prompt_tokens
        remote = config.remote_weight * load.remote_prefilling
        blocks = config.blocks_weight * load.used_blocks / max(load.total_blocks, 1)
    overlap = overlap_weight * min(share, 1.0)
    return Score(candidate.name, overlap, waiting, remote, blocks, overlap - waiting - remote - blocks)


def _best(temperature: float, request: PlacementRequest, ordered: Sequence[Candidate], scores: Sequence[Score],
          rng: random.Random) -> tuple[Candidate, ChoiceReason]:
    """The candidate with the best score, or, with a temperature, one drawn by exp(score / temperature). `scores` are in
    the order of `ordered`. The reason is OVERLAP only if it holds more of the prompt than each of the others."""
    top = max(s.total for s in scores)
    if temperature > 0:
        weights = [math.exp((s.total - top) / temperature) for s in scores]
        number = rng.choices(range(len(ordered)), weights)[0]
        if scores[number].total < top - EQUAL:
            return ordered[number], ChoiceReason.DRAWN
    best = [number for number, s in enumerate(scores) if s.total >= top - EQUAL]
    number = best[0] if len(best) == 1 else rng.choice(best)
    chosen = ordered[number]
    if len(best) > 1:
        return chosen, ChoiceReason.TIE
    shares = [c.overlap_blocks / (c.prompt_blocks or request.prompt_blocks or 1) for c in ordered]
    alone = shares.count(max(shares)) == 1
    return chosen, ChoiceReason.OVERLAP if alone and shares[number] == max(shares) else ChoiceReason.LOAD


_name = operator.attrgetter("name")


def _affinity(key: str, name: str) -> int:
    """Rendezvous hashing: the worker with the highest value gets the key, so a key stays on its worker while it is a
    candidate."""
    return xxh3_64_intdigest(f"{len(key)}:{key}:{name}".encode())
