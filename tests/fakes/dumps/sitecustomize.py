# SPDX-License-Identifier: Apache-2.0
"""Python imports this at its start where the folder is in PYTHONPATH: on SIGUSR2 the process writes where each of its
threads is into its own file below VLLM_PD_DUMPS. That works while a thread holds the interpreter's lock in C code, too.
"""
import faulthandler
import os
import signal


def _register() -> None:
    try:
        path = os.path.join(os.environ["VLLM_PD_DUMPS"], str(os.getpid()))
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except (KeyError, OSError):  # the tests are over
        return
    faulthandler.register(signal.SIGUSR2, file)


_register()
os.register_at_fork(after_in_child=_register)
