# SPDX-License-Identifier: Apache-2.0
"""B109: the KV transport listens where `bind` is, and nowhere else. UCX obeys everybody who reaches it."""
import os
import re
import socket
import threading
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import psutil
import pytest

from vllm_pd.errors import ConfigError, TransferError
from vllm_pd.model.checks import check_nixl
from vllm_pd.ops.listening import Opener, Promise, find_opener, look
from vllm_pd.rpc.addresses import is_loopback
from vllm_pd.rpc.ports import is_free
from vllm_pd.transfer.nixl import devices
from vllm_pd.transfer.nixl.agent import NixlAgent
from vllm_pd.transfer.nixl.devices import (
    BRIDGES,
    FAMILY,
    PORTS,
    VARIABLE,
    check_variables,
    net_devices,
    only_devices_of,
)

OWN = [address.address for addresses in psutil.net_if_addrs().values() for address in addresses
       if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address
       and not is_loopback(address.address)]
LOOPBACKS = ["127.0.0.1", "127.0.0.9"] + ["::1"] * is_free("::1", 0)


def listening() -> set[str]:
    """Where this process listens, as `vllm-pd doctor` sees it."""
    return set(look([os.getpid()]).sockets)


@pytest.mark.parametrize("host", [*LOOPBACKS, *OWN])
def test_b109_an_agent_listens_at_its_host_alone(host):
    before = listening()
    agent = NixlAgent("listening", progress_thread=True, host=host)
    opened = listening() - before
    assert {urlsplit(url).hostname for url in opened} == {"127.0.0.1" if host.startswith("127.") else host}
    assert set(agent.listens) == opened and {find_opener(url, Promise(host)) for url in opened} == {None}
    assert agent.metadata() and VARIABLE not in os.environ and FAMILY not in os.environ


def test_b109_what_the_operator_has_set_counts(monkeypatch):
    monkeypatch.setenv(VARIABLE, "all")
    before = listening()
    agent = NixlAgent("all", progress_thread=True)
    opened = listening() - before
    assert {urlsplit(url).hostname for url in opened} >= {"127.0.0.1", *OWN[:1]} and agent.metadata()
    assert os.environ[VARIABLE] == "all"
    kv = frozenset(agent.listens)
    assert not OWN or Opener.KV in {find_opener(url, Promise("127.0.0.1", kv=kv)) for url in opened}
    assert Opener.KV not in {find_opener(url, Promise("127.0.0.1", kv=kv, devices_chosen=True)) for url in opened}


def test_devices_that_ucx_does_not_have_are_named(monkeypatch):
    monkeypatch.setenv(VARIABLE, "nosuch0")
    with pytest.raises(TransferError, match="no UCX with UCX_NET_DEVICES=nosuch0, as it was set: .*set UCX_NET_DEV"):
        NixlAgent("none", progress_thread=False)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """eth0 with two addresses of each kind, ib0 with one, a bridge, two RDMA cards of which one has two ports."""
    found = {"lo": ["127.0.0.1", "::1", "10.8.8.8"],
             "eth0": ["02:fc:00:00:00:01", "fe80::1%eth0", "10.0.0.6", "fd00::6", "fd00::7"],
             "eth0:1": ["10.0.0.7"], "ib0": ["10.1.0.6", "10.1.0.7"], "br0": ["10.2.0.6"], "down0": []}

    def kind(text: str) -> int:
        return psutil.AF_LINK if text.count(":") == 5 else socket.AF_INET6 if ":" in text else socket.AF_INET

    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {
        name: [SimpleNamespace(address=address, family=kind(address)) for address in addresses]
        for name, addresses in found.items()})
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(["lo", "eth0", "ib0", "br0", "down0"], 1)))
    monkeypatch.delenv(VARIABLE, raising=False)
    for port in ("mlx5_1/ports/1", "mlx5_0/ports/2", "mlx5_0/ports/1"):
        (tmp_path / "infiniband" / port).mkdir(parents=True)
    (tmp_path / "net" / "br0" / "bridge").mkdir(parents=True)
    return tmp_path


RDMA = "mlx5_0:1,mlx5_0:2,mlx5_1:1"


@pytest.mark.parametrize("host, chosen", [
    ("127.0.0.1", {VARIABLE: "lo"}), ("127.3.2.1", {VARIABLE: "lo"}), ("10.0.0.6", {VARIABLE: f"eth0,{RDMA}"}),
    ("10.1.0.6", {VARIABLE: f"ib0,{RDMA}"}), ("10.2.0.6", {VARIABLE: f"br0,{RDMA}", BRIDGES: "y"}),
    ("::1", {VARIABLE: "lo", FAMILY: "inet6,inet"}), ("fd00::6", {VARIABLE: f"eth0,{RDMA}", FAMILY: "inet6,inet"})])
def test_b109_the_interface_of_bind_and_the_rdma_ports(machine, host, chosen):
    assert net_devices(host, machine) == chosen


def test_without_rdma_the_interface_is_all(machine):
    assert net_devices("10.0.0.6", machine / "none") == {VARIABLE: "eth0"}


@pytest.mark.parametrize("host, said", [
    ("10.9.9.9", "no network interface of this machine has the address 10.9.9.9 of `bind`"),
    ("10.0.0.7", "UCX listens at 10.0.0.6, the first address of eth0, and not at 10.0.0.7 of `bind`: bind to 10.0.0.6"),
    ("fd00::7", "UCX listens at fd00::6, the first address of eth0, and not at fd00::7 of `bind`"),
    ("fd00::8", "no network interface of this machine has the address fd00::8 of `bind`"),
    ("10.1.0.7", "UCX listens at 10.1.0.6, the first address of ib0"),
    ("10.8.8.8", "UCX listens at 127.0.0.1, the first address of lo")])
def test_b109_where_ucx_would_listen_elsewhere_it_is_refused(machine, host, said):
    with pytest.raises(TransferError, match=re.escape(said)) as error:
        net_devices(host, machine)
    assert "or set UCX_NET_DEVICES" in str(error.value)


def test_b109_the_check_before_the_model_names_bind(machine):
    with pytest.raises(ConfigError, match="bind='10.0.0.7' can't be used: UCX listens at 10.0.0.6"):
        check_nixl("10.0.0.7")


@pytest.mark.parametrize("variable, value, said", [
    (VARIABLE, "eth0,nosuch0", "this machine has no network device nosuch0: write names of interfaces"),
    (VARIABLE, "mlx5_7:1", "this machine has no network device mlx5_7"), (VARIABLE, "^nosuch0", "device nosuch0"),
    (VARIABLE, "10.0.0.6", "this machine has no network device 10.0.0.6"),
    *((PORTS, value, "there is no such port: write the first and the last one, like 30000-30999")
      for value in ("30999-30000", "65000-65536", "70000", "30000-", "-1", "30000:30999", "any"))])
def test_b80_devices_and_ports_that_are_none_are_refused(machine, monkeypatch, variable, value, said):
    """UCX ignores such a device, and listens at another port."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=re.escape(f"{variable}={value!r} can't be used: ") + ".*" + re.escape(said)):
        check_variables(machine)


@pytest.mark.parametrize("variable, value", [
    (VARIABLE, "eth0,mlx5_0:1,mlx5_1"), (VARIABLE, "all"), (VARIABLE, "^lo"), (VARIABLE, "mlx5_*"), (VARIABLE, ""),
    (PORTS, "30000-30999"), (PORTS, "30000-30000"), (PORTS, "30000"), (PORTS, "0"), (PORTS, "")])
def test_what_ucx_understands_is_not_refused(machine, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    check_variables(machine)


def test_b80_the_check_before_the_model_looks_at_ucx_variables(monkeypatch):
    monkeypatch.setenv(PORTS, "2-1")
    with pytest.raises(ConfigError, match="UCX_TCP_PORT_RANGE='2-1' can't be used"):
        check_nixl("127.0.0.250")


def test_the_variables_are_gone_after_an_error(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # as good as not set
    monkeypatch.setenv(BRIDGES, "n")
    monkeypatch.setattr(devices, "net_devices", lambda host: {VARIABLE: "br0", BRIDGES: "y"})
    with pytest.raises(ZeroDivisionError), only_devices_of("10.2.0.6") as chosen:
        assert (os.environ[VARIABLE], os.environ[BRIDGES], chosen) == ("br0", "n", "UCX_NET_DEVICES=br0")
        raise ZeroDivisionError
    assert (os.environ[VARIABLE], os.environ[BRIDGES]) == ("", "n")


def test_of_two_agents_at_once_each_finds_its_own(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(devices, "net_devices", lambda host: {VARIABLE: host})
    seen: dict[str, str] = {}

    def make(host: str) -> None:
        with only_devices_of(host):
            time.sleep(0.05)
            seen[host] = os.environ[VARIABLE]

    threads = [threading.Thread(target=make, args=(f"10.0.0.{number}", )) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4 and all(host == found for host, found in seen.items()) and VARIABLE not in os.environ
