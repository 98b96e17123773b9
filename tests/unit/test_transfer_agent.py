# SPDX-License-Identifier: Apache-2.0
"""B27: what the NIXL library raises ends one transfer or one peer, whatever its type is."""
import sys
from types import SimpleNamespace

import psutil
import pytest

from vllm_pd.errors import TransferError
from vllm_pd.transfer.nixl import agent
from vllm_pd.transfer.nixl.agent import NixlAgent


class Library:
    """As much of NIXL's bindings as an agent uses. Each post raises `error`."""
    nixlAgentConfig = SimpleNamespace

    class nixlBackendError(Exception):
        """Of the library's own; they share no base class."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def nixlAgent(self, name: str, config: object) -> SimpleNamespace:
        return SimpleNamespace(createBackend=lambda kind, options: 0, postXferReq=self._post)

    def _post(self, handle: int) -> None:
        raise self._error("injected")


class LibraryWithoutUcx(Library):
    """No backend can be made."""

    def nixlAgent(self, name: str, config: object) -> SimpleNamespace:
        return SimpleNamespace(createBackend=lambda kind, options: self._post(0))


@pytest.mark.parametrize("is_up, said", [
    (True, "install nixl again, or set UCX_NET_DEVICES"), (False, "injected: fab0 is down, switch it on")])
def test_b107_where_no_agent_can_be_made_the_error_names_the_interface_that_is_down(is_up, said, monkeypatch):
    """B107: ib0 is none that UCX is to use, and fab1 is not there."""
    monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_bindings=LibraryWithoutUcx(RuntimeError)))
    monkeypatch.setattr(agent, "listening", set)
    monkeypatch.setenv("UCX_NET_DEVICES", "fab0,fab1,eth0")
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=up) for name, up in (
        ("fab0", is_up), ("eth0", True), ("ib0", False))})
    with pytest.raises(TransferError, match=said):
        NixlAgent("p", progress_thread=False)


@pytest.mark.parametrize("error", [Library.nixlBackendError, RuntimeError, MemoryError, ValueError, TypeError])
def test_b27_a_post_that_raises_has_failed(error, monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_bindings=Library(error)))
    monkeypatch.setattr(agent, "listening", set)
    with pytest.raises(TransferError, match=f"{error.__name__}: injected"):
        NixlAgent("p", progress_thread=False).post(1)
