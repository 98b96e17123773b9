# SPDX-License-Identifier: Apache-2.0
"""B119: an engine says of one request where its prompt was prefilled."""
import msgspec
import pytest

from vllm_pd.peer.control import MessageSource
from vllm_pd.peer.prompt_records import MAX_DETAIL_CHARS, MAX_PROMPTS, PromptRecords
from vllm_pd.peer.protocol import PeerProtocol
from vllm_pd.protocol import messages as m
from vllm_pd.settings.engine import PDConfig

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
P = m.Member("p", m.Role.PREFILL, "tcp://127.0.0.1:2", FINGERPRINT)


def decided(records: PromptRecords, request_id: str, again: bool = False, **fields: str) -> None:
    records.decided(request_id, again, **{"asked": "remote", "decision": "remote", "reason": "asked", **fields})


@pytest.mark.parametrize("name, found", [
    ("abc", True), ("cmpl-abc-0-12345678", True), ("cmpl-abc-0", False), ("abc-0", True), ("", False), ("cmpl", False),
    ("0", False), ("12345678", False), ("ab", False), ("abcd", False)])
def test_a_request_is_found_by_what_its_client_has_named_it(name, found):
    records = PromptRecords()
    decided(records, "cmpl-abc-0-12345678")
    assert (records.find(name).decision == "remote") is found
    assert records.find(name).request_id == ("cmpl-abc-0-12345678" if found else name)


def test_the_newest_request_of_a_name_is_found():
    records = PromptRecords()
    for number in range(3):
        decided(records, f"cmpl-abc-{number}")
    decided(records, "cmpl-abc-1", decision="local")
    assert records.find("abc").request_id == "cmpl-abc-1"


def test_what_a_request_went_through_is_kept_until_its_id_is_used_again():
    records = PromptRecords()
    decided(records, "r")
    records.note("r", attempts=1, peer="p", outcome="expired", detail="x" * 5000)
    decided(records, "r", True, decision="local", reason="retry")
    kept = records.find("r")
    assert (kept.decision, kept.attempts, kept.peer, kept.outcome) == ("local", 1, "p", "expired")
    assert len(kept.detail) == MAX_DETAIL_CHARS
    decided(records, "r")
    assert records.find("r") == m.PromptRecord("r", asked="remote", decision="remote", reason="asked")


def test_only_so_many_are_kept_and_nothing_is_noted_of_others():
    records = PromptRecords()
    for number in range(MAX_PROMPTS + 5):
        decided(records, f"r{number}")
    records.note("r4", peer="p")
    records.note("never", peer="p")
    assert [records.find(name).decision for name in ("r4", "never", "r5")] == ["", "", "remote"]
    decided(records, "r5")  # used again: it is the newest then
    decided(records, "another")
    assert records.find("r5").decision and not records.find("r6").decision


def test_the_newest_ones_come_with_their_ages():
    now = 1.0
    records = PromptRecords(lambda: now)
    decided(records, "a")
    now = 2.0
    decided(records, "b")
    now = 3.0
    decided(records, "c")
    now = 4.0
    decided(records, "a", True)
    records.note("b", outcome="done")  # no decision
    now = 10.0
    assert [(one.request_id, one.age_s, one.outcome) for one in records.newest(2)] == [("c", 7.0, ""), ("a", 6.0, "")]
    assert [one.request_id for one in records.newest(10**9)] == ["b", "c", "a"]
    now = 3.0  # a clock that ran backwards would make a record that no peer can read
    assert records.newest(1)[0].age_s == 0.0
    for number in range(2 * MAX_PROMPTS):
        decided(records, f"r{number}")
    assert len(records.newest(10**9)) == MAX_PROMPTS == len(records._decided_at)


@pytest.mark.parametrize("request_id", ["r" * 5000, ""])
def test_every_record_survives_the_wire(request_id):
    """Names and faults may be of any length; a status that can't be decoded would be none."""
    records = PromptRecords()
    decided(records, request_id)
    records.note(request_id, detail="y" * 9000, timings=m.Timings(1.0, measured=True), parked_s=1.0)
    kept = next(iter(records._records.values()))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=m.PromptRecord) == kept and kept.parked_s == 1.0


def test_a_status_names_the_peer_of_a_request_and_where_it_is():
    us = m.Member("us", m.Role.DECODE, "tcp://127.0.0.1:1", FINGERPRINT)
    protocol = PeerProtocol(PDConfig.parse("kv_consumer", {"broker": "tcp://127.0.0.1:9"}), us, b"", lambda: 0.0)
    protocol.decode.prompt_decided("cmpl-abc-0", False, asked="", decision="remote", reason="length")
    protocol.decode.note_prompt("cmpl-abc-0", peer="p")
    assert protocol.operators.status(0).prompt is None
    assert protocol.operators.status(0, asked=m.Status(prompt="abc")).prompt.address == ""
    protocol.control.receive(MessageSource.BROKER, "b", m.Peers("b", 1, [us, P], 0))
    shown = protocol.operators.status(0, asked=m.Status(prompt="abc")).prompt
    assert (shown.peer, shown.address) == ("p", "tcp://127.0.0.1:2")
    assert protocol.operators.status(0, asked=m.Status(prompt="other")).prompt == m.PromptRecord("other")
    assert protocol.operators.status(0).prompts is None
    (last, ) = protocol.operators.status(0, asked=m.Status(prompts=5)).prompts
    assert (last.request_id, last.age_s) == ("cmpl-abc-0", 0.0)
