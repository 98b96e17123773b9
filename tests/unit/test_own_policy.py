# SPDX-License-Identifier: Apache-2.0
"""The setting `policy`: a class of the operator's judges what is worth a prefill engine, and harms nobody where it
fails."""
import logging
import sys
import types

import msgspec
import pytest

from vllm_pd.decisions.policy import AskedPlace, Decision, PolicyConfig, PolicyInput, Reason, decide
from vllm_pd.errors import ConfigError
from vllm_pd.handover import own_policy
from vllm_pd.handover.own_policy import load_policy

CONFIG = PolicyConfig(max_local_prefill_tokens=100)
LONG = PolicyInput(prompt_tokens=500, cached_tokens=0, blocks=32, can_go_remote=True, attempts_made=0, time_left_s=9.0,
                   broker_up=True, prefill_peers=1, queue_length=0, parked_blocks=0, total_blocks=1000,
                   parked_requests=0, total_requests=8, whole_blocks=31)
SHORT = msgspec.structs.replace(LONG, prompt_tokens=50)


class Reversed:
    """Sends what is short."""

    def __init__(self, config):
        self.threshold = config.max_local_prefill_tokens
        self.asked = []

    def wants_peer(self, prompt):
        self.asked.append(prompt)
        return prompt.prompt_tokens <= self.threshold


class Fails:
    """Answers the first question."""

    def __init__(self, config):
        self.answers = [True, 1 / 3, None, "yes", ValueError("no idea"), KeyboardInterrupt]

    def wants_peer(self, prompt):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def module(monkeypatch):
    made = types.ModuleType("mine")
    made.Reversed, made.Fails, made.number = Reversed, Fails, 7
    made.Breaks = type("Breaks", (), {"__init__": lambda self, config: 1 / 0})
    made.Bare = type("Bare", (), {"__init__": lambda self, config: None})
    made.Says = type("Says", (), {"__init__": lambda self, config: None, "wants_peer": lambda self, prompt: 1})
    made.NoConfig = type("NoConfig", (), {"wants_peer": lambda self, prompt: True})
    monkeypatch.setitem(sys.modules, "mine", made)
    return made


def test_without_a_name_there_is_none_and_the_built_in_rule_decides():
    assert load_policy(None, CONFIG) is None
    assert decide(LONG, CONFIG) == Decision(True, Reason.LENGTH)
    assert decide(SHORT, CONFIG) == Decision(False, Reason.THRESHOLD)


def test_it_says_what_is_worth_a_peer():
    own = load_policy("mine.Reversed", CONFIG)
    assert decide(LONG, CONFIG, own) == Decision(False, Reason.OWN)
    assert decide(SHORT, CONFIG, own) == Decision(True, Reason.OWN)


@pytest.mark.parametrize("changes, reason", [
    ({"can_go_remote": False}, Reason.FEATURE), ({"attempts_made": 2}, Reason.RETRY),
    ({"broker_up": False}, Reason.BROKER), ({"prefill_peers": 0}, Reason.PEER),
    ({"queue_length": 64}, Reason.QUEUE), ({"parked_blocks": 499}, Reason.CAP)])
def test_what_it_wants_at_a_peer_stays_where_it_can_t_go(changes, reason):
    own = load_policy("mine.Reversed", CONFIG)
    assert decide(msgspec.structs.replace(SHORT, **changes), CONFIG, own) == Decision(False, reason)


@pytest.mark.parametrize("changes, decision", [
    ({"asked": AskedPlace.LOCAL}, Decision(False, Reason.ASKED)),
    ({"asked": AskedPlace.REMOTE}, Decision(True, Reason.ASKED)),
    ({"whole_blocks": 0}, Decision(False, Reason.THRESHOLD))])
def test_it_is_not_asked_where_nothing_is_to_be_judged(changes, decision):
    own = load_policy("mine.Reversed", CONFIG)
    assert decide(msgspec.structs.replace(SHORT, **changes), CONFIG, own) == decision
    assert len(own._own.asked) == 1, "by the trial"


@pytest.mark.parametrize("name, said", [
    ("mine.Nobody", "no attribute"), ("nowhere_at_all.Policy", "No module named"), ("mine.number", "is no class"),
    ("mine.Breaks", "ZeroDivisionError"), ("mine.Bare", "wants_peer"), ("mine.Says", "returned 1, which is no bool"),
    ("mine.NoConfig", "takes no arguments")])
def test_one_that_can_t_be_used_is_refused_with_its_own_error(name, said):
    with pytest.raises(ConfigError, match=said) as refused:
        load_policy(name, CONFIG)
    assert refused.value.key == "policy" and refused.value.value == name and "wants_peer" in refused.value.cure


def test_a_module_that_fails_while_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "broken_policy.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="nowhere_at_all"):
        load_policy("broken_policy.Policy", CONFIG)


def test_where_it_fails_the_built_in_rule_decides_and_the_log_says_so_now_and_then(caplog, monkeypatch):
    logging.getLogger("vllm.pd").propagate = True
    own, now = load_policy("mine.Fails", CONFIG), 0.0
    monkeypatch.setattr(own_policy.time, "monotonic", lambda: now)
    for _ in range(4):  # a number, None, a string, an exception
        assert decide(LONG, CONFIG, own).remote
    assert len(caplog.records) == 1 and "mine.Fails" in caplog.text and "no bool" in caplog.text
    assert not isinstance(own._own.answers[0], bool)
    now = 61.0
    own._own.answers = [OSError("gone")]
    assert not decide(SHORT, CONFIG, own).remote and "OSError" in caplog.text and len(caplog.records) == 2


def test_one_that_takes_long_is_named(caplog, monkeypatch):
    logging.getLogger("vllm.pd").propagate = True
    own = load_policy("mine.Reversed", CONFIG)
    times = iter((0.0, 0.5))
    monkeypatch.setattr(own_policy.time, "monotonic", lambda: next(times))
    assert decide(SHORT, CONFIG, own).remote
    assert "took 500 ms" in caplog.text
