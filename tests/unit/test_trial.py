# SPDX-License-Identifier: Apache-2.0
"""B119: what `vllm-pd doctor --try` makes of the answers that it gets."""
import json
import random

import msgspec
import pytest

from vllm_pd.decisions.policy import Reason
from vllm_pd.errors import ConfigError
from vllm_pd.ops import trial
from vllm_pd.ops.options import PROMPT_TOKENS, TrialOptions
from vllm_pd.ops.trial import ANSWER_TOKENS, Answer, PromptReport, ServedModel, StageTimes
from vllm_pd.protocol.messages import PromptRecord, Timings

TIMES = StageTimes(0.002, 0.001, 1.5, 0.01, 4_000_000, True, 1_000_000)
REMOTE = PromptReport(1024, "remote", "asked", 1, 0, "p" * 32, "tcp://127.0.0.1:9", "done", "", TIMES, 1.52, 0.03)
REASONS_TO_STAY = set(Reason) - {Reason.ASKED, Reason.HELD, Reason.LENGTH, Reason.ITL, Reason.TTFT, Reason.OWN}


def test_reports_are_what_engines_send():
    """The route shows each field of a record; these are read."""
    record = PromptRecord("r", decision="remote", reason="asked", timings=Timings(1.0, bytes=5))
    sent = {**msgspec.structs.asdict(record), "more": 1}
    sent["timings"] = msgspec.structs.asdict(sent["timings"])
    read = msgspec.json.decode(msgspec.json.encode(sent), type=PromptReport)
    assert read.timings.queue_s == 1.0 and read.timings.bytes == 5 and not read.timings.measured
    assert set(PromptReport.__struct_fields__) < set(PromptRecord.__struct_fields__)
    assert StageTimes.__struct_fields__ == Timings.__struct_fields__


@pytest.mark.parametrize("models, wanted, chosen", [
    ([ServedModel("a")], None, "a"), ([ServedModel("a"), ServedModel("b", parent="a")], None, "a"),
    ([ServedModel("a", root="/m"), ServedModel("alias", root="/m")], None, "a"),
    ([ServedModel("a", root="/m"), ServedModel("b", root="/n")], "b", "b")])
def test_the_model_that_is_asked(models, wanted, chosen):
    assert trial.choose_model(models, wanted).id == chosen


@pytest.mark.parametrize("models, wanted", [
    ([], None), ([ServedModel("a", root="/m"), ServedModel("b", root="/n")], None), ([ServedModel("a")], "b")])
def test_a_model_that_can_not_be_chosen_is_refused_with_those_that_there_are(models, wanted):
    with pytest.raises(ConfigError, match="--model=") as refused:
        trial.choose_model(models, wanted)
    assert all(model.id in refused.value.cure for model in models)


@pytest.mark.parametrize("wanted, most, tokens", [
    (None, None, PROMPT_TOKENS), (None, 100_000, PROMPT_TOKENS), (None, 300, 300 - ANSWER_TOKENS), (7, 300, 7),
    (300 - ANSWER_TOKENS, 300, 300 - ANSWER_TOKENS)])
def test_the_length_of_the_prompt(wanted, most, tokens):
    assert trial.prompt_length(wanted, ServedModel("m", max_model_len=most)) == tokens


@pytest.mark.parametrize("wanted, most", [(300, 300), (301 - ANSWER_TOKENS, 300), (None, ANSWER_TOKENS), (1, 3)])
def test_a_prompt_that_is_too_long_is_refused(wanted, most):
    with pytest.raises(ConfigError, match=f"max_model_len.*write {most - ANSWER_TOKENS} or less"):
        trial.prompt_length(wanted, ServedModel("m", max_model_len=most))


def test_no_two_prompts_begin_alike():
    assert trial.draw_text(random.Random(1), 50).split()[:1] != trial.draw_text(random.Random(2), 50).split()[:1]


@pytest.mark.parametrize("options, key", [
    (TrialOptions(prompt_tokens=5), "--prompt-tokens"), (TrialOptions(model="m"), "--model"),
    (TrialOptions(api_key="k"), "--api-key"), (TrialOptions(worker_api_key="k"), "--worker-api-key"),
    (TrialOptions("http://h:1", prompt_tokens=0), "--prompt-tokens"),
    (TrialOptions("http://h:1", answer_timeout_s=0.0), "--answer-timeout-s"),
    (TrialOptions("http://h:1", answer_timeout_s=float("nan")), "--answer-timeout-s")])
def test_options_that_can_not_be_used(options, key):
    with pytest.raises(ConfigError, match=f"^{key}="):
        options.checked()


def completion(*tokens: int, top: list | None = None) -> bytes:
    return json.dumps({"choices": [{"text": "x", "logprobs": {
        "tokens": [f"token_id:{token}" for token in tokens], "token_logprobs": [-0.1] * len(tokens),
        "top_logprobs": top or [{f"token_id:{token}": -0.1} for token in tokens]}}]}).encode()


def test_an_answer_is_read():
    answer = trial.read_answer(completion(5, 7, top=[{"token_id:5": -0.1, "token_id:9": -2.0}, None]), 1.5)
    assert answer == Answer((5, 7), ({5: -0.1, 9: -2.0}, {}), 1.5)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"choices": []}', b'{"choices": [{"logprobs": null}]}', b"\xff",
                                  completion(), completion(5).replace(b"token_id:5", b"word")])
def test_what_is_no_answer_is_refused(body):
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        trial.read_answer(body, 1.0)


def lines(findings) -> str:
    return "\n".join(line for finding in findings for line in finding.lines)


def test_a_prompt_that_went_remote():
    found = trial.judge_remote(REMOTE, "", 1.9)
    assert all(one.ok for one in found) and [one.check for one in found] == ["remote", "stages", "kv"]
    said = lines(found)
    for part in ("p" * 12 + " at tcp://127.0.0.1:9", "1024 tokens", "queue 2.0 ms", "claim 1.0 ms", "prefill 1.50 s",
                 "transfer after it 10.0 ms", "parked in all 1.52 s", "first step 30.0 ms", "took 1.90 s", "4 MB",
                 "the last 1 MB", "at 100 MB/s"):
        assert part in said, (part, said)
    assert "attempt" not in said and "beside" not in said


def test_a_prompt_that_went_remote_at_the_second_attempt_in_one_write():
    report = msgspec.structs.replace(REMOTE, attempts=2, detail="lease: silent", cached_tokens=32, address="",
                                     timings=msgspec.structs.replace(TIMES, last_bytes=0))
    said = lines(trial.judge_remote(report, "", 1.9))
    assert "at attempt 2" in said and "beside 32" in said and "4 MB at 400 MB/s" in said and " at tcp" not in said


def test_a_hold_has_no_stages():
    report = PromptReport(1024, "remote", "held", 1, 0, "p", "tcp://p", "done", parked_s=0.5, first_step_s=0.1)
    assert report.is_complete and [one.check for one in trial.judge_remote(report, "", 1.0)] == ["remote", "stages"]


@pytest.mark.parametrize("reason", sorted(REASONS_TO_STAY))
def test_a_prompt_that_stayed_has_its_reason_and_a_cure_of_its_own(reason):
    report = PromptReport(1024, "local", reason)
    assert report.is_complete and not report.went_remote
    found, = trial.judge_remote(report, "peer: no prefill engine is there", 1.0)
    assert not found.ok and f"reason {reason}; the engine is degraded, peer: no prefill engine is there" in found.fact
    assert found.cure == trial._STAY_CURES[reason]


def test_an_attempt_that_failed_is_named():
    report = PromptReport(1024, "local", "retry", 1, peer="p", outcome="expired", detail="lease: silent for 30 s")
    attempt, stayed = trial.judge_remote(report, "", 1.0)
    assert not attempt.ok and "prefill engine p had it" in attempt.fact and "silent for 30 s" in attempt.fact
    assert not stayed.ok and "reason retry" in stayed.fact


def test_a_request_that_was_preempted_has_not_stayed_for_another_reason():
    found, = trial.judge_remote(msgspec.structs.replace(REMOTE, decision="local", reason="retry"), "", 1.0)
    assert not found.ok and "preempted" in found.fact


@pytest.mark.parametrize("report, complete", [
    (REMOTE, True), (msgspec.structs.replace(REMOTE, first_step_s=None), False),
    (msgspec.structs.replace(REMOTE, timings=StageTimes()), False), (PromptReport(5, "remote", "asked"), True)])
def test_when_all_is_known(report, complete):
    assert report.is_complete is complete


def answer(*tokens: int, top: tuple = ()) -> Answer:
    return Answer(tokens, top, 2.0)


def test_equal_tokens():
    found = trial.judge_tokens(answer(1, 2, 3), answer(1, 2, 3))
    assert found.ok and "all 3" in found.fact


@pytest.mark.parametrize("top, cure", [
    (({}, {2: -0.70, 9: -0.71}), "rounding"), (({}, {2: -0.1, 9: -3.0}), "no rounding"),
    (({}, {2: -0.1, 4: -3.0}), "no rounding"), ((), "no rounding")])
def test_other_tokens_are_a_fault_and_a_tie_is_said_to_be_one(top, cure):
    found = trial.judge_tokens(answer(1, 9, 3), answer(1, 2, 3, top=top))
    assert not found.ok and "token 2 is 9 after the remote prefill, and 2 from" in found.fact
    assert (found.cure.startswith("this is no rounding")) is (cure == "no rounding")


def test_an_answer_that_ends_early_is_no_equal_one():
    assert not trial.judge_tokens(answer(1, 2), answer(1, 2, 3)).ok
