# SPDX-License-Identifier: Apache-2.0
"""The fleet: a broker, prefill engines P0 and P1, decode engines D0 and D1. A place outlives its engines."""
import dataclasses
import time
from collections.abc import Sequence

from _connectors.serve import ForkedServer, ServerFactory

from _behind.versions import NamedVersion
from vllm_pd.bench.servers import HOST, Server, Servers
from vllm_pd.errors import PDError
from vllm_pd.ops.launch.plan import transfer_config
from vllm_pd.protocol.messages import Role
from vllm_pd.rpc.ports import take_free

BLOCK_SIZE = 32
STOP_S = 90.0
# One thread for each engine, on no core of its own: there may be fewer cores than engines.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "INFO"}
PD = {"max_local_prefill_tokens": 100, "lease_s": 10.0, "ttl_s": 5.0, "drain_timeout_s": 60.0}


@dataclasses.dataclass
class EnginePlace:
    """A place of an engine: always the same name, role and port. `life` counts its engines."""
    name: str
    role: Role
    port: int
    life: int = 0
    server: ForkedServer | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def address(self) -> str:
        """As Envoy names it."""
        return f"{HOST}:{self.port}"


class BehindFleet:
    """All processes but the gateway. `version`: what engines and brokers name that are started from now on."""

    def __init__(self, engines: ServerFactory, beside: Servers, model: str, context: int) -> None:
        self.version = NamedVersion()
        self.places = {f"{letter}{number}": EnginePlace(f"{letter}{number}", role, take_free(HOST))
                       for letter, role in (("P", Role.PREFILL), ("D", Role.DECODE)) for number in range(2)}
        self._engines, self._beside, self._model, self._context = engines, beside, model, context
        self._broker_port = take_free(HOST)
        self._broker: Server | None = None

    def of(self, role: Role) -> list[EnginePlace]:
        """The places of this role."""
        return [place for place in self.places.values() if place.role is role]

    def arguments(self) -> list[str]:
        """Of `vllm serve`, for each engine, the one alone too. Without a prefix cache, because the questions repeat."""
        return [self._model, "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE), "--max-num-seqs",
                "16", "--max-model-len", str(self._context), "--max-num-batched-tokens", str(self._context),
                "--num-gpu-blocks-override", "256", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]

    def start_broker(self) -> None:
        """Starts a broker of the present version, always at the same address."""
        command, env = self.version.broker_command(f"tcp://{HOST}:{self._broker_port}")
        self._broker = self._beside.start("broker", self._broker_port, command, env=env)

    def stop_broker(self, kill: bool) -> None:
        """SIGTERM or SIGKILL. Returns when it has ended. Raises PDError."""
        (self._broker.child.kill if kill else self._broker.child.stop)()
        if not self._broker.child.wait(time.monotonic() + STOP_S):
            raise PDError("the broker does not end")

    def start(self, *names: str) -> None:
        """Starts engines of the present version in these places. Returns when they serve. Raises PDError."""
        target, more = self.version.serving()
        for place in self._at(names):
            place.life += 1
            config = transfer_config(place.role, f"tcp://{HOST}:{self._broker_port}", PD)
            place.server = self._engines.start(f"{place.name}.{place.life}", place.port,
                                               [*self.arguments(), "--kv-transfer-config", config], ENVIRONMENT,
                                               target, **more)
        for place in self._at(names):
            place.server.await_ready()

    def stop(self, *names: str) -> None:
        """SIGTERM, so that they drain. Returns when they have ended. Raises PDError."""
        for place in self._at(names):
            place.server.stop(STOP_S)

    def kill(self, name: str) -> None:
        """SIGKILL to all processes of an engine."""
        self.places[name].server.kill()

    def _at(self, names: Sequence[str]) -> list[EnginePlace]:
        return [self.places[name] for name in names]
