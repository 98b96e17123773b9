# SPDX-License-Identifier: Apache-2.0
"""B82: the cluster's key. Whoever does not have it gets nothing from any socket, and disturbs nobody who has."""
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from typer.testing import CliRunner

from tests.fakes.brokers import serving
from tests.sockets.test_agent import Engine, Settings, hand_over, peered
from vllm_pd import cli
from vllm_pd.broker.members import Access, list_members
from vllm_pd.broker.server import Broker
from vllm_pd.errors import ConfigError, ControlError
from vllm_pd.ops import doctor
from vllm_pd.ops.launch.plan import UpOptions, plan_fleet
from vllm_pd.protocol import messages as m
from vllm_pd.rpc import codec, sockets
from vllm_pd.rpc.gate import Gate
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.nats_address import check_certificates, check_credentials
from vllm_pd.rpc.ports import take_free_run
from vllm_pd.rpc.secret_files import problem_of_mode


@pytest.fixture
def key_file(tmp_path):
    return str(Keys.make(tmp_path / "cluster.keys"))


@pytest.fixture
def broker(key_file):
    with serving(ttl_s=60.0, keys=Keys.load(key_file)) as broker:
        yield broker


def test_b82_a_made_key_is_private_and_never_overwritten(tmp_path):
    runner = CliRunner()
    for argument, made in ((tmp_path, tmp_path / "vllm-pd.keys"), (tmp_path / "mine", tmp_path / "mine")):
        result = runner.invoke(cli.app, ["keys", str(argument)])
        assert result.exit_code == 0 and str(made) in result.output
        assert stat.S_IMODE(made.stat().st_mode) == 0o600
        keys, text = Keys.load(str(made)), made.read_text()
        assert keys.secret.decode() not in repr(keys)
        refused = runner.invoke(cli.app, ["keys", str(argument)])
        assert isinstance(refused.exception, ConfigError) and "another name" in refused.exception.cure
        assert made.read_text() == text
    refused = runner.invoke(cli.app, ["keys", str(tmp_path / "no" / "folder")])
    assert isinstance(refused.exception, ConfigError) and refused.exception.key == "FILE"
    assert Keys.load(str(tmp_path / "mine")) != Keys.load(str(tmp_path / "vllm-pd.keys"))


def test_b82_a_key_whose_characters_stand_for_no_number_is_none(tmp_path):
    file = tmp_path / "bad.keys"
    file.write_text(f"public: {'#' * 40}\nsecret: {'#' * 40}\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="it holds no key"):
        Keys.load(str(file))


ROOT, OTHER = 0, 1000


@pytest.mark.parametrize("owner, mode, folder_owner, folder_mode, cure", [
    (OTHER, 0o600, OTHER, 0o755, ""), (OTHER, 0o400, OTHER, 0o777, ""), (ROOT, 0o600, OTHER, 0o777, ""),
    (ROOT, 0o440, ROOT, 0o2755, ""), (ROOT, 0o444, ROOT, 0o755, ""), (ROOT, 0o640, ROOT, 0o1777, ""),
    (OTHER, 0o440, ROOT, 0o755, "root's"), (OTHER, 0o444, OTHER, 0o755, "root's"),
    (ROOT, 0o644, ROOT, 0o755, "chmod 440"), (ROOT, 0o460, ROOT, 0o755, "chmod 440"),
    (ROOT, 0o660, ROOT, 0o755, "chmod 440"),
    (ROOT, 0o440, OTHER, 0o755, "folder"), (ROOT, 0o440, ROOT, 0o775, "folder"), (ROOT, 0o444, ROOT, 0o777, "folder")])
def test_b82_who_may_read_and_change_a_secret(owner, mode, folder_owner, folder_mode, cure):
    problem = problem_of_mode(SimpleNamespace(st_uid=owner, st_mode=stat.S_IFREG | mode),
                              SimpleNamespace(st_uid=folder_owner, st_mode=stat.S_IFDIR | folder_mode))
    assert cure in problem and bool(cure) == bool(problem)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of root's")
def test_b82_the_key_in_a_secret_of_kubernetes_is_read(tmp_path, key_file):
    data = tmp_path / "..2026_01"
    data.mkdir(mode=0o755)
    (data / "key").write_bytes(Path(key_file).read_bytes())
    (tmp_path / "..data").symlink_to(data.name)
    (tmp_path / "key").symlink_to("..data/key")
    tmp_path.chmod(0o3777)
    for mode in (0o440, 0o444):
        (data / "key").chmod(mode)
        assert Keys.load(str(tmp_path / "key")) == Keys.load(key_file)
    (data / "key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"mode 0644.*defaultMode: 0440"):
        Keys.load(str(tmp_path / "key"))


def test_b80_a_secret_whose_folder_goes_meanwhile_is_refused(tmp_path, key_file, monkeypatch):
    monkeypatch.setattr(Path, "resolve", lambda path: tmp_path / "gone" / "key")
    with pytest.raises(ConfigError, match="gone: No such file or directory"):
        Keys.load(key_file)


@pytest.mark.parametrize("special", ["/dev/zero", "/dev/tty", "pipe", "folder"])
def test_b80_what_is_no_file_is_refused_at_once(tmp_path, special):
    path = special if special.startswith("/") else str(tmp_path / special)
    if special == "pipe":
        os.mkfifo(path, 0o600)
    elif special == "folder":
        os.mkdir(path)
    for name, read in (("keys", Keys.load), ("nats_credentials", check_credentials), ("nats_ca", check_certificates)):
        with pytest.raises(ConfigError) as caught:
            read(path, name) if name == "keys" else read(name, path)
        assert caught.value.key == name and caught.value.cure


def test_b82_a_key_that_can_not_be_written_whole_is_not_written_at_all(tmp_path):
    """Half of a file would be there already at the next try."""
    program = ("import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
               "sys.argv[1:] = ['keys', 'mine']\nfrom vllm_pd.cli import main; main()")
    done = subprocess.run([sys.executable, "-B", "-c", program], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 2 and "make room" in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_b82_engines_with_the_key_work_as_without(broker, key_file):
    settings = Settings(broker.address, keys=key_file)
    decode, prefill = Engine(settings, m.Role.DECODE), Engine(settings, m.Role.PREFILL)
    try:
        peered(decode, prefill)
        for number in range(20):
            hand_over(decode, prefill, f"r{number}")
        decode.assert_clean()
        assert len(list_members(broker.address, access=Access(key_file)).members) == 2
        assert all(finding.ok for finding in doctor.check_peers(broker.address, Access(key_file)))
    finally:
        for one in (decode, prefill):
            one.close()


@pytest.mark.parametrize("other", ["none", "another", "only the public half"])
def test_b82_without_the_key_nothing_comes_in_and_nothing_goes_out(broker, key_file, other, tmp_path):
    settings = Settings(broker.address, keys=key_file)
    engine = Engine(settings, m.Role.DECODE)
    context = zmq.Context()
    strangers = []
    try:
        engine.expect_view(lambda view: view.broker_up)
        for address in (broker.address, engine.agent.member.address):
            stranger = context.socket(zmq.DEALER)
            if other != "none":
                public, secret = zmq.curve_keypair()
                stranger.curve_serverkey = Keys.load(key_file).public if "half" in other else public
                stranger.curve_publickey, stranger.curve_secretkey = public, secret
            stranger.linger = 0
            stranger.connect(address)
            strangers.append(stranger)
            for word in (m.ListMembers(), m.Status(), m.Claim(m.Attempt("d", "r", 1), 1),
                         m.Register(engine.agent.member)):
                stranger.send(codec.encode("stranger", word), zmq.NOBLOCK)
            stranger.send(b"PD\xff", zmq.NOBLOCK)  # which is answered, where it is heard
        for address in (broker.address, engine.agent.member.address):
            plain = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 5)
            plain.sendall(bytes(range(256)) * 8)
            plain.close()
        time.sleep(0.3)
        assert not any(stranger.poll(0) for stranger in strangers)
        assert [one.incarnation for one in broker.members()] == [engine.agent.member.incarnation]
        assert not any(name.startswith("frame") for name in broker.counts()), "nothing of it was even looked at"
        assert not any("frame" in name or "unknown" in name for name in engine.agent.dropped())
        assert engine.protocol.decode.view().broker_up
    finally:
        context.destroy(linger=0)
        engine.close()
    with pytest.raises(ControlError, match="another key"):
        list_members(broker.address, timeout_s=2.0)
    with pytest.raises(ControlError, match="another key"):
        list_members(broker.address, timeout_s=2.0, access=Access(str(Keys.make(tmp_path / "another"))))


def test_b82_a_client_with_a_key_speaks_to_no_server_without_it(key_file):
    """So a false broker hears nothing."""
    with zmq.Context() as context:
        false = context.socket(zmq.ROUTER)
        false.linger = 0
        port = false.bind_to_random_port("tcp://127.0.0.1")
        engine = Engine(Settings(f"tcp://127.0.0.1:{port}", keys=key_file), m.Role.DECODE)
        try:
            assert not false.poll(500)
            assert not engine.protocol.decode.view().broker_up
        finally:
            engine.close()
            false.close()


def test_b82_a_server_whose_gate_is_gone_admits_nobody(key_file):
    keys = Keys.load(key_file)
    with zmq.Context() as context, zmq.Context() as elsewhere:
        server = sockets.server(context, "tcp://127.0.0.1:0", keys)
        client = sockets.client(elsewhere, sockets.endpoint(server), only_connected=False, keys=keys)
        client.send(b"hello")
        assert not server.poll(300)
        client.close()
        server.close()


def test_b82_the_gate_answers_odd_questions_with_no(key_file):
    keys = Keys.load(key_file)
    with zmq.Context() as context:
        gate = Gate(context, keys)
        asker = context.socket(zmq.REQ)
        asker.connect("inproc://zeromq.zap.01")
        asker.linger = 0
        good = [b"1.0", b"7", b"vllm-pd", b"127.0.0.1", b"", b"CURVE", zmq.utils.z85.decode(keys.public)]
        odd = [good[:6], [b"x"], [*good[:5], b"PLAIN", b"me", b"secret"], [b"2.0", *good[1:]],
               [*good[:2], b"other", *good[3:]], [*good[:6], bytes(32)], [*good[:5], b"NULL"], [*good, b""]]
        for frames, code in [(good, b"200"), *((frames, b"400") for frames in odd)]:
            asker.send_multipart(frames)
            gate.answer()
            assert asker.recv_multipart()[2] == code, frames
        assert gate.counters == {"peer_admitted": 1, "peer_refused": len(odd)}
        asker.close()
        gate.close()


def test_b82_broker_beyond_loopback_needs_keys(key_file):
    runner = CliRunner()
    result = runner.invoke(cli.app, ["broker", "--bind", "tcp://10.0.0.7:5700"])
    assert isinstance(result.exception, ConfigError) and "vllm-pd keys" in result.exception.cure
    result = runner.invoke(cli.app, ["broker", "--bind", "tcp://127.0.0.1:5700", "--keys", "/no/file"])
    assert isinstance(result.exception, ConfigError) and result.exception.key == "--keys"
    with pytest.raises(ConfigError, match="keys"):
        Broker("tcp://10.0.0.7:5700")


def test_up_passes_the_key_on(key_file):
    port = take_free_run("127.0.0.1", 2)
    plan = plan_fleet(UpOptions("model", 1, 1, port, pd={"keys": key_file}), ())
    assert plan.broker_command[-2:] == ("--keys", key_file)
    assert all(f'"keys": "{key_file}"' in " ".join(engine.command) for engine in plan.engines)
    assert "--keys" not in plan_fleet(UpOptions("model", 1, 1, port), ()).broker_command
