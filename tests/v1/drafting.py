# SPDX-License-Identifier: Apache-2.0
"""V1's real schedulers with speculative decoding, over the memory of tests/v1/simulated.py.

A drafter's guesses are right up to a number of tokens that is drawn. All of them are computed, so a block holds wrong
tokens behind those that were accepted. A drafter with KV ("eagle") has a second slot for each token, behind those of
the block's tokens: what it holds depends on the next token, too, as that of an EAGLE head does. A drafter that reads
anything else there would guess worse, without a sign; here it is an error.

One such error is stock V1's own, and is counted only: of two blocks with equal tokens V1 keeps one, and the entry of
its last token may be that of the other's next token.
"""
import collections
import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from tests.v1.simulated import VOCAB, Engine, contents, digest
from vllm_pd.protocol.messages import Attempt
from vllm_pd.transfer.requests import Read, Write

TOKENS = 3  # that are drafted at a time
NOT_YET = -1  # V1's own placeholder: of a draft that the workers know, or of none
WRONG = VOCAB - 1
ENTRIES = 1024  # in a block: the drafter's come after those of any group
GARBAGE = -2


class WrongDraft(AssertionError):
    """A drafter would read, or a peer is sent, what is not the drafter's KV of these tokens."""


def with_drafter(config: VllmConfig, folder: Path, method: str) -> VllmConfig:
    """This configuration, with a drafter. `folder`: a model's, whose configuration an EAGLE head takes, too."""
    more = {"model": str(folder)} if method == "eagle" else {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    config.speculative_config = SpeculativeConfig(
        method=method, num_speculative_tokens=TOKENS, target_model_config=config.model_config,
        target_parallel_config=config.parallel_config, **more)
    return config


def count_together(monkeypatch: pytest.MonkeyPatch, engines: type["DraftingEngine"]) -> collections.Counter[str]:
    """The counts of all engines of this class that are made from now on."""
    found: collections.Counter[str] = collections.Counter()
    init = engines.__init__

    @functools.wraps(init)
    def counting(engine, *arguments, **more):
        init(engine, *arguments, **more)
        engine.counts = found

    monkeypatch.setattr(engines, "__init__", counting)
    return found


class DraftingEngine(Engine):
    """An engine with a drafter, by its configuration."""

    def __init__(self, folder: Path, in_flight: int = 1, **more: Any) -> None:
        super().__init__(folder, in_flight, **more)
        self.keeps_kv = self.config.speculative_config.method == "eagle"
        self.counts: collections.Counter[str] = collections.Counter()
        self._random = random.Random(7)
        self._computed: dict[str, int] = {}  # tokens of each request, as the workers know, by its id
        self._guessed: dict[str, list[int]] = {}  # after the last step of each request
        self._allowed: dict[str, list[int] | None] = {}  # what it may sample

    # Peers.

    def write(self, attempt: Attempt, tokens: int | None = None) -> None:
        super().write(attempt, tokens)
        token_ids, block_ids, cached = self.protocol.jobs[attempt]
        last = len(token_ids) if tokens is None else tokens
        next_token = self.protocol.next_tokens.get(attempt)  # of a hold that is claimed there is none
        known = [*token_ids] if next_token is None else [*token_ids, next_token]
        found = contents(token_ids)
        for at, block in self._granted(token_ids, block_ids, cached):
            if at < last:  # with its last token P may have sampled another than we
                self._put_in(block, at, digest(found[at], known[at + 1]) if at + 1 < len(known) else GARBAGE)

    def _granted(self, token_ids: list[int], block_ids: list[int], cached: int) -> Iterator[tuple[int, int]]:
        """(position, block) of each entry of the drafter that a peer writes."""
        for at in range(cached * self.block_size, len(token_ids)):
            yield at, block_ids[at // self.block_size]

    def fill(self, prompt: list[int], ok: bool = True, read: Read | None = None) -> Read:
        read = super().fill(prompt, ok, read)
        found, first = contents(prompt), read.remote_block_ids[0] - 100
        for at in range(len(read.local_block_ids) * self.block_size):
            place = first * self.block_size + at
            self._put(read.local_block_ids, at, digest(found[place], prompt[place + 1])
                      if ok and place + 1 < len(prompt) else GARBAGE)
        return read

    def check_sent_write(self, write: Write, prompt: list[int]) -> None:
        super().check_sent_write(write, prompt)
        first = (write.remote_block_ids[0] - 100) * self.block_size
        end = min(len(prompt) - 1, first + len(write.local_block_ids) * self.block_size)
        self._check_drafts("sent", write.local_block_ids, contents(prompt), prompt, first, end, first)

    # Steps.

    def capture(self, output) -> list[tuple]:
        """What the model runner gets: of a request that goes on, it knows itself how far that is."""
        for name in output.num_scheduled_tokens:
            self._allowed[name] = self.scheduler.requests[name].sampling_params.allowed_token_ids
        fresh = {*(one.req_id for one in output.scheduled_new_reqs), *output.scheduled_cached_reqs.resumed_req_ids}
        return [(name, start if name in fresh else None, count, block_ids, known, is_chunk,
                 list(output.scheduled_spec_decode_tokens.get(name, ())))
                for name, start, count, block_ids, known, is_chunk in super().capture(output)]

    def execute(self, work: list[tuple]) -> ModelRunnerOutput:
        sampled = [self._compute_drafted(*one) for one in work]
        ids = [one[0] for one in work]
        return ModelRunnerOutput(req_ids=ids, req_id_to_index={name: index for index, name in enumerate(ids)},
                                 sampled_token_ids=sampled)

    def process(self) -> None:
        computed = self.begun_steps[0][0].num_scheduled_tokens
        super().process()
        if not self.config.scheduler_config.async_scheduling:  # then no step is in flight while V1 preempts
            running = [one.request_id for one in self.scheduler.running if one.request_id in computed]
            self.scheduler.update_draft_token_ids(DraftTokenIds(running, [self._guessed[name] for name in running]))

    def _compute_drafted(self, name: str, start: int | None, count: int, block_ids: list[int], known: list[int],
                         is_chunk: bool, drafts: list[int]) -> list[int]:
        if start is None:
            start = self._computed[name]
            guessed = self._guessed[name] + [WRONG] * TOKENS
            drafts = [guessed[at] if one == NOT_YET else one for at, one in enumerate(drafts)]
        plain = count - len(drafts)
        before = known[:start + plain]
        super()._compute(name, start, count, block_ids, before + drafts, is_chunk=True)
        found = contents(before + drafts)
        if self.keeps_kv:
            block_ids = self._drafters_table(block_ids)
            self._check_drafts("read", block_ids, found, before, self._first_read(start), min(start, len(before) - 1))
        sampled = [] if is_chunk else self._accept(found[start + plain - 1:], drafts)
        if sampled and self._allowed[name]:
            sampled = [self._allowed[name][0]]
        end = self._computed[name] = start + plain + max(0, len(sampled) - 1)
        if len(known) < end + bool(sampled):
            known[start + plain:] = sampled
        if self.keeps_kv:
            for at in range(start, end):
                self._put(block_ids, at, digest(found[at], known[at + 1]))
            for at in range(end, min(end + TOKENS, len(block_ids) * self.block_size)):
                self._put(block_ids, at, GARBAGE)
        self._guessed[name] = [] if is_chunk else self._guess(contents(known)[-1])
        return sampled

    def _accept(self, found: list[int], drafts: list[int]) -> list[int]:
        """What is sampled after each of these contents, as long as the draft before it was right."""
        right = [content % VOCAB for content in found]
        accepted = next((at for at, draft in enumerate(drafts) if draft != right[at]), len(drafts))
        self.counts["drafts"] += len(drafts)
        self.counts["accepted"] += accepted
        return right[:accepted + 1]

    def _guess(self, past: int) -> list[int]:
        """Drafts after this content, of which the first ones are right."""
        guessed: list[int] = []
        for _ in range(self._random.randrange(TOKENS + 1)):
            guessed.append(past % VOCAB)
            past = digest(past, guessed[-1])
        return guessed + [WRONG] * (TOKENS - len(guessed))

    # The drafter's memory.

    def _slot(self, block_ids: list[int], at: int) -> tuple[int, int]:
        return block_ids[at // self.block_size], ENTRIES + at % self.block_size

    def _drafters_table(self, tables: list) -> list[int]:
        """The one whose blocks the drafter's layers use."""
        return tables

    def _first_read(self, query: int) -> int:
        """The first token whose KV the drafter reads at this position."""
        return 0

    def _put(self, block_ids: list[int], at: int, entry: int) -> None:
        self._put_in(block_ids[at // self.block_size], at, entry)

    def _put_in(self, block: int, at: int, entry: int) -> None:
        self.slots[self._slot([block], at % self.block_size)] = entry

    def _check_drafts(self, what: str, block_ids: list[int], found: list[int], tokens: list[int], first: int,
                      end: int, start: int = 0) -> None:
        """The drafter's KV of the tokens from `first` up to `end` is in these blocks, which begin with `start`."""
        for place in range(first, end if self.keeps_kv else first):
            self.counts[what] += 1
            slot = self._slot(block_ids, place - start)
            entry = self.slots.get(slot)
            if entry == digest(found[place], tokens[place + 1]):
                continue
            is_last = place % self.block_size == self.block_size - 1
            if not (is_last and any(entry == digest(found[place], token) for token in range(VOCAB))):
                raise WrongDraft(f"the drafter's entry of position {place} is {what} from {slot}, which holds "
                                 "something else")
            self.counts[f"{what} of an equal block"] += 1
