# SPDX-License-Identifier: Apache-2.0
"""The guard of this folder (conftest.py) can fail."""
import os
import socket
import subprocess
import sys
import threading

import pytest
import zmq


@pytest.mark.parametrize("act", [
    socket.socket, socket.socketpair, zmq.Context, lambda: threading.Thread(target=print).start(),
    lambda: subprocess.run([sys.executable, "-V"]), lambda: os.fork() or os._exit(0),
], ids=["socket", "socketpair", "zmq", "thread", "process", "fork"])
def test_what_is_not_pure_fails_here(act):
    with pytest.raises(AssertionError, match="tests/sockets"):
        act()
