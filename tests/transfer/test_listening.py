# SPDX-License-Identifier: Apache-2.0
"""B109: the KV transport listens where `bind` is, and nowhere else. UCX does what anybody says who reaches it."""
import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from vllm_pd.errors import TransferError
from vllm_pd.transfer.nixl import devices
from vllm_pd.transfer.nixl.agent import NixlAgent
from vllm_pd.transfer.nixl.devices import VARIABLE, net_devices, only_devices_of

OWN = [address.address for addresses in psutil.net_if_addrs().values() for address in addresses
       if address.family == socket.AF_INET and not address.address.startswith("127.")]


def listening() -> set[tuple[str, int]]:
    """Where this process listens."""
    return {(one.laddr.ip, one.laddr.port) for one in psutil.Process().net_connections("inet")
            if one.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", *OWN[:1]])
def test_b109_an_agent_listens_at_its_host_alone(host):
    before = listening()
    agent = NixlAgent("listening", progress_thread=True, host=host)
    assert {ip for ip, _ in listening() - before} == {"127.0.0.1" if host.startswith("127.") else host}
    assert agent.metadata() and VARIABLE not in os.environ


def test_b109_what_the_operator_has_set_counts(monkeypatch):
    monkeypatch.setenv(VARIABLE, "all")
    before = listening()
    agent = NixlAgent("all", progress_thread=True)
    assert {ip for ip, _ in listening() - before} >= {"127.0.0.1", *OWN[:1]} and agent.metadata()
    assert os.environ[VARIABLE] == "all"


def test_devices_that_ucx_does_not_have_are_named(monkeypatch):
    monkeypatch.setenv(VARIABLE, "nosuch0")
    with pytest.raises(TransferError, match="no UCX with UCX_NET_DEVICES=nosuch0: .*set that variable"):
        NixlAgent("none", progress_thread=False)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """eth0 with two addresses, ib0 with one, two RDMA cards of which one has two ports."""
    found = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.6", "fe80::1%eth0", "02:fc:00:00:00:01"],
             "eth0:1": ["10.0.0.7"], "ib0": ["10.1.0.6"], "down0": []}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {
        name: [SimpleNamespace(address=address) for address in addresses] for name, addresses in found.items()})
    for port in ("mlx5_1/ports/1", "mlx5_0/ports/2", "mlx5_0/ports/1"):
        (tmp_path / port).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("host, chosen", [
    ("127.0.0.1", "lo"), ("127.3.2.1", "lo"), ("10.0.0.6", "eth0,mlx5_0:1,mlx5_0:2,mlx5_1:1"),
    ("10.0.0.7", "eth0,mlx5_0:1,mlx5_0:2,mlx5_1:1"), ("10.1.0.6", "ib0,mlx5_0:1,mlx5_0:2,mlx5_1:1")])
def test_b109_the_interface_of_bind_and_the_rdma_ports(machine, host, chosen):
    assert net_devices(host, machine) == chosen


def test_without_rdma_the_interface_is_all(machine):
    assert net_devices("10.0.0.6", machine / "none") == "eth0"


def test_an_address_that_nobody_here_has_is_named(machine):
    with pytest.raises(TransferError, match="address 10.9.9.9 of `bind`"):
        net_devices("10.9.9.9", machine)


def test_the_variable_is_gone_after_an_error(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(devices, "net_devices", lambda host: "lo")
    with pytest.raises(ZeroDivisionError), only_devices_of("127.0.0.1") as chosen:
        assert os.environ[VARIABLE] == chosen == "lo"
        raise ZeroDivisionError
    assert VARIABLE not in os.environ
