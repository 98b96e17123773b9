# SPDX-License-Identifier: Apache-2.0
"""The parts of scripts/lab/gpu_check.py that have engines, beside servers that stand in for them."""
import contextlib
from types import SimpleNamespace

import pytest
from _gpu_check import engines
from _gpu_check.child import PartRun
from _gpu_check.engines import EngineVariant
from _gpu_check.harness import ANSWERS, CheckSettings
from _gpu_check.results import PartFailed

from tests.fakes.http_engine import FakeEngine
from vllm_pd.bench.serve.arms import ArmKind
from vllm_pd.broker import members
from vllm_pd.protocol.messages import Role

RIGHT = (11, 12, 13)
VARIANT = EngineVariant({"GPU_CHECK_TEST": "1"}, ("--flag", ), needs={"layout": "heads"}, lines=("graphs", ))


class FakeFleets:
    """In place of `engines.started`. `pd`: how the decode engine differs from the stock one."""

    def __init__(self, **pd) -> None:
        self.pd = pd
        self.asked: list[tuple[ArmKind, tuple[str, ...]]] = []

    @contextlib.contextmanager
    def started(self, run, arm, arguments):
        self.asked.append((arm.kind, tuple(arguments)))
        with contextlib.ExitStack() as stack:
            count = 1 if arm.kind is ArmKind.SINGLE else 2
            about = {"token_ids": RIGHT, "first_s": 0.0, "gap_s": 0.0, "late_s": 0.01, "max_local": 40}
            found = [stack.enter_context(FakeEngine(**about | (self.pd if arm.kind is ArmKind.PD else {})))
                     for _ in range(count)]
            lines = [("decode 0", "with graphs"), ("prefill 0", "with graphs")]
            yield [one.url for one in found], "tcp://127.0.0.1:9", lines


@pytest.fixture
def run(tmp_path, monkeypatch) -> PartRun:
    monkeypatch.setenv("GPU_CHECK_TEST", "")
    print_ = SimpleNamespace(layout="kv-heads-first", engine="vllm", dtype="half", kv_dtype="half", block_size=16)
    listed = members.MemberList((SimpleNamespace(role=Role.DECODE, fingerprint=print_),
                                 SimpleNamespace(role=Role.PREFILL, fingerprint=print_)), 0)
    monkeypatch.setattr(members, "list_members", lambda broker: listed)
    return PartRun(CheckSettings("cpu", str(tmp_path)), tmp_path / "part.json", 60.0)


def fleets(monkeypatch, **pd) -> FakeFleets:
    found = FakeFleets(**pd)
    monkeypatch.setattr(engines, "started", found.started)
    return found


def test_b1_a_pair_that_says_what_the_stock_engine_says_passes(run, monkeypatch):
    found = fleets(monkeypatch)
    engines.check_pair(run, VARIANT, 6)
    assert (run.figures["prompts"], run.figures["wrong"], run.figures["remote"]) == (6, [], 6)
    assert run.figures["engines"]["prefill"]["layout"] == "kv-heads-first"
    assert found.asked == [(ArmKind.SINGLE, ("--enforce-eager", )), (ArmKind.PD, ("--flag", ))]
    engines.check_pair(run, VARIANT, 4)
    assert len(found.asked) == 3, "a stock engine is started once"


def test_b1_another_token_is_found(run, monkeypatch):
    fleets(monkeypatch, token_ids=(11, 12, 14))
    with pytest.raises(PartFailed, match="3 of 3 answers differ"):
        engines.check_pair(run, VARIANT, 3)
    assert run.figures["wrong"] == [0, 1, 2]


def test_b1_prompts_that_stay_local_are_found(run, monkeypatch):
    """The first that does go remote is the warm-up's, of 200 tokens."""
    fleets(monkeypatch, max_local=199)
    monkeypatch.setattr(engines, "PROMPT_TOKENS", (50, 90))
    count = engines.await_count
    monkeypatch.setattr(engines, "await_count", lambda one, wanted, timeout_s=1.0: count(one, wanted, 1.0))
    with pytest.raises(PartFailed, match="0 of 3 prompts were prefilled remotely"):
        engines.check_pair(run, VARIANT, 3)


def test_engines_that_do_not_find_each_other_are_found(run, monkeypatch):
    fleets(monkeypatch, max_local=10_000)
    monkeypatch.setattr(engines, "PAIR_S", 0.1)
    with pytest.raises(PartFailed, match="no prompt was prefilled remotely within 0.1 s; registered"):
        engines.check_pair(run, VARIANT, 3)


def test_prompts_whose_answer_a_rounding_could_change_do_not_count(run, monkeypatch):
    fleets(monkeypatch)
    monkeypatch.setitem(engines.MARGINS, "cpu", 4.8)
    assert len(engines.stock_answers(run, 3)) == 3
    (engines.Path(run.settings.out) / ANSWERS).unlink()
    monkeypatch.setitem(engines.MARGINS, "cpu", 5.0)
    with pytest.raises(PartFailed, match="only 0 prompts"):
        engines.stock_answers(run, 3)
