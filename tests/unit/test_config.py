# SPDX-License-Identifier: Apache-2.0
"""B80, B82: what an engine's settings may be; a refusal names the key, the value and what to write instead."""

import dataclasses
import json
import re
import socket
from pathlib import Path

import certifi
import nkeys
import pytest

from vllm_pd.decisions.policy import PolicyConfig
from vllm_pd.errors import ConfigError
from vllm_pd.ops.launch.plan import parse_setting
from vllm_pd.protocol.messages import Role
from vllm_pd.rpc import addresses
from vllm_pd.rpc.addresses import parse_bind, parse_endpoint
from vllm_pd.rpc.keys import Keys
from vllm_pd.settings.engine import KV_ROLES, PDConfig
from vllm_pd.settings.store import StoreSettings

BROKER = {"broker": "tcp://127.0.0.1:5700"}
DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def refused(kv_role: object, extra: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        PDConfig.parse(kv_role, extra)
    return caught.value


@pytest.mark.parametrize("kv_role, role", [("kv_consumer", Role.DECODE), ("kv_producer", Role.PREFILL),
                                           ("kv_both", Role.BOTH)])
def test_defaults_and_roles(kv_role, role):
    config = PDConfig.parse(kv_role, BROKER)
    assert config.role is role
    assert config.broker == "tcp://127.0.0.1:5700"
    assert config.max_local_prefill_tokens == 1000 and config.lease_s == 30.0


@pytest.fixture
def files(tmp_path):
    """Good values of the keys that name files."""
    seed = tmp_path / "seed"
    seed.touch(0o600)
    seed.write_text(nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_USER).decode() + "\n")
    return {"keys": str(Keys.make(tmp_path)), "nats_credentials": str(seed), "nats_ca": certifi.where()}


def test_every_key_can_be_set(files):
    extra = {"broker": "tcp://127.0.0.2:5701", "bind": "tcp://127.0.0.1:5702", "max_local_prefill_tokens": 0,
             "max_queue_length": 1, "max_parked_fraction": 1, "max_prefill_jobs": 3, "lease_s": 9,
             "prefill_step_s": 1, "prefill_overtaking": 0, "attempt_deadline_s": 8.5, "attempts": 3,
             "max_fallback_share": 1, "claim_retry_s": 0.25, "heartbeat_s": 0.5, "ttl_s": 4, "prefix_reads": "never",
             "push_chunks": True, "transport": "torch", "drain_timeout_s": 5, "max_prefill_tokens": 9,
             "log_decisions": True, "nats_prefix": "mine", "hold_s": 0, "lifeline_port": 5703,
             "policy": "my_module.MyPolicy", "zone": "rack-7",
             "fallback": "refuse", "fallback_tokens": 77, "fallback_wait_s": 0.5, "media": True, "step_sync": True,
             "metaservers": "http://127.0.0.1:9000/v1/metaserver",
             "weights_digest": "0123456789abcdef" * 4,
             "store": {"folder": "/dev/shm/mine", "memory_gib": 1, "file_folder": "/mine", "file_gib": 2,
                       "pinned_gib": 1, "listen": "tcp://127.0.0.1:5900", "wait_s": 1, "staging_mib": 8,
                       "hosts": "tcp://127.0.0.1:5901,tcp://127.0.0.1:5902", "keys": files["keys"]}, **files}
    auto = {"max_local_prefill_tokens": "auto", "itl_target_ms": 80}
    assert {*extra, *auto} == {key.name for key in PDConfig.settings()}
    for given in (extra, {**extra, **auto}):
        config = dataclasses.asdict(PDConfig.parse("kv_both", given))
        assert {**config, **given} == config
    assert isinstance(config["lease_s"], float) and isinstance(config["max_parked_fraction"], float)


def test_b80_the_store_has_keys_of_its_own():
    assert PDConfig.parse("kv_both", {**BROKER, "store": {}}).store == StoreSettings()
    for given, key in (({"memory": 4}, "memory"), ({"memory_gib": "4"}, "memory_gib"), ({"file_gib": 4}, "file_gib"),
                       *(({"memory_gib": value}, "memory_gib") for value in (10**400, -10**400, float("inf")))):
        assert refused("kv_both", {**BROKER, "store": given}).key == key


@pytest.mark.parametrize("value", ["", "ab" * 31, "ab" * 33, "AB" * 32, "0x" + "ab" * 31, "ab" * 31 + "g1",
                                   "ab" * 32 + "\n", 7, None, b"ab", "sha256:" + "ab" * 32])
def test_b80_what_is_no_digest_of_weights(value):
    for refuses in (lambda: PDConfig.parse("kv_both", {**BROKER, "weights_digest": value}),
                    lambda: StoreSettings.parse_connector({"weights_digest": value})):
        with pytest.raises(ConfigError) as caught:
            refuses()
        assert caught.value.key == "weights_digest" and "vllm-pd digest FOLDER" in str(caught.value)


def test_b42_both_connectors_take_a_digest_of_weights_and_the_store_in_settings_has_none():
    digest = "ab" * 32
    assert PDConfig.parse("kv_both", {**BROKER, "weights_digest": digest}).weights_digest == digest
    given = {"memory_gib": 1, "weights_digest": digest}
    assert StoreSettings.parse_connector(given) == (StoreSettings(memory_gib=1), digest)
    assert StoreSettings.parse_connector({}) == (StoreSettings(), None)
    assert refused("kv_both", {**BROKER, "store": {"weights_digest": digest}}).key == "weights_digest"


def test_b104_the_store_has_the_keys_of_the_engine(files):
    """B104: those of its own object win; without other hosts it has none."""
    far = {**BROKER, "keys": files["keys"], "store": {"listen": "tcp://10.0.0.5:5900"}}
    assert PDConfig.parse("kv_both", far).store.keys == files["keys"]
    assert PDConfig.parse("kv_both", {**far, "store": {}}).store == StoreSettings()
    assert refused("kv_both", {**BROKER, "store": far["store"]}).key == "listen"


@pytest.mark.parametrize("kv_role", [None, "", "decode", "KV_CONSUMER", 1])
def test_b80_wrong_role(kv_role):
    error = refused(kv_role, BROKER)
    assert error.key == "kv_role"
    assert all(name in str(error) for name in KV_ROLES)


@pytest.mark.parametrize("name, suggestion", [("max_local_prefill_length", "max_local_prefill_tokens"),
                                              ("lease", "lease_s"), ("brokr", "broker"), ("Lease_s", "lease_s"),
                                              ("max_que_length", "max_queue_length")])
def test_b80_unknown_key_suggests_the_nearest(name, suggestion):
    error = refused("kv_consumer", {**BROKER, name: 1})
    assert error.key == name
    assert f"did you mean {suggestion}?" in str(error)


def test_b80_unknown_key_like_no_other_lists_all():
    error = refused("kv_consumer", {**BROKER, "zzz": 1})
    assert all(key.name in str(error) for key in PDConfig.settings())


@pytest.mark.parametrize("extra", [{}, None])
def test_b80_missing_broker(extra):
    error = refused("kv_consumer", extra)
    assert error.key == "broker" and "vllm-pd broker" in str(error) and "tcp://127.0.0.1:5700" in str(error)


WRONG_TYPES = [(key.name, value)
               for key in PDConfig.settings() for value in (None, [], {}, "1" if key.type is not str else 1,
                                                            True if key.type is not bool else 1)
               if (key.name, value) not in [("store", {}), ("zone", "1")]]


@pytest.mark.parametrize("name, value", WRONG_TYPES + [("max_queue_length", 1.5), ("max_local_prefill_tokens", 2.0)])
def test_b80_wrong_type(name, value):
    error = refused("kv_consumer", {**BROKER, name: value})
    assert error.key == name
    assert repr(value) in str(error)
    assert any(word in str(error) for word in ("must be", "write one of", "No such file")), "and what to do"


@pytest.mark.parametrize("name, value", [
    ("max_local_prefill_tokens", -1), ("max_queue_length", 0), ("max_prefill_jobs", 0),
    ("prefill_step_s", 0), ("prefill_overtaking", -1), ("max_prefill_tokens", 0),
    ("max_parked_fraction", 0), ("lifeline_port", -1), ("lifeline_port", 65536),
    ("zone", ""), ("zone", "a b"), ("zone", "a\n"), ("zone", "a" * 65), ("zone", 7),
    ("policy", ""), ("policy", "NoModule"), ("policy", "a.b; import os"), ("policy", "a..B"), ("policy", "a.B\n"),
    ("max_parked_fraction", 1.01), ("max_parked_fraction", float("nan")), ("lease_s", 0), ("lease_s", -3),
    ("lease_s", float("inf")), ("lease_s", 10**400), ("attempt_deadline_s", 0), ("claim_retry_s", 0),
    ("heartbeat_s", 0), ("ttl_s", 0), ("itl_target_ms", 0), ("itl_target_ms", 60_001),
    *((name, value) for name in ("max_local_prefill_tokens", "max_queue_length", "max_prefill_jobs",
                                 "max_prefill_tokens") for value in (10**400, 2**62)),  # no message could hold it
])
def test_b80_impossible_value(name, value):
    error = refused("kv_consumer", {**BROKER, name: value})
    assert error.key == name and "must be" in str(error)


@pytest.mark.parametrize("name, extra", [
    ("ttl_s", {"ttl_s": 1.5}), ("ttl_s", {"heartbeat_s": 3}), ("lease_s", {"lease_s": 1}),
    ("attempt_deadline_s", {"attempt_deadline_s": 2}), ("itl_target_ms", {"itl_target_ms": 50}),
    ("itl_target_ms", {"itl_target_ms": 50, "max_local_prefill_tokens": 500}),
    ("lifeline_port", {"bind": "tcp://127.0.0.1:5702", "lifeline_port": 5702}),
])
def test_b80_values_that_contradict_each_other(name, extra):
    error = refused("kv_consumer", {**BROKER, **extra})
    assert error.key == name and "write" in str(error)


@pytest.mark.parametrize("value", ["", ",", "http://", "10.0.0.5:9000", "ftp://a/b", "http://me:word@a/b", "http://a:0/b",
                                   "http://a:b/c", "http://a/b#c", "http://a/b c", "http://a/b,", "http://a/\nb",
                                   "file:///etc/passwd"])
def test_b100_what_is_no_url_of_a_metaserver(value):
    error = refused("kv_consumer", {**BROKER, "metaservers": value})
    assert error.key == "metaservers" and "write it like http://" in str(error)


def test_b100_only_an_engine_that_decodes_posts():
    urls = {**BROKER, "metaservers": "http://a:1/v1/metaserver, https://[::1]/x"}
    assert PDConfig.parse("kv_consumer", urls).metaserver_urls == ("http://a:1/v1/metaserver", "https://[::1]/x")
    assert PDConfig.parse("kv_producer", urls).metaserver_urls == ()
    assert PDConfig.parse("kv_both", BROKER).metaserver_urls == ()


def test_b80_a_number_of_too_many_digits_after_pd_is_none():
    for text in ("9" * 5000, "[" * 100_000):
        name, value = parse_setting(f"lease_s={text}")
        assert refused("kv_consumer", {**BROKER, name: value}).key == "lease_s"


@pytest.mark.parametrize("value", ["Auto", "automatic", "", "1000", "never"])
def test_b80_a_word_that_is_no_number_of_tokens(value):
    error = refused("kv_consumer", {**BROKER, "max_local_prefill_tokens": value})
    assert error.key == "max_local_prefill_tokens" and 'like 1000, or "auto"' in str(error)


def test_what_the_policy_gets():
    fixed = PDConfig.parse("kv_consumer", {**BROKER, "max_local_prefill_tokens": 7, "attempts": 3})
    assert fixed.bounds == PolicyConfig(max_local_prefill_tokens=7, attempts=3) and not fixed.decides_by_time
    auto = PDConfig.parse("kv_consumer", {**BROKER, "max_local_prefill_tokens": "auto", "itl_target_ms": 80})
    assert auto.bounds == PolicyConfig(max_local_prefill_tokens=1000, auto=True, itl_target_s=0.08)
    assert auto.decides_by_time
    typed = dict(map(parse_setting, ["max_local_prefill_tokens=auto", "itl_target_ms=80"]))  # after --pd
    assert PDConfig.parse("kv_consumer", {**BROKER, **typed}) == auto


@pytest.mark.parametrize("name", ["broker", "bind"])
@pytest.mark.parametrize("value", ["", "127.0.0.1:5700", "tcp://127.0.0.1", "tcp://:5700", "ipc:///tmp/x", "tcp://",
                                   "tcp://127.0.0.1:port", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:-1",
                                   "tcp://[::1]", "tcp://[::1]:port", "tcp://[::1:5700", "tcp://[]:5700",
                                   "tcp://127.0.0.1:\u0663", pytest.param("tcp://127.0.0.1:" + 5000 * "1", id="long")])
def test_b80_malformed_address(name, value):
    error = refused("kv_consumer", {**BROKER, name: value})
    assert error.key == name and "write it like tcp://127.0.0.1:" in str(error)


@pytest.mark.parametrize("name", ["broker", "bind"])
@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.0.0.7", "example.org", "[fd00::7]", "127.0.0.1.example.org"])
def test_b82_beyond_loopback_without_keys(name, host):
    error = refused("kv_consumer", {**BROKER, name: f"tcp://{host}:5700"})
    assert error.key == name and host in str(error) and "loopback" in str(error) and "vllm-pd keys" in error.cure
    if name == "broker":
        for scheme in ("nats", "tls"):
            error = refused("kv_consumer", {name: f"{scheme}://{host}:4222"})
            assert error.key == name and host in str(error) and "nats_credentials" in error.cure


def test_b82_beyond_loopback_with_keys(files):
    config = PDConfig.parse("kv_consumer", {**files, "broker": "tcp://broker.example:5700", "bind": "tcp://10.0.0.7:*"})
    assert (config.broker, config.bind) == ("tcp://broker.example:5700", "tcp://10.0.0.7:0")
    config = PDConfig.parse("kv_consumer", {**files, "broker": "tls://10.0.0.8:4222, tls://n2.example:4222"})
    assert config.broker == "tls://10.0.0.8:4222,tls://n2.example:4222"


@pytest.mark.parametrize("extra", [
    {"bind": "tcp://0.0.0.0:1"}, {"bind": "tcp://*:1"}, {"bind": "tcp://[::]:1"}, {"bind": "tcp://[fe80::1]:1"},
    {"bind": "tcp://[fe80::1%eth0]:1"}, {"bind": "tcp://[ff02::1]:1"}, {"bind": "tcp://[a-name]:1"},
    {"bind": "tcp://fd00::7:1"}, {"broker": "tcp://fd00::7:1"}, {"broker": "nats://10.0.0.7:1,nats://fd00::7:1"},
    {"broker": "tcp://0.0.0.0:1"}, {"broker": "tcp://-x:1"}, {"broker": "tcp://10.0.0:1"}, {"broker": "nats://[::]:1"},
    {"broker": "nats://me:secret@10.0.0.7:4222"}, {"broker": "nats://10.0.0.7:4222,tls://10.0.0.8:4222"},
    {"broker": "nats://10.0.0.7"}, {"broker": "tls://10.0.0.7:0"}])
def test_b80_addresses_that_no_key_helps(files, extra):
    error = refused("kv_consumer", {**BROKER, **files, **extra})
    assert error.key == next(iter(extra)) and "write" in str(error)


@pytest.mark.parametrize("name, value", [
    ("broker", "nats://me:secret@10.0.0.7:4222"), ("broker", "nats://10.0.0.7:4222,nats://me:secret@10.0.0.8:4222"),
    ("broker", "nats://me:secret@ho:st"), ("broker", "nats://me:secret@"), ("broker", "nats://me:s@secret@h,x:1"),
    ("broker", "tcp://me:secret@10.0.0.7:1"), ("bind", "me:secret@10.0.0.7:1")])
def test_b82_a_password_is_refused_and_not_repeated(name, value):
    error = refused("kv_consumer", {**BROKER, name: value})
    assert error.key == name and "password" in str(error) and "secret" not in str(error) and "write" in str(error)


def test_b82_certificates_that_nothing_would_check_are_refused(files):
    for broker in ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222,nats://127.0.0.1:4223"):
        error = refused("kv_consumer", {"broker": broker, "nats_ca": files["nats_ca"]})
        assert error.key == "nats_ca" and files["nats_ca"] in str(error) and "tls://" in error.cure


def spoil(path, how):
    if how == "absent":
        path.unlink()
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "open":
        path.chmod(0o606)
    elif how == "empty":
        path.write_text("")
    elif how == "garbage":
        path.write_bytes(bytes(range(256)) * 40)
    elif how == "short":
        path.write_text(path.read_text()[:-20])
    elif how == "mixed":
        path.write_text("public: " + "0" * 40 + "\n" + path.read_text().splitlines()[-1])


@pytest.mark.parametrize("how", ["absent", "folder", "open", "empty", "garbage", "short", "mixed"])
@pytest.mark.parametrize("name", ["keys", "nats_credentials"])
def test_b82_a_secret_that_is_none_is_refused(files, name, how):
    PDConfig.parse("kv_both", {**BROKER, **files})
    spoil(Path(files[name]), how)
    error = refused("kv_both", {**BROKER, **files})
    assert error.key == name and files[name] in str(error)
    assert any(word in error.cure for word in ("vllm-pd keys", "chmod 600", "nsc generate creds")), error


def test_addresses_are_normalised():
    config = PDConfig.parse("kv_consumer", {"broker": "tcp://localhost:5700", "bind": "tcp://localhost:*"})
    assert (config.broker, config.bind) == ("tcp://127.0.0.1:5700", "tcp://127.0.0.1:0")
    assert PDConfig.parse("kv_both", {"broker": "nats://localhost:4222"}).broker == "nats://127.0.0.1:4222"


def test_addresses_of_ipv6(files):
    config = PDConfig.parse("kv_consumer", {"broker": "tcp://[::1]:5700", "bind": "tcp://[0:0::1]:*"})
    assert (config.broker, config.bind) == ("tcp://[::1]:5700", "tcp://[::1]:0")
    assert config.transport_host == "::1"
    config = PDConfig.parse("kv_consumer", {**files, "broker": "tls://[FD00::8]:4222, tls://[fd00:0::9]:4222",
                                            "bind": "tcp://[::ffff:10.0.0.7]:1"})
    assert (config.broker, config.bind) == ("tls://[fd00::8]:4222,tls://[fd00::9]:4222", "tcp://10.0.0.7:1")


@pytest.mark.parametrize("name, value", [
    ("bind", "tcp://fd00::7:1"), ("broker", "tcp://fd00::7:1"), ("broker", "nats://fd00::7:4222"),
    ("broker", "tls://fd00::7:4222"), ("broker", "nats://10.0.0.7:4222, nats://fd00::7:4222")])
def test_b80_an_address_of_ipv6_without_brackets(files, name, value):
    """Named with the one of several servers that it is, and what to write instead."""
    error = refused("kv_consumer", {**BROKER, **files, name: value})
    scheme = value.partition("://")[0]
    assert error.key == name and error.value == value.rpartition(" ")[2]
    assert error.cure.startswith("write an address of IPv6 in brackets") and f"{scheme}://[fd00::5]:" in error.cure


@pytest.fixture
def network(monkeypatch):
    """A machine with two addresses and the loopback, and names."""
    names = {"p": ["10.0.0.6", "fd00::6"], "debian": ["127.0.1.1", "10.0.0.6"], "six": ["fd00::6"],
             "local": ["127.0.1.1"], "other": ["10.0.0.7"], "broker": ["10.0.0.5", "fd00::5"]}

    def look_up(host, port, **_):
        if host not in names and not (host[0].isdigit() or ":" in host):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET6 if ":" in one else socket.AF_INET, 1, 6, "", (one, port))
                for one in reversed(names.get(host, [host]))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(addresses, "is_own", lambda host: host in ("10.0.0.6", "fd00::6") or host.startswith("127."))
    routes = {"10.0.0.5": "10.0.0.6", "fd00::5": "fd00::6", "127.0.0.1": "127.0.0.1", "10.0.0.6": "10.0.0.6"}
    monkeypatch.setattr(addresses, "address_towards", routes.get)


@pytest.mark.parametrize("name, address", [
    ("p", "10.0.0.6"), ("six", "[fd00::6]"), ("debian", "10.0.0.6"), ("local", "127.0.1.1")])
def test_a_name_in_bind_is_the_address_that_it_stands_for(network, files, name, address):
    config = PDConfig.parse("kv_both", {**BROKER, **files, "bind": f"tcp://{name}:5702"})
    assert config.bind == f"tcp://{address}:5702"
    assert parse_bind("--bind", f"tcp://{name}:5700", keyed=True)[0] == address.strip("[]")


@pytest.mark.parametrize("name, said", [
    ("nobody", "nobody has no address (Name or service not known): write a name that this machine can look up"),
    ("other", "other is 10.0.0.7, and no interface of this machine has that address: write one of its own")])
def test_b80_a_name_in_bind_that_is_not_of_this_machine(network, files, name, said):
    error = refused("kv_both", {**BROKER, **files, "bind": f"tcp://{name}:0"})
    assert error.key == "bind" and said in str(error) and f"'tcp://{name}:0'" in str(error)


@pytest.mark.parametrize("broker, bind, address", [
    ("127.0.0.1:5700", "auto", "127.0.0.1:0"), ("10.0.0.5:5700", "auto", "10.0.0.6:0"),
    ("10.0.0.5:5700", "tcp://auto:5702", "10.0.0.6:5702"), ("[fd00::5]:1", "tcp://auto:*", "[fd00::6]:0"),
    ("broker:5700", "auto", "10.0.0.6:0"), ("10.0.0.6:5700", "auto", "10.0.0.6:0"),
    ("nobody:1,tls://10.0.9.9:1,tls://10.0.0.5:1", "auto", "10.0.0.6:0")])
def test_auto_is_the_address_that_leads_to_the_broker(network, files, broker, bind, address):
    scheme = "tls" if "tls" in broker else "tcp"
    del files["nats_ca"]
    config = PDConfig.parse("kv_both", {**files, "bind": bind, "broker": f"{scheme}://{broker}"})
    assert config.bind == f"tcp://{address}"


@pytest.mark.parametrize("key, extra, said", [
    ("bind", {"broker": "tcp://10.0.9.9:5700"}, "no route to the broker at 10.0.9.9: mend that, or write an address"),
    ("broker", {"broker": "tcp://nobody:5700"}, "nobody has no address (Name or service not known)"),
    ("bind", {"broker": "tcp://10.0.0.5:1", "bind": "tcp://auto:x"}, "its port is not a number"),
    ("broker", {"broker": 5}, "it must be a string")])
def test_b80_auto_without_a_way_to_the_broker(network, files, key, extra, said):
    error = refused("kv_both", {"bind": "auto", **files, **extra})
    assert error.key == key and said in str(error)


def test_b82_auto_beyond_the_loopback_needs_keys(network, files):
    error = refused("kv_both", {"bind": "auto", "broker": "nats://10.0.0.5:4222",
                                "nats_credentials": files["nats_credentials"]})
    assert error.key == "bind" and "'auto'" in str(error) and "it is 10.0.0.6; beyond this machine's" in str(error)


def test_auto_is_for_engines(network):
    with pytest.raises(ConfigError, match="--bind='auto' can't be used: write it like tcp://127.0.0.1:5700"):
        parse_bind("--bind", "auto", keyed=True)


def test_b80_broker_needs_a_port_of_its_own():
    with pytest.raises(ConfigError, match="1..65535"):
        parse_endpoint("broker", "tcp://127.0.0.1:0")
    assert parse_bind("bind", "tcp://127.0.0.1:0", any_port=True) == ("127.0.0.1", 0)


def documented() -> dict[str, tuple[str, str]]:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \|", DOCUMENT.read_text().partition("\n## Beyond")[0],
                      flags=re.MULTILINE)
    return {name: (default.strip().strip("`"), allowed.strip()) for name, default, allowed in rows}


def test_document_has_every_key_with_its_default_and_range():
    table = documented()
    assert list(table) == [key.name for key in PDConfig.settings()]
    for key in PDConfig.settings():
        default, allowed = table[key.name]
        assert default == ("required" if key.default is dataclasses.MISSING else str(key.default)), key.name
        assert key.metadata["rule"].range_text() in allowed, key.name


def test_document_quotes_the_errors_as_they_are():
    quoted = re.findall(r"^\| `(\w+)`[^|]*\| `([^`]+)` \| `([^`]+)` \|$", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert {name for name, _, _ in quoted} >= {key.name for key in PDConfig.settings()}
    for name, setting, message in quoted:
        extra = {} if setting == "(none)" else json.loads(setting)
        assert str(refused("kv_consumer", {**BROKER, **extra} if setting != "(none)" else {})) == message, name


@pytest.mark.parametrize("given, meant", [
    ("BROKER", "broker"), ("Max_Local_Prefill_Tokens", "max_local_prefill_tokens"),
    ("maxLocalPrefillTokens", "max_local_prefill_tokens"), ("Lease_S", "lease_s")])
def test_b80_a_key_in_capitals_gets_the_suggestion(given, meant):
    error = refused("kv_consumer", {**BROKER, given: 1})
    assert error.key == given and f"did you mean {meant}?" in str(error)


def test_b80_a_list_of_nats_servers_with_one_scheme_gets_the_right_form():
    error = refused("kv_consumer", {"broker": "nats://127.0.0.1:4222,127.0.0.1:4223"})
    assert "write nats:// before each server, like nats://127.0.0.1:4222,nats://127.0.0.1:4223" in str(error)
    mixed = refused("kv_consumer", {"broker": "tls://127.0.0.1:4222,nats://127.0.0.1:4223"})
    assert "like tls://127.0.0.1:4222,tls://127.0.0.1:4223" in str(mixed)
