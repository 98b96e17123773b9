# SPDX-License-Identifier: Apache-2.0
"""Whether a wake-up may be written to a descriptor that was closed in the meantime, and may be another file's."""
import os
import threading
import time
from collections.abc import Callable

import pytest


def is_open_at_each_write(monkeypatch: pytest.MonkeyPatch, name: str, wake: Callable[[], object],
                          close: Callable[[], object]) -> bool:
    """Call `close` while `wake`, in another thread, is about to call the function of `os` with this name. Returns
    whether the descriptor was still open when it did."""
    real, entered, open_then = getattr(os, name), threading.Event(), []

    def write(descriptor: int, *rest: object) -> object:
        if entered.is_set():
            return real(descriptor, *rest)
        entered.set()
        time.sleep(0.3)
        try:
            os.fstat(descriptor)
        except OSError:
            open_then.append(False)
            return None
        open_then.append(True)
        return real(descriptor, *rest)

    monkeypatch.setattr(os, name, write)
    thread = threading.Thread(target=wake)
    thread.start()
    assert entered.wait(60.0)
    close()
    thread.join(60.0)
    monkeypatch.undo()
    return open_then == [True]
