# SPDX-License-Identifier: Apache-2.0
"""Commands that a build runs, and the one error that a build raises."""

import shlex
import subprocess
from pathlib import Path


class BuildError(RuntimeError):
    """Something cannot be built or fetched. The text says what, and the last lines of the command that failed."""


def run(command: list[str | Path], *, env: dict[str, str] | None = None, last_chars: int = 4000) -> str:
    """Run a command quietly; its stdout. BuildError if it fails or does not exist.

    The child inherits the lock of the cache folder (``cache.lock``): if this process is killed and its child goes on
    writing, the next run waits for it.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=env, close_fds=False, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise BuildError(f"{words[0]}: not found") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-last_chars:]
        raise BuildError(f"exit status {done.returncode} of: {shlex.join(words)[:500]}\n{said}")
    return done.stdout
