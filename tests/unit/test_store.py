# SPDX-License-Identifier: Apache-2.0
"""The pure parts of the store: headers, sets, which files go, which steps are whole, settings."""
import dataclasses
import os
import random
import re
from pathlib import Path

import pytest

from vllm_pd.errors import ConfigError
from vllm_pd.rpc import addresses as addresses_of_rpc
from vllm_pd.rpc.keys import Keys
from vllm_pd.settings.store import KEYS, StoreSettings
from vllm_pd.store.arena import PAGE, ArenaShape
from vllm_pd.store.beyond import far
from vllm_pd.store.blocks import AHEAD_NS, HEADER_BYTES, BlockHeader, BlockKey, checksummer, decode, encode_sealed
from vllm_pd.store.files import StoredFile, choose_removals
from vllm_pd.store.plan import StorePlan
from vllm_pd.store.slots import WAYS, SetGeometry
from vllm_pd.store.steps import WholeSteps

KEY = BlockKey(b"m" * 16, bytes(range(32)))
HEADER = BlockHeader(KEY, 4711, 1 << 63)


def test_b104_a_header_is_whole_or_none():
    """B104: a header of which any byte is another, or that ends early, is no header."""
    data = encode_sealed(HEADER)
    assert len(data) == HEADER_BYTES and decode(data) == HEADER
    assert decode(bytes(HEADER_BYTES)) is None and decode(data[:-1]) is None
    for at in range(80):  # what the seal covers, and the seal
        assert decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:]) is None, at
        assert decode(data[:at] + bytes(HEADER_BYTES - at)) is None, at


@pytest.mark.parametrize("other, length", [
    (BlockKey(b"another model...", KEY.name), 100), (BlockKey(KEY.model, bytes(32)), 100), (KEY, 99)])
def test_b104_the_checksum_is_that_of_this_block(other: BlockKey, length: int):
    """B104: the same bytes under another model, name or length have another checksum."""
    ours, theirs = checksummer(KEY, 100), checksummer(other, length)
    ours.update(bytes(99))
    theirs.update(bytes(99))
    assert ours.intdigest() != theirs.intdigest()


def test_a_block_has_one_set():
    geometry = SetGeometry.of(5 * WAYS)
    sets = {geometry.candidates(BlockKey(KEY.model, random.Random(n).randbytes(32))) for n in range(200)}
    assert sets == {range(first, first + WAYS) for first in range(0, 5 * WAYS, WAYS)}
    assert SetGeometry.of(3).candidates(KEY) == range(3)


def test_an_arena_has_as_many_slots_as_fit():
    """Large blocks: the slots beyond whole sets of 64 are given to these sets, which stay about as quick to search."""
    for slots in (1, 63, 64, 65, 127, 128, 170, 191, 682, 64 * 64 + 63):
        shape = ArenaShape.fitting(1 << 20, slots * ((1 << 20) + HEADER_BYTES) + 2 * PAGE)
        ways = shape.geometry.ways
        assert slots * 63 / 64 <= shape.slots <= slots and shape.slots % ways == 0
        assert min(slots, WAYS) <= ways < 2 * WAYS and SetGeometry.of(slots).ways == ways
        sets = {shape.geometry.candidates(BlockKey(KEY.model, random.Random(n).randbytes(32))) for n in range(2000)}
        assert sets == {range(first, first + ways) for first in range(0, shape.slots, ways)}


@pytest.mark.parametrize("slot_bytes", [1, 4096, 4097, 6 << 20])
def test_the_slots_of_an_arena_do_not_overlap(slot_bytes: int):
    shape = ArenaShape.fitting(slot_bytes, 256 << 20)
    assert shape.slots % shape.geometry.ways == 0 and shape.file_bytes <= 256 << 20
    assert shape.header_at(shape.slots) <= shape.payload_at(0)
    assert all(shape.payload_at(slot) % PAGE == 0 for slot in range(shape.slots))
    assert shape.payload_at(1) - shape.payload_at(0) >= slot_bytes
    assert shape.payload_at(shape.slots - 1) + slot_bytes <= shape.file_bytes


def test_an_arena_without_a_slot_is_refused():
    with pytest.raises(ConfigError, match=r"memory_gib=0.000977 can't be used: a block has 1048576 bytes, and not one"):
        ArenaShape.fitting(1 << 20, 1 << 20)


def test_the_files_that_go_are_the_least_recently_used():
    files = [StoredFile(used, size, str(used)) for used, size in ((5, 10), (1, 10), (3, 30), (4, 10))]
    assert [file.path for file in choose_removals(files, 60, 9)] == []
    assert [file.path for file in choose_removals(files, 59, 9)] == ["1"]
    assert [file.path for file in choose_removals(files, 20, 9)] == ["1", "3"]
    assert len(choose_removals(files, 0, 9)) == 4
    for now_ns, first in ((3 - AHEAD_NS, "4"), (2 - AHEAD_NS, "3")):  # the clock was set back before these times
        assert choose_removals(files, 59, now_ns)[0].path == first


@pytest.mark.parametrize("values, message", [
    ({"memory": 4}, "memory=4 can't be used: there is no such key: write one of folder, memory_gib, file_folder"),
    ({"memory_gib": "4"}, "memory_gib='4' can't be used: it must be a number, without quotes, like 4"),
    ({"memory_gib": True}, "memory_gib=True can't be used: it must be a number"),
    ({"memory_gib": float("nan")}, "memory_gib=nan can't be used: it must be a number"),
    ({"memory_gib": 0}, "memory_gib=0 can't be used: it must be above 0 and at most 1048576, like 4"),
    ({"folder": "here"}, "folder='here' can't be used: it must be a folder with its whole path"),
    ({"file_folder": 3}, "file_folder=3 can't be used: it must be a folder with its whole path"),
    ({"file_gib": 3}, "file_gib=3 can't be used: there is no file tier: write file_folder, too"),
    ({"listen": 5900}, "listen=5900 can't be used: it must be a string"),
    ({"listen": "10.0.0.5:5900"}, "listen='10.0.0.5:5900' can't be used: write it like tcp://"),
    ({"listen": "tcp://127.0.0.1:0"}, "listen='tcp://127.0.0.1:0' can't be used: its port is outside 1..65535"),
    ({"listen": "tcp://10.0.0.5:5900"}, "listen='tcp://10.0.0.5:5900' can't be used: beyond this machine's loopback "
     "the sockets need a key: run vllm-pd keys FILE"),
    ({"hosts": "tcp://10.0.0.6:5900"}, "hosts='tcp://10.0.0.6:5900' can't be used: beyond this machine's loopback"),
    ({"hosts": ""}, "hosts='' can't be used: write it like tcp://"),
    ({"hosts": "tcp://127.0.0.1:5900,tcp://127.0.0.1:5900"}, "hosts='tcp://127.0.0.1:5900,tcp://127.0.0.1:5900' can't "
     "be used: write at most 64 addresses, each once"),
    ({"hosts": ",".join(f"tcp://127.0.0.1:{port}" for port in range(5900, 5965))}, "hosts="),
    ({"wait_s": 1}, "wait_s=1 can't be used: no other host is asked: write hosts"),
    ({"wait_s": 61, "hosts": "tcp://127.0.0.1:5900"}, "wait_s=61 can't be used: it must be above 0 and at most 60"),
    ({"staging_mib": "1", "hosts": "tcp://127.0.0.1:5900"}, "staging_mib='1' can't be used: it must be a number"),
    ({"keys": "/none"}, "keys='/none' can't be used: nothing here speaks to other hosts: write listen or hosts"),
    ({"keys": "/none", "hosts": "tcp://127.0.0.1:5900"}, "keys='/none' can't be used: No such file"),
])
def test_settings_that_are_refused(values: dict, message: str):
    with pytest.raises(ConfigError) as caught:
        StoreSettings.parse(values)
    assert str(caught.value).startswith(message)


def test_the_document_has_every_key_with_its_default():
    section = (Path(__file__).parents[2] / "docs/configuration.md").read_text().partition("\n## The store\n")[2]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, flags=re.MULTILINE)
    defaults = {key.name: "none" if key.default is None else str(key.default)
                for key in dataclasses.fields(StoreSettings)}
    rows = {name: default.strip("` ").replace("UID", str(os.geteuid())) for name, default in rows}
    assert rows == defaults and tuple(defaults) == KEYS


def test_settings():
    assert StoreSettings.parse({}) == StoreSettings()
    settings = StoreSettings.parse({"memory_gib": 0.5, "file_folder": "/var/cache/kv", "file_gib": 1,
                                    "pinned_gib": 2})
    assert (settings.memory_bytes, settings.file_bytes, settings.pinned_bytes) == (1 << 29, 1 << 30, 1 << 31)
    assert not settings.is_far


def test_b104_an_address_that_the_other_hosts_can_not_reach(tmp_path):
    keys = str(Keys.make(tmp_path))
    for given in ({"listen": "tcp://127.0.0.1:5900", "hosts": "tcp://10.0.0.6:5900"},
                  {"hosts": "tcp://127.0.0.1:5900,tcp://10.0.0.6:5900"}):
        with pytest.raises(ConfigError, match=r"can't be used: other machines can't write to 127.0.0.1: write an add"):
            StoreSettings.parse({"keys": keys, **given})
    assert StoreSettings.parse({"keys": keys, "listen": "tcp://10.0.0.5:5900",
                                "hosts": "tcp://10.0.0.6:5900,tcp://127.0.0.1:5900"}).other_hosts


def test_b104_all_engines_may_have_one_list_of_hosts():
    """B104: an engine leaves its own address out; alone it asks nobody, and then only serves."""
    settings = StoreSettings.parse({"listen": "tcp://localhost:5900", "staging_mib": 0.5,
                                    "hosts": "tcp://127.0.0.1:5901, tcp://127.0.0.1:5900"})
    assert settings.other_hosts == ("tcp://127.0.0.1:5901", ) and settings.is_far
    assert settings.staging_bytes == 1 << 19
    alone = StoreSettings.parse({"hosts": "tcp://127.0.0.1:5900", "listen": "tcp://127.0.0.1:5900"})
    assert alone.other_hosts == () and alone.is_far


def test_b104_an_engine_leaves_out_its_listen_by_name_too(tmp_path, monkeypatch):
    """B104: `listen` is a name that is looked up; one of `hosts` is another name of this machine."""
    addresses = {"a.example": "10.0.0.5", "here.example": "127.0.0.1", "b.example": "10.0.0.6"}
    monkeypatch.setattr(addresses_of_rpc, "own_address", lambda key, value, host: addresses[host])
    monkeypatch.setattr(far, "resolve", lambda key, value, host: [addresses[host]])
    hosts = "tcp://a.example:5900,tcp://here.example:5900,tcp://here.example:5901,tcp://b.example:5900"
    settings = StoreSettings.parse({"keys": str(Keys.make(tmp_path)), "listen": "tcp://a.example:5900", "hosts": hosts})
    assert settings.listen == "tcp://10.0.0.5:5900"
    assert settings.other_hosts == tuple(hosts.split(","))[1:]
    assert far.without_own_names(settings) == ("tcp://here.example:5901", "tcp://b.example:5900")

    def fail(key: str, value: str, host: str) -> list[str]:
        raise ConfigError(key, value, "it has no address")

    monkeypatch.setattr(far, "resolve", fail)
    assert far.without_own_names(settings) == settings.other_hosts, "it may have one later"


def test_b104_what_is_absent_of_a_request():
    """B104: what follows the blocks that are here, up to the last that a load could have; looked at anew each time."""
    stored = {b"a", b"b", b"d"}
    store = StorePlan(16, lambda name: name in stored, 8, lambda: 100.0)
    names = [b"a", b"b", b"c", b"d", b"e"]
    store.add("r")
    assert store.absent_names("r", names, 80, 0) == [b"c", b"d"], "the last token's block is always computed"
    assert store.absent_names("r", names, 81, 16) == [b"c", b"d", b"e"]
    assert store.absent_names("r", names, 80, 32) == [b"c", b"d"]
    assert list(store.absent_names("r", names, 80, 7)) == [], "no load begins within a block"
    stored.add(b"c")
    assert store.loadable_tokens("r", names, 80, 32) == 32
    stored.add(b"e")
    assert store.absent_names("r", names, 81, 0) == []
    store.failed("r")
    assert list(store.absent_names("r", names, 81, 0)) == []
    assert list(store.absent_names("another", names, 81, 0)) == []


def test_b104_what_has_come_since_the_last_look_is_seen():
    """B104: a look-up counts for a second, unless blocks have come."""
    stored = {b"a"}
    store = StorePlan(16, lambda name: name in stored, 8, lambda: 100.0)
    store.add("r")
    assert store.loadable_tokens("r", [b"a", b"b", b"c"], 60, 0) == 16
    stored.add(b"b")
    assert store.loadable_tokens("r", [b"a", b"b", b"c"], 60, 0) == 16
    store.look_anew("r")
    assert store.loadable_tokens("r", [b"a", b"b", b"c"], 60, 0) == 32


def test_b104_after_a_step_that_was_not_whole_none_counts():
    """B104: one that some layer did not end, or that never ended itself."""
    def end(steps, number, *layers):
        for layer in layers:
            steps.layer_computed(number, layer)
        return steps.end(number, has_tokens=bool(layers))

    failed, missed = WholeSteps("ab"), WholeSteps("ab")
    assert end(failed, 1, "a", "b") and end(failed, 2) and not end(failed, 3, "a")
    assert not end(failed, 4, "a", "b") and not end(failed, 5)
    assert end(missed, 1, "a", "b") and not end(missed, 3, "a", "b") and not end(missed, 4)


def test_b97_what_the_store_has_of_a_request_that_waits_is_looked_up_once_in_a_while():
    """V1 asks about the head of its queue in each step, and its prompt may have thousands of blocks."""
    asked, stored, now = [], {b"a", b"b", b"c"}, [100.0]
    store = StorePlan(16, lambda name: asked.append(name) or name in stored, 8, lambda: now[0])
    names = [b"a", b"b", b"c", b"d"]
    store.add("r")

    def loadable(computed_tokens: int, tokens: int = 70) -> int:
        return store.loadable_tokens("r", names, tokens, computed_tokens)

    assert loadable(0) == 48
    count = len(asked)
    for now[0] in (100.1, 100.5, 100.9):
        assert loadable(0) == 48
    assert len(asked) == count
    assert [one.name for one in store.loads("r", names, [4, 5, 6, 7], 48)] == names[:3]
    assert loadable(16) == 32 and len(asked) > count, "another prefix hit"
    assert [one.name for one in store.loads("r", names, [4, 5, 6, 7], 32)] == names[1:3]
    assert loadable(16, 48) == 16, "another length"
    assert loadable(16) == 32
    stored.discard(b"b")
    assert loadable(16) == 32
    now[0] = 102.0
    assert loadable(16) == 0
    stored.add(b"b")
    assert loadable(16) == 32, "one look tells that there is nothing: that is taken each time"
    store.failed("r")
    assert loadable(16) == 0
