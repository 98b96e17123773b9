# SPDX-License-Identifier: Apache-2.0
"""A prefill engine (P) and a decode engine (D) of stock vLLM with one connector, ours or one of upstream's.

Both are `vllm serve`, each in a process group of its own, so that a signal reaches all of its processes. A request goes
to D where the connector is ours. Upstream's need a proxy: P gets the prompt first, for one token and with
`do_remote_decode`; then D gets it with the `kv_transfer_params` of P's answer. `EnginePair.ask` does both in the way of
upstream's toy proxy server, with the same X-Request-Id for both engines, which the push connector needs. Ours takes
requests in that way, too: that is `OURS_FIRST`.
"""
import asyncio
import itertools
import json
import statistics
import time
from dataclasses import dataclass
from enum import Enum
from typing import Any

from _connectors.serve import ForkedServer, ServerFactory
from vllm_pd.bench.connection import LoadConnection, LoadError
from vllm_pd.bench.load import GenerationAnswer, GenerationRequest, ask, generate
from vllm_pd.bench.prefill_first import REMOTE_DECODE, prefill_at
from vllm_pd.bench.servers import HOST, Servers
from vllm_pd.ops.launch.plan import BROKER, ROLE_NAMES, transfer_config
from vllm_pd.ops.scrape import scrape
from vllm_pd.protocol.messages import Role
from vllm_pd.rpc.ports import take_free

HANG_S = 60.0
REST_S = 40.0
LEASE_S = 6
BLOCK_SIZE = 32
PROBE = list(range(1000, 1020))  # stays local
UPSTREAM = {"kv_lease_duration": LEASE_S, "push_registration_timeout": 10.0}
OURS = {"lease_s": float(LEASE_S), "attempt_deadline_s": 30.0, "max_local_prefill_tokens": BLOCK_SIZE}
# One thread for each engine, on no core of its own: there may be fewer cores than engines.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "INFO",
               "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST}


class ConnectorName(Enum):
    """A connector, by vLLM's name of it, and the order in which it is used."""
    OURS = "PDConnector"
    OURS_FIRST = "PDConnector, prefill first"
    PULL = "NixlConnector"
    PUSH = "NixlPushConnector"

    @property
    def is_ours(self) -> bool:
        return self in (ConnectorName.OURS, ConnectorName.OURS_FIRST)

    @property
    def prefill_first(self) -> bool:
        """Whether a proxy asks P before D."""
        return self is not ConnectorName.OURS


@dataclass(frozen=True)
class EngineShape:
    """What all engines of a comparison have in common."""
    model: str
    pool_blocks: int
    context: int

    def arguments(self) -> list[str]:
        """Of `vllm serve`."""
        return [self.model, "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE),
                "--max-num-seqs", "8", "--max-model-len", str(self.context), "--max-num-batched-tokens", "512",
                "--num-gpu-blocks-override", str(self.pool_blocks), "--disable-uvicorn-access-log"]


class EnginePair:
    """P and D with one connector. `policy`: upstream's `kv_load_failure_policy`; ours sets its own."""

    def __init__(self, servers: ServerFactory, connector: ConnectorName, shape: EngineShape, policy: str) -> None:
        self.connector, self.shape = connector, shape
        self.decode_leg_s = 0.1  # what a request needs at D, see `warm_up`
        self._servers, self._policy = servers, policy
        self._numbers = itertools.count()
        self._ports = {role: (take_free(HOST), take_free(HOST)) for role in ROLE_NAMES}
        self._broker = f"tcp://{HOST}:{take_free(HOST)}"
        self._servers_by_role: dict[Role, ForkedServer] = {}
        self._beside = Servers(lambda *_: None)
        if connector.is_ours:
            self._beside.start("broker", 0, [*BROKER, "--bind", self._broker])

    @property
    def p(self) -> ForkedServer:
        return self._servers_by_role[Role.PREFILL]

    @property
    def d(self) -> ForkedServer:
        return self._servers_by_role[Role.DECODE]

    def start(self, *roles: Role) -> None:
        """Starts new engines in these roles, both without any, at the addresses of the last ones, which are killed.
        Returns when they serve."""
        roles = roles or tuple(ROLE_NAMES)
        for role in roles:
            if role in self._servers_by_role:
                self.kill(role)
        for role in roles:
            port, channel = self._ports[role]
            self._servers_by_role[role] = self._servers.start(
                f"{self.connector.value} {ROLE_NAMES[role]}", port,
                [*self.shape.arguments(), "--kv-transfer-config", self._configuration(role)],
                {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(channel)})
        for role in roles:
            self._servers_by_role[role].await_ready()

    async def warm_up(self, prompts: list[list[int]]) -> None:
        """Sends prompts, one by one, until D has loaded KV, so that the engines know each other and `decode_leg_s` is
        known. Raises LoadError, and OSError also where that does not come about within twice HANG_S."""
        took_s: list[float] = []
        async with asyncio.timeout(2 * HANG_S):
            for prompt in prompts:
                took_s.append((await self.ask(prompt, 2, stream=True)).ttft_s)
            while not await asyncio.to_thread(self.loaded_tokens):
                prompt = prompt[1:]  # a new one for the prefix cache
                took_s.append((await self.ask(prompt, 2, stream=True)).ttft_s)
        self.decode_leg_s = statistics.median(took_s)

    def loaded_tokens(self) -> int:
        """Of how many tokens D has got the KV from P since it started; 0 where it does not answer."""
        try:
            return int(scrape(self.d.url).value("vllm:external_prefix_cache_hits_total"))
        except OSError:
            return 0

    def signal(self, role: Role, number: int) -> None:
        """Sends a signal to all processes of an engine."""
        self._servers_by_role[role].signal(number)

    def kill(self, role: Role) -> None:
        """SIGKILL to all processes of an engine. Returns when they have ended."""
        self._servers_by_role[role].kill()

    def stop(self) -> None:
        """Kills both engines."""
        for role in self._servers_by_role:
            self.kill(role)
        with self._beside:
            pass

    def dead(self) -> list[str]:
        """The roles of the engines that do not serve."""
        return [ROLE_NAMES[role] for role, server in self._servers_by_role.items() if not server.is_live]

    async def ask(self, prompt: list[int], max_tokens: int, at_decode: asyncio.Event | None = None,
                  stream: bool = False) -> GenerationAnswer:
        """One request in the way of this connector. `at_decode` is set when it is sent to D. Raises LoadError and
        OSError. The answer's times are those of D's part."""
        headers = {"X-Request-Id": f"compare-{next(self._numbers)}"}
        params = await self.prefill(prompt, headers) if self.connector.prefill_first else None
        if at_decode is not None:
            at_decode.set()
        return await self.decode(prompt, max_tokens, params, headers, stream)

    async def decode(self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None,
                     headers: dict[str, str], stream: bool = False) -> GenerationAnswer:
        """Has D answer, with what `prefill` said. The times begin when the request is written."""
        request = GenerationRequest(prompt, max_tokens, stream=stream, ignore_eos=True, kv_transfer_params=params)
        with await LoadConnection.open(self.d.url) as connection:
            return await generate(connection, self.shape.model, request, headers)

    async def prefill(self, prompt: list[int], headers: dict[str, str] | None = None) -> dict[str, Any] | None:
        """Has P compute a prompt. What its answer says for D; None where D gets requests first."""
        params = REMOTE_DECODE if self.connector.prefill_first else None
        return await prefill_at(self.p.url, self.shape.model, prompt, headers, params)

    def left(self) -> dict[str, int]:
        """What is not at rest after at most REST_S: KV blocks in use and requests, by engine and gauge; {} where all
        is. Engines that do not serve are left out."""
        deadline = time.monotonic() + REST_S
        while True:
            found = {}
            for role, server in self._servers_by_role.items():
                if server.is_live:
                    found |= {f"{ROLE_NAMES[role]} {name}": count for name, count in self._gauges(server).items()}
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(1.0)

    def _gauges(self, server: ForkedServer) -> dict[str, int]:
        """The gauges that are not 0. An engine renews them with each step, so it gets a request first."""
        try:
            ask(server.url, self.shape.model, GenerationRequest(PROBE, 2, ignore_eos=True), timeout_s=10.0)
            time.sleep(0.3)
            page = scrape(server.url)
        except (LoadError, OSError):
            return {"no answer": 1}
        gauges = {"blocks": round(page.value("vllm:kv_cache_usage_perc") * (self.shape.pool_blocks - 1)),
                  "running": int(page.value("vllm:num_requests_running")),
                  "waiting": int(page.value("vllm:num_requests_waiting"))}
        return {name: count for name, count in gauges.items() if count}

    def _configuration(self, role: Role) -> str:
        if self.connector.is_ours:
            return transfer_config(role, self._broker, OURS)
        return json.dumps({"kv_connector": self.connector.value, "kv_role": role.value, "kv_buffer_device": "cpu",
                           "kv_load_failure_policy": self._policy, "kv_connector_extra_config": UPSTREAM})
