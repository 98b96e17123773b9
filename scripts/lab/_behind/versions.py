# SPDX-License-Identifier: Apache-2.0
"""Engines and brokers that name another version than theirs, for the upgrade of a fleet where only one is installed.

    python -m _behind.versions PROTOCOL broker --bind ADDRESS      `vllm-pd broker` with that version of our protocol

The code is the same. Another protocol stands in each frame, so no process of another one reads it; another release of
vLLM stands in the fingerprint, so peers of another one refuse.
"""
import sys
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from _connectors.serve import serve

from vllm_pd.protocol.messages import PROTOCOL

LAB = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class NamedVersion:
    """What an engine says that it is. `release`: of vLLM, like 0.33; "" leaves it as it is."""
    protocol: int = PROTOCOL
    release: str = ""

    def assume(self) -> None:
        """From now on this process, and what it forks, names this version. Before it has opened a socket."""
        from vllm_pd.protocol import messages
        from vllm_pd.rpc import codec
        messages.PROTOCOL = self.protocol
        codec._framing = codec.Framing(b"PD", self.protocol, messages.Envelope, "protocol")
        if fingerprint := sys.modules.get("vllm_pd.v1.fingerprint"):
            fingerprint.PROTOCOL = self.protocol
        if self.release:
            import vllm
            vllm.__version__ = f"{self.release}.0"

    def broker_command(self, address: str) -> tuple[list[str], dict[str, str]]:
        """The command of a broker that has this version, and what it needs in its environment."""
        return ([sys.executable, "-m", "_behind.versions", str(self.protocol), "broker", "--bind", address],
                {"PYTHONPATH": str(LAB)})

    def serving(self) -> tuple[str, dict[str, object]]:
        """For `ServerFactory.start`: the function of the child, and its further arguments."""
        return "_behind.versions:serve_as", asdict(self)


def serve_as(pipe: Connection, arguments: list[str], env: dict[str, str], log: str, protocol: int,
             release: str) -> None:
    """The child of a zygote: `vllm serve` that names this version."""
    NamedVersion(protocol, release).assume()
    serve(pipe, arguments, env, log)


if __name__ == "__main__":
    NamedVersion(int(sys.argv.pop(1))).assume()
    from vllm_pd.cli import main
    sys.exit(main())
