# SPDX-License-Identifier: Apache-2.0
"""B115 on V1's real schedulers: prompts with LoRA adapters go remote, and nobody takes one adapter for another. A slot
of the simulated memory depends on the files of the adapter that it was computed with. Real engines:
tests/v1_engines/test_real_adapters.py.
"""
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from tests.adapters import write_stub
from tests.v1.simulated import BLOCK_SIZE, Engine, ScopedTokens, WrongRead, seed_of
from tests.v1.test_hazards import PARKED, end, prompt
from tests.v1.test_holds import ASKS, HOLD, finish
from tests.v1.test_scopes import sampling
from vllm_pd.protocol.hashes import token_digest
from vllm_pd.protocol.holds import hold_params
from vllm_pd.protocol.scope import NO_SCOPE, PromptScope, adapter_scope
from vllm_pd.v1 import adapters
from vllm_pd.v1.adapters import AdapterBook


@pytest.fixture
def engine(model_folder, in_flight, monkeypatch):
    monkeypatch.setattr(adapters, "LOOK_S", 0.0)
    return Engine(model_folder, in_flight, max_loras=2)


@pytest.fixture
def loras(tmp_path):
    return [LoRARequest(name, number, str(write_stub(tmp_path / name, name)))
            for number, name in enumerate(("one", "two", "three"), 1)]


def load(engine, *loras) -> list[PromptScope]:
    """As the front end does. Returns the scopes of these."""
    for one in loras:
        engine.binding.adapters.load(one, lambda request: True)
    return [PromptScope("", engine.binding.adapters.digest(one)) for one in loras]


def compute(engine, tokens, number, scope) -> int:
    """A job of a peer, whose blocks are checked. Returns how many tokens were computed."""
    before = engine.tokens_computed
    attempt = engine.job(tokens, number=number, scope=scope)
    engine.run()
    engine.check_sent(attempt, ScopedTokens(tokens, seed_of(scope.salt, scope.adapter)))
    engine.transfer.end(str(attempt))
    return engine.tokens_computed - before


def test_b115_a_job_carries_the_adapter_of_its_request(engine, loras):
    scopes = [NO_SCOPE, *(PromptScope("", engine.binding.adapters.digest(one)) for one in loras[:2])]
    one = prompt(100)
    for name, lora in zip("abc", (None, *loras[:2]), strict=True):
        engine.add(name, one, lora_request=lora)
    engine.run()
    assert [engine.protocol.scopes[engine.attempt(name)] for name in "abc"] == scopes, "none waits for another"
    for name in "abc":
        engine.prefilled(name)
    end(engine)


def test_b115_jobs_of_two_adapters_share_no_block_on_p(engine, loras):
    """Nor with the base model, or with a client of P who has the adapter by its name; those of one adapter do."""
    one, scopes = prompt(100), [NO_SCOPE, *load(engine, *loras)]
    assert engine.protocol.listed_scopes == ("salt", *(adapter_scope(scope.adapter) for scope in scopes[1:]))
    engine.protocol.state.hands_over = False
    engine.add("client", one, lora_request=loras[0])
    engine.run()
    rest = 100 - 6 * BLOCK_SIZE
    assert [compute(engine, one, number, scope) for number, scope in enumerate(scopes * 2)] == [100] * 4 + [rest] * 4
    finish(engine)


def test_b115_p_refuses_an_adapter_that_it_does_not_have(engine, loras):
    load(engine, loras[0])
    attempt = engine.job(prompt(100), scope=PromptScope("", AdapterBook(engine.config.lora_config).digest(loras[1])))
    engine.run()
    assert engine.protocol.calls == [("failed", attempt)] and not engine.tokens_computed
    finish(engine)


def test_b115_p_refuses_a_job_while_its_clients_use_all_adapters_that_fit(engine, loras):
    *_, scope = load(engine, *loras)
    engine.protocol.state.hands_over = False
    for name, lora in zip("ab", loras, strict=False):
        engine.add(name, prompt(20), 60, lora_request=lora)
    for _ in range(6):
        engine.turn()
    attempt = engine.job(prompt(100), scope=scope)
    engine.turn()
    assert engine.protocol.calls == [("failed", attempt)]
    engine.run()
    assert compute(engine, prompt(100), 2, scope) == 100
    finish(engine)


def test_b115_other_files_of_the_same_name_have_another_identity_on_p(engine, loras):
    one, (before, ) = prompt(100), load(engine, loras[0])
    assert compute(engine, one, 0, before) == 100
    write_stub(Path(loras[0].lora_path), "other files, loaded in place")
    attempt = engine.job(one, number=1, scope=before)
    engine.run()
    assert engine.protocol.calls[-1] == ("failed", attempt)
    load(engine, loras[0])
    after = PromptScope("", AdapterBook(engine.config.lora_config).digest(loras[0]))
    assert after != before and engine.protocol.listed_scopes == ("salt", adapter_scope(after.adapter))
    assert compute(engine, one, 2, after) == 100
    finish(engine)


def test_b115_d_keeps_prompts_of_an_adapter_whose_files_have_changed(engine, loras):
    assert engine.binding.adapters.digest(loras[0])
    write_stub(Path(loras[0].lora_path), "other files")
    engine.add("a", prompt(100), lora_request=loras[0])
    end(engine)
    assert not engine.protocol.jobs and ["decision", "local", "feature"] in engine.counted()


def test_b115_a_hold_has_the_adapter_of_its_prompt(model_folder, in_flight, loras):
    tokens = prompt(5 * BLOCK_SIZE)
    holder = Engine(model_folder, in_flight, role="kv_producer", max_loras=2)
    digest = token_digest(tokens, PromptScope("", holder.binding.adapters.digest(loras[0])))
    holder.add("a", tokens, params=sampling(ASKS), lora_request=loras[0])
    holder.run()
    assert [one for one, _ in holder.protocol.held.values()] == [digest] != [token_digest(tokens)]
    reader = Engine(model_folder, in_flight, role="kv_consumer", max_loras=2)
    reader.add("a", tokens, params=sampling(hold_params(HOLD)), lora_request=loras[0])
    reader.run()
    assert reader.status("a") is PARKED and list(reader.protocol.claimed.values()) == [(HOLD, digest)]


def test_b115_an_adapter_by_its_name_alone_is_found(engine, loras, monkeypatch):
    """Planted: P names its requests as clients do, so the files of before are hit."""
    request = AdapterBook.request
    monkeypatch.setattr(AdapterBook, "request", lambda book, digest, make: request(
        book, digest, lambda **fields: make(**{**fields, "lora_name": "one"})))
    one, (before, ) = prompt(100), load(engine, loras[0])
    compute(engine, one, 0, before)
    write_stub(Path(loras[0].lora_path), "other files")
    load(engine, loras[0])
    with pytest.raises((WrongRead, AssertionError)):
        compute(engine, one, 1, PromptScope("", AdapterBook(engine.config.lora_config).digest(loras[0])))


def test_b115_a_job_that_ignores_its_adapter_is_found(engine, loras, monkeypatch):
    """Planted: P computes the base model."""
    (scope,) = load(engine, loras[0])
    monkeypatch.setattr(AdapterBook, "request", lambda book, digest, make: None)
    with pytest.raises(WrongRead):
        compute(engine, prompt(100), 0, scope)
