# SPDX-License-Identifier: Apache-2.0
"""The tests here are pure: no sockets, threads or processes. What needs them belongs to tests/sockets."""
import os
import socket
import subprocess
import threading

import matplotlib.font_manager  # noqa: F401  the first time on a machine it asks a process for the fonts, and a thread
import pytest
import zmq

FORBIDDEN = ((socket.socket, "__init__"), (zmq.Context, "__init__"), (threading.Thread, "start"),
             (subprocess.Popen, "__init__"), (os, "fork"))


@pytest.fixture(autouse=True)
def pure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that does what is FORBIDDEN here."""
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("tests/unit has no sockets, threads or processes; this test belongs to tests/sockets")

    for owner, name in FORBIDDEN:
        monkeypatch.setattr(owner, name, refuse)
