# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend's own proxy of the metaserver form, run as it is. The file is not ours, and so not here."""
import os
import subprocess
import sys
from pathlib import Path

from tests import asking
from tests.waiting import wait_for
from vllm_pd.rpc.ports import take_free

HOST, CLOSE_S = "127.0.0.1", 20.0
# What it takes of its own package, which loads beside its hardware only: one name.
LAUNCH = """
import runpy, sys, types
parts = "vllm_ascend.distributed.kv_transfer.kv_p2p.sfa_pd_rd2h.protocol".split(".")
for length in range(1, len(parts) + 1):
    name = ".".join(parts[:length])
    sys.modules[name] = types.ModuleType(name)
sys.modules[name].BATCH_KV_TRANSFER_PARAMS = "batch_kv_transfer_params"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class AscendProxy:
    """The process that runs `script`, which writes its access log to `log`. `base` is its URL and `url` that of its
    metaserver, which are known before it is `start`ed."""

    def __init__(self, script: str, log: Path) -> None:
        self.port = take_free(HOST)
        self.base = f"http://{HOST}:{self.port}"
        self.url = self.base + "/v1/metaserver"
        self._script = script
        self._log = log
        self._process = None

    def start(self, decoders: list[str], producers: list[str]) -> None:
        """Returns when it serves. `decoders`, `producers`: the URLs of the engines."""
        instances = [word for name, urls in (("decoder", decoders), ("prefiller", producers))
                     for word in (f"--{name}-hosts", *[HOST] * len(urls),
                                  f"--{name}-ports", *[url.rpartition(":")[2] for url in urls])]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, self._script, "--host", HOST, "--port", str(self.port), *instances],
                stdout=log, stderr=log, env={**os.environ, "VLLM_PLUGINS": ""})
        wait_for(lambda: self._process.poll() is None and self._serves(), self.log_text)

    def log_text(self) -> str:
        """What it has said until now."""
        return self._log.read_text() if self._log.exists() else ""

    def answers(self, path: str) -> list[int]:
        """The statuses of its answers to `path` until now."""
        lines = [line.partition(f'"POST {path} HTTP/1.1" ')[2] for line in self.log_text().splitlines()]
        return [int(line.split()[0]) for line in lines if line]

    def _serves(self) -> bool:
        try:
            return asking.request(self.base, "GET", "/healthcheck")[0] == 200
        except OSError:
            return False

    def close(self) -> None:
        """Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(CLOSE_S)
