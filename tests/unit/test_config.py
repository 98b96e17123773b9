# SPDX-License-Identifier: Apache-2.0
"""B80, B82: what an engine's settings may be; a refusal names the key, the value and what to write instead."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from vllm_pd.config import KV_ROLES, PDConfig, parse_endpoint
from vllm_pd.core.messages import Role
from vllm_pd.errors import ConfigError

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


def test_every_key_can_be_set():
    extra = {"broker": "tcp://127.0.0.2:5701", "bind": "tcp://127.0.0.1:5702", "max_local_prefill_tokens": 0,
             "max_queue_length": 1, "max_parked_fraction": 1, "max_prefill_jobs": 3, "lease_s": 9,
             "attempt_deadline_s": 8.5, "attempts": 3, "max_fallback_share": 1, "claim_retry_s": 0.25, "heartbeat_s": 0.5, "ttl_s": 4}
    assert set(extra) == {key.name for key in PDConfig.settings()}
    config = dataclasses.asdict(PDConfig.parse("kv_both", extra))
    assert {**config, **extra} == config
    assert isinstance(config["lease_s"], float) and isinstance(config["max_parked_fraction"], float)


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
               for key in PDConfig.settings() for value in (None, [], {}, True, "1" if key.type is not str else 1)]


@pytest.mark.parametrize("name, value", WRONG_TYPES + [("max_queue_length", 1.5), ("max_local_prefill_tokens", 2.0)])
def test_b80_wrong_type(name, value):
    error = refused("kv_consumer", {**BROKER, name: value})
    assert error.key == name
    assert repr(value) in str(error)
    assert "must be" in str(error)


@pytest.mark.parametrize("name, value", [
    ("max_local_prefill_tokens", -1), ("max_queue_length", 0), ("max_prefill_jobs", 0), ("max_parked_fraction", 0),
    ("max_parked_fraction", 1.01), ("max_parked_fraction", float("nan")), ("lease_s", 0), ("lease_s", -3),
    ("lease_s", float("inf")), ("lease_s", 10**400), ("attempt_deadline_s", 0), ("claim_retry_s", 0),
    ("heartbeat_s", 0), ("ttl_s", 0),
])
def test_b80_impossible_value(name, value):
    error = refused("kv_consumer", {**BROKER, name: value})
    assert error.key == name and "must be" in str(error)


@pytest.mark.parametrize("name, extra", [
    ("ttl_s", {"ttl_s": 1.5}), ("ttl_s", {"heartbeat_s": 3}), ("lease_s", {"lease_s": 1}),
    ("attempt_deadline_s", {"attempt_deadline_s": 2}),
])
def test_b80_values_that_contradict_each_other(name, extra):
    error = refused("kv_consumer", {**BROKER, **extra})
    assert error.key == name and "write" in str(error)


@pytest.mark.parametrize("name", ["broker", "bind"])
@pytest.mark.parametrize("value", ["", "127.0.0.1:5700", "tcp://127.0.0.1", "tcp://:5700", "ipc:///tmp/x", "tcp://",
                                   "tcp://127.0.0.1:port", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:-1",
                                   "tcp://127.0.0.1:\u0663"])
def test_b80_malformed_address(name, value):
    error = refused("kv_consumer", {**BROKER, name: value})
    assert error.key == name and "write it like tcp://127.0.0.1:" in str(error)


@pytest.mark.parametrize("name", ["broker", "bind"])
@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.0.0.7", "example.org", "[::1]", "127.0.0.1.example.org"])
def test_b82_beyond_loopback(name, host):
    error = refused("kv_consumer", {**BROKER, name: f"tcp://{host}:5700"})
    assert error.key == name and host in str(error) and "loopback" in str(error) and "127.0.0.1" in error.cure


def test_addresses_are_normalised():
    config = PDConfig.parse("kv_consumer", {"broker": "tcp://localhost:5700", "bind": "tcp://localhost:*"})
    assert (config.broker, config.bind) == ("tcp://127.0.0.1:5700", "tcp://127.0.0.1:0")


def test_b80_broker_needs_a_port_of_its_own():
    with pytest.raises(ConfigError, match="1..65535"):
        parse_endpoint("broker", "tcp://127.0.0.1:0")
    assert parse_endpoint("bind", "tcp://127.0.0.1:0", any_port=True) == ("127.0.0.1", 0)


def documented() -> dict[str, tuple[str, str]]:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \|", DOCUMENT.read_text().partition("## Errors")[0],
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
