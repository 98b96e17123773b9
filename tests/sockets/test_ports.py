# SPDX-License-Identifier: Apache-2.0
"""Ports that are looked for before anybody listens on them."""

import errno
import re
import socket

import pytest

from vllm_pd.errors import ConfigError
from vllm_pd.rpc import ports as module
from vllm_pd.rpc.ports import is_free, release, require_free, reserve, take_free, take_free_run

HOST = "127.0.0.1"


def test_a_free_port_is_none_that_the_kernel_gives_away_and_is_given_once(tmp_path, monkeypatch):
    """Half a minute may pass until a server listens on it, and connections take the kernel's ports meanwhile."""
    (tmp_path / "range").write_text("20000\t60999\n")
    monkeypatch.setattr(module, "_KERNELS_RANGE", tmp_path / "range")
    ports = [take_free(HOST) for _ in range(50)]
    first = take_free_run(HOST, 4)
    ports += [*range(first, first + 4), take_free(HOST)]
    assert len(set(ports)) == len(ports)
    assert max(ports) < 20000


@pytest.mark.parametrize("host, family, shown", [(HOST, socket.AF_INET, HOST), ("::1", socket.AF_INET6, "[::1]")])
def test_b80_a_taken_port_is_refused_and_never_taken_again(host, family, shown):
    port = take_free(host)
    assert is_free(host, port)
    with socket.create_server((host, port), family=family):
        assert not is_free(host, port)
        with pytest.raises(ConfigError, match=f"bind='{re.escape(shown)}:{port}'.*in use"):
            require_free("bind", host, [port])
    require_free("bind", host, [port])


@pytest.mark.parametrize("host, words", [
    ("203.0.113.1", "Cannot assign requested address: write an address"),
    ("2001:db8::1", "Cannot assign requested address: write an address"),
    ("no-such-host.invalid", ": write an address of this machine")])
def test_b80_an_address_of_another_machine_is_no_port_in_use(host, words):
    with pytest.raises(ConfigError, match=words) as refused:
        require_free("--bind", host, [take_free(HOST)])
    assert "in use" not in refused.value.cure and not is_free(host, take_free(HOST))


def test_b80_a_port_of_the_system_is_no_port_in_use(monkeypatch):
    def bind(probe: socket.socket, address: tuple) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "socket", type("Socket", (socket.socket, ), {"bind": bind}))
    with pytest.raises(ConfigError, match="--port='127.0.0.1:80'.*Permission denied: write a port at which you may"):
        require_free("--port", HOST, [80])


def test_b80_a_reserved_port_is_refused_until_it_is_released():
    first = take_free_run(HOST, 3)
    held = reserve("--port", HOST, [first + 2])
    with pytest.raises(ConfigError, match=f"--port='{HOST}:{first + 2}'.*another `vllm-pd up`") as refused:
        reserve("--port", HOST, range(first, first + 3))
    release(reserve("--port", HOST, range(first, first + 2)))  # what was reserved before the refusal
    assert refused.value.key == "--port"
    release(held)
    release(reserve("--port", HOST, range(first, first + 3)))
