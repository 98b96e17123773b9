# SPDX-License-Identifier: Apache-2.0
"""V1's real scheduler with our binding, over simulated memory: no model, no engine, no peers, about 0.1 ms a step.

Each slot of a block holds what was last written there: all tokens up to its position, as a number. A step writes the
slots that a model runner would compute and reads all those before them; reading anything but the request's own past is
an error at once. Tokens are a function of their past, so a wrong answer shows too. A step is executed as late as the
device may: when its output is processed, after further steps were scheduled (`in_flight`).

What a peer may write is known from the jobs that the binding submits. `Engine.write` is its write, at any time that
the test likes, as long as the attempt's fence is up.
"""
import collections
import json
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, LoRAConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_pd.handover.jobs import PrefillCapacity
from vllm_pd.model.adapters import digest_adapter, look_at
from vllm_pd.peer.cluster import QueueView
from vllm_pd.peer.own_jobs import PrefillLoads
from vllm_pd.protocol import actions, messages
from vllm_pd.protocol.actions import AttemptEnd, Fallback, FallbackReason, Prefilled, Released
from vllm_pd.protocol.messages import Attempt
from vllm_pd.protocol.metaserver import request_of
from vllm_pd.protocol.scope import NO_SCOPE, PromptScope
from vllm_pd.settings.engine import PDConfig
from vllm_pd.transfer.requests import Finished, Read, TransferProgress, Write
from vllm_pd.v1 import scheduler as scheduler_module
from vllm_pd.v1.binding import V1Handover
from vllm_pd.v1.groups import block_rows, draft_blocks
from vllm_pd.v1.metrics import MetricsRecorder

BLOCK_SIZE = 16
LORA_SETTINGS = "auto [] False"
VOCAB = 4099
STAGES = 1  # of the pipeline: with more, V1 has several steps in flight without async scheduling
OWN = "own-incarnation"
PEER = "peer-incarnation"


class WrongRead(AssertionError):
    """A step read what is not its request's past."""


class WrongWrite(AssertionError):
    """A peer wrote where it was not allowed to."""


def write_model(folder: Path) -> Path:
    """A tiny Llama's configuration; no weights."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64,
              "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
              "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def digest(past: int, token: int) -> int:
    """The content of a slot: a token after that past."""
    return hash((past, token))  # of numbers: the same in each process


def seed_of(salt: str | None, adapter: bytes = b"") -> int:
    """What comes before the first token of a prompt with this salt and the adapter with this digest. A model computes
    the same with any salt; here other KV is other content, so that a block which two scopes share is seen."""
    return zlib.crc32((salt or "").encode() + adapter) if salt or adapter else 0


def request_seed(request: Request) -> int:
    """That of a request, by the files that its adapter has now: the workers may load it again at any step."""
    adapter = request.lora_request
    if adapter is None or not Path(adapter.lora_path).is_dir():
        return seed_of(request.cache_salt, b"" if adapter is None else adapter.lora_path.encode())
    folder = Path(adapter.lora_path)
    return seed_of(request.cache_salt, digest_adapter(folder, look_at(folder), LORA_SETTINGS))


class ScopedTokens(list):
    """Tokens, and what comes before them: `seed_of` their salt. So has each part that begins with the first one."""

    def __init__(self, token_ids: Iterable[int], seed: int) -> None:
        super().__init__(token_ids)
        self.seed = seed

    def __getitem__(self, key):
        found = super().__getitem__(key)
        return ScopedTokens(found, self.seed) if isinstance(key, slice) and not key.start else found

    def __add__(self, others):
        return ScopedTokens(super().__add__(others), self.seed)


def contents(token_ids: list[int]) -> list[int]:
    """The right contents of the slots of these tokens."""
    past, found = getattr(token_ids, "seed", 0), []
    for token in token_ids:
        past = digest(past, token)
        found.append(past)
    return found


def answer(prompt: list[int], tokens: int) -> list[int]:
    """What a model without disaggregation says to this prompt."""
    past, found = contents(prompt)[-1], []
    for _ in range(tokens):
        found.append(past % VOCAB)
        past = digest(past, found[-1])
    return found


def is_of(key: str, attempt: Attempt) -> bool:
    """Whether a write of this key is one of the attempt's."""
    return key == str(attempt) or (key.startswith("chunk ") and key.endswith(f" of {attempt}"))


class FakeProtocol:
    """In the place of `PeerProtocol` and of its sessions: records what the binding asks for, and has the events that
    the test puts."""

    def __init__(self, role: messages.Role) -> None:
        self.decode = self.prefill = self.operators = self
        self.closed: list[Attempt] = []
        self.state = SimpleNamespace(hands_over=role.decodes, role=role, draining=False,
                                     has_other_weights=False)
        self.events: collections.deque = collections.deque()
        self.jobs: dict[Attempt, tuple[list[int], list[int], int]] = {}  # token ids, block ids, cached blocks
        self.asked_for: dict[Attempt, tuple] = {}  # prefill engines that are not to have it, seconds
        self.scopes: dict[Attempt, PromptScope] = {}
        self.next_tokens: dict[Attempt, int | None] = {}
        self.listed_scopes: tuple[str, ...] = ()
        self.unable_peers: tuple[str, ...] = ()  # to do a job with a scope
        self.aborted: list[Attempt] = []
        self.notices: list[tuple[Attempt, int]] = []
        self.claimed: dict[Attempt, tuple[Attempt, bytes]] = {}
        self.lasting: set = set()  # attempts that only a death ends
        self.posted: dict[Attempt, tuple[str, str]] = {}
        self.held: dict[Attempt, tuple[bytes, list[int]]] = {}
        self.holds = True
        self.rooms = 0  # how often it was to make room
        self.claimed_here = 0  # blocks of `held` that peers may read
        self.calls: list[tuple] = []
        self.peers = 2
        self.queued_tokens = 0  # at the broker, with max_local_prefill_tokens auto
        self.open_writes: dict[str, Write] = {}  # those of the engine's transfer
        self.lease = True
        self.dead: set[str] = set()
        self.credits = 0
        self._numbers = 0

    def open_attempts(self):
        return []

    def is_reached(self):
        return False

    def next_attempt(self, request_id):
        self._numbers += 1
        return Attempt(OWN, request_id, self._numbers)

    def prompt_decided(self, request_id, again=False, **fields):
        pass

    note_prompt = prompt_decided

    def post_job(self, attempt, url, request_id):
        assert attempt not in self.jobs
        self.posted[attempt] = url, request_id

    def submit(self, attempt, token_ids, block_ids, cached_blocks, avoid=(), deadline_s=None, priority=0,
               scope=NO_SCOPE, next_token=None):
        assert attempt not in self.jobs
        self.next_tokens[attempt] = next_token
        self.jobs[attempt] = ScopedTokens(token_ids, seed_of(scope.salt, scope.adapter)), block_ids, cached_blocks
        self.asked_for[attempt] = tuple(avoid), deadline_s
        self.scopes[attempt] = scope

    def set_scopes(self, scopes):
        self.listed_scopes = scopes

    def takes_media(self, media_bytes):
        return True

    def unable(self, scope):
        return self.unable_peers

    def abort(self, attempt):
        self.aborted.append(attempt)

    def knows_holder(self, incarnation):
        return incarnation == PEER and self.peers > 0

    def claim_hold(self, attempt, hold, digest, block_ids, cached_blocks, deadline_s):
        assert attempt not in self.jobs
        self.jobs[attempt] = None, block_ids, cached_blocks
        self.claimed[attempt] = hold, digest

    def read_ended(self, attempt, error, may_land=False):
        self.calls.append(("read_ended", attempt, error))

    def hold(self, hold, digest, block_ids):
        self.held[hold] = digest, block_ids
        return self.holds

    def end_old_holds(self):
        self.rooms += 1

    def lasting_hold_blocks(self):
        return self.claimed_here

    def drop_hold(self, hold):
        self.calls.append(("drop_hold", hold))

    def weights_replaced(self):
        self.state.has_other_weights, self.state.hands_over = True, False
        self.close_unclaimed_holds()

    def unproven_attempts(self):
        return set(self.lasting)

    def close_unclaimed_holds(self):
        self.calls.append(("close_unclaimed_holds", ))

    def grant_closed(self, attempt):
        self.closed.append(attempt)

    def arrived(self, attempt, rank):
        self.notices.append((attempt, rank))

    def view(self, avoid=()):
        return QueueView(True, 0, self.peers - len(avoid), None)

    def prefill_loads(self, avoid=(), tokens=0):
        return PrefillLoads(self.queued_tokens, ((0, 2.0), ) * (self.peers - len(avoid)))

    def set_credits(self, jobs, queued_tokens=None, is_paused=False):
        self.credits = jobs

    def may_write(self, attempt):
        return self.lease

    def lease_stands(self, attempt):
        return self.lease

    def sent(self, attempt, timings):
        self._say("sent", attempt)

    def failed(self, attempt, reason):
        self._say("failed", attempt)

    def ended(self, attempt):
        self._say("ended", attempt)

    def unproven(self, attempt, reason):
        self.calls.append(("unproven", attempt))

    def read_unproven(self, attempt, reason):
        self.calls.append(("read_unproven", attempt))
        self.lasting.add(attempt)

    def may_land(self, attempt):
        return attempt in self.lasting and attempt.incarnation not in self.dead

    def _say(self, word, attempt):
        """The decode engine may reuse its blocks from now on."""
        if any(is_of(key, attempt) for key in self.open_writes):
            raise WrongWrite(f"{word} is said of {attempt}, which is written")
        self.calls.append((word, attempt))

    def poll_event(self):
        return self.events.popleft() if self.events else None

    def set_load(self, load):
        self.load = load

    def degraded(self):
        return None


class FakeTransfer:
    """In the place of `EngineTransfer`: records requests; the test says when they end."""

    def __init__(self) -> None:
        self.requests: list = []
        self.open_writes: dict[str, Write] = {}
        self.progress = TransferProgress([], [], [])

    def start(self, wake, report_end):
        self.wake, self.report_end = wake, report_end

    def execute(self, requests):
        self.requests += requests
        self.open_writes.update((one.key, one) for one in requests if isinstance(one, Write))

    def poll(self):
        """Nothing: notices are put as progress."""

    def take_progress(self):
        progress, self.progress = self.progress, TransferProgress([], [], [])
        return progress

    def end(self, key: str, ok: bool = True, error: str = "", may_land: bool = False) -> None:
        end = Finished(key, ok, bytes=1 if ok else 0, seconds=0.01, error=error, may_land=may_land)
        self.open_writes.pop(key, None)
        self.report_end(end)
        self.progress.finished.append(end)
        self.wake()

    def close(self):
        return True


class FakeAccess:
    """In the place of `EngineAccess`, for an engine that the test steps."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.woken = False
        self.waves = 0
        self.engines_running = False
        self.may_sleep = True
        self.takes_requests = True
        self.due = None

    def wake(self):
        self.woken = True

    def take_wake(self):
        woken, self.woken = self.woken, False
        return woken

    def wake_at(self, when):
        self.due = when

    def await_input(self):
        """Nothing: a test's engine may always sleep, or is stepped."""

    def end_parked(self, others):
        """Nothing: a test's engine is no rank of a group."""

    def refuse(self, request_ids):
        for request in self._engine.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ERROR):
            self._engine.deliver({0: EngineCoreOutputs(outputs=[
                EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)])})

    def start_wave(self):
        self.waves += not self.engines_running
        self.engines_running = True

    def add(self, request: EngineCoreRequest) -> Request:
        made = Request.from_engine_core_request(request, self._engine.hasher)
        self._engine.scheduler.add_request(made)
        return made

    def finish_steps(self, needs_step=lambda: False):
        while needs_step():
            self._engine.turn()
        newest = self._engine.begun_steps[-1] if self._engine.begun_steps else None
        while any(one is newest for one in self._engine.begun_steps):
            self._engine.turn()

    def publish(self, stats, front_end=0):
        self._engine.arrived(front_end, stats)

    def close(self):
        """Nothing to cancel."""



class Engine:
    """A scheduler, its memory, and the clients' answers."""

    CONNECTOR, MODULE = "PDConnector", "vllm_pd.v1.connector"
    EXTRA: dict[str, Any] = {}

    def __init__(self, folder: Path, in_flight: int = 1, *, blocks: int = 64, max_num_seqs: int = 8,
                 batch_tokens: int = 128, role: str = "kv_both", vllm_role: str = "kv_both", caching: bool = True,
                 policy: str = "fcfs", threshold: int | str = BLOCK_SIZE, block_size: int = BLOCK_SIZE,
                 max_loras: int = 0, max_cpu_loras: int | None = None,
                 access: Callable[["Engine"], Any] | None = None, config: VllmConfig | None = None,
                 protocol: Any = None, transfer: Any = None, settings: PDConfig | None = None, **extra) -> None:
        self.in_flight = in_flight
        self.block_size = block_size
        self.config = config or VllmConfig(
            model_config=ModelConfig(model=str(folder), max_model_len=1024, dtype="bfloat16",
                                     skip_tokenizer_init=True),
            scheduler_config=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=batch_tokens,
                                             max_model_len=1024, is_encoder_decoder=False, policy=policy,
                                             enable_chunked_prefill=True, async_scheduling=in_flight > STAGES),
            cache_config=CacheConfig(block_size=self.block_size, enable_prefix_caching=caching),
            kv_transfer_config=KVTransferConfig(kv_connector=self.CONNECTOR,
                                                kv_connector_module_path=self.MODULE, kv_role=vllm_role,
                                                kv_connector_extra_config=self.EXTRA,
                                                kv_load_failure_policy="recompute"))
        if max_loras:
            self.config.lora_config = LoRAConfig(max_loras=max_loras, max_cpu_loras=max_cpu_loras)
        self.config.cache_config.num_gpu_blocks = blocks
        self.config.scheduler_config.async_scheduling = in_flight > STAGES  # the CPU platform switches it off
        self.config.parallel_config.pipeline_parallel_size = STAGES  # its own check wants as many devices
        self.config.cache_config.kv_cache_layout = "BLHNC"
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(self.hash_block_size(), sha256)
        self.scheduler = scheduler_module.make_scheduler(
            vllm_config=self.config, kv_cache_config=KVCacheConfig(blocks, [], self.make_groups()),
            structured_output_manager=StructuredOutputManager(self.config), block_size=self.scheduler_block_size(),
            hash_block_size=self.hash_block_size(), log_stats=True)
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.free_at_start = self.pool.get_num_free_blocks()
        settings = settings or PDConfig.parse(role, {"broker": "tcp://127.0.0.1:5700", "max_parked_fraction": 1.0,
                                                     "max_local_prefill_tokens": threshold, **extra})
        self.protocol = protocol or FakeProtocol(settings.role)
        self.transfer = transfer or FakeTransfer()
        self.protocol.open_writes = self.transfer.open_writes
        self.access = (access or FakeAccess)(self)
        agent = SimpleNamespace(protocol=self.protocol, error=None, dropped=lambda: {}, close=lambda: None,
                                end_lifeline=lambda: None, member=SimpleNamespace(incarnation=OWN))
        self.binding = self.make_binding(settings, self.scheduler, self.access, agent, self.transfer,
                                         PrefillCapacity(block_rows(self.scheduler.kv_cache_config.kv_cache_groups),
                                                         VOCAB, 1, 1 << 16, caching,
                                                         self.scheduler.max_num_scheduled_tokens, blocks, in_flight,
                                                         draft_blocks(self.scheduler.kv_cache_config.kv_cache_groups)),
                                         MetricsRecorder())
        self.scheduler.connector.binding = self.binding
        self.slots: dict[tuple[int, int], int] = {}
        self.prompts: dict[str, list[int]] = {}
        self.wanted: dict[str, int] = {}  # tokens
        self.outputs: dict[str, list[int]] = collections.defaultdict(list)
        self.ended: dict[str, str] = {}
        self.cached: dict[str, int] = {}  # tokens, as the client's usage says
        self.created: dict[str, int] = {}  # its created_cache_tokens
        self.params: dict[str, dict] = {}  # the kv_transfer_params of answers
        self.figures: list[dict] = []  # as they reach the front ends
        self.figures_of: dict[int, list[dict]] = collections.defaultdict(list)  # by the front end
        self.released: set[Attempt] = set()
        self.ends_chunks = transfer is None  # all writes but the last of a job, after each turn
        self._jobs: dict[str, list[int]] = {}  # the prompts of peers, by the name of their attempt
        self.steps = 0
        self.tokens_computed = 0
        self._known: dict[str, list[int]] = {}  # as the model runner has them: prompt and sampled tokens
        self.begun_steps: collections.deque = collections.deque()

    def make_groups(self) -> list[KVCacheGroupSpec]:
        """How the layers are grouped: all in one group, with full attention."""
        return [KVCacheGroupSpec(["l"], FullAttentionSpec(**self.shape()))]

    def scheduler_block_size(self) -> int:
        """Of all groups together, in tokens."""
        return self.block_size

    def hash_block_size(self) -> int:
        """By how many tokens prompts are named."""
        return self.scheduler_block_size()

    def shape(self) -> dict[str, Any]:
        """Of the KV of each layer."""
        return {"block_size": self.block_size, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}

    def make_binding(self, *arguments: Any) -> V1Handover:
        return V1Handover(*arguments)

    def seen(self, request: Request) -> ScopedTokens:
        """What the model sees of a request's prompt."""
        return ScopedTokens(request.prompt_token_ids, request_seed(request))

    # Clients.

    def add(self, request_id: str, prompt: list[int], tokens: int = 4, **fields) -> Request:
        params = fields.pop("params", None) or SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        request = Request(request_id=request_id, prompt_token_ids=list(prompt), sampling_params=params,
                          pooling_params=None, block_hasher=self.hasher, **fields)
        self.prompts[request_id] = self.seen(request)
        self.wanted[request_id] = tokens
        self.scheduler.add_request(request)
        return request

    def abort(self, *request_ids: str) -> None:
        for request in self.scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED):
            self.ended[request.request_id] = "aborted"

    def status(self, request_id: str) -> RequestStatus:
        return self.scheduler.requests[request_id].status

    def block_ids(self, request_id: str) -> list[int]:
        return self.manager.get_block_ids(request_id)[0]

    # Peers of a decode engine.

    def attempt(self, request_id: str) -> Attempt:
        """The last attempt of a request."""
        return [attempt for attempt in self.protocol.jobs if request_of(attempt) == request_id][-1]

    def grant(self, attempt: Attempt) -> list[int]:
        """The blocks that a peer may write for it."""
        _, block_ids, cached_blocks = self.protocol.jobs[attempt]
        return block_ids[cached_blocks:]

    def write(self, attempt: Attempt, tokens: int | None = None) -> None:
        """What a peer does: write the KV of the granted blocks, or of the first tokens. Late writes are allowed as long
        as the fence was not told to come down."""
        token_ids, block_ids, cached_blocks = self.protocol.jobs[attempt]
        if attempt in self.released:
            raise WrongWrite(f"{attempt} was released")
        found = contents(token_ids)
        for position in range(cached_blocks * self.block_size, len(token_ids) if tokens is None else tokens):
            self.slots[block_ids[position // self.block_size], position % self.block_size] = found[position]

    def tell(self, *events) -> None:
        """Events of the protocol; the engine is woken."""
        for event in events:
            if isinstance(event, Released | Prefilled):
                self.released.add(event.attempt)
            if isinstance(event, actions.Prefill):
                seed = seed_of(event.scope.salt, event.scope.adapter)
                self._jobs[str(event.attempt)] = ScopedTokens(event.token_ids, seed)
            self.protocol.events.append(event)
        self.access.wake()

    def prefilled(self, request_id: str) -> Attempt:
        """A peer has written all and said so."""
        attempt = self.attempt(request_id)
        self.write(attempt)
        self.tell(Prefilled(attempt, messages.Timings()))
        return attempt

    def lost(self, attempt: Attempt, reason=FallbackReason.PEER, peer: str = "p") -> None:
        """The attempt has ended without the KV; its fence stays."""
        self.tell(Fallback(attempt, reason, AttemptEnd.FAILED, "", peer))

    # Peers of a prefill engine.

    def job(self, prompt: list[int], cached_blocks: int = 0, number: int = 0, scope: PromptScope = NO_SCOPE) -> Attempt:
        """A decode engine's job, granted."""
        attempt = Attempt(PEER, "r", number)
        blocks = -(-len(prompt) // self.block_size)
        self.tell(actions.Prefill(attempt, list(prompt), list(range(100 + cached_blocks, 100 + blocks)), cached_blocks,
                                  list(range(100, 100 + cached_blocks)), PEER, scope=scope))
        return attempt

    def writes(self, attempt: Attempt) -> list[Write]:
        """All writes that were posted for this job, in order."""
        return [one for one in self.transfer.requests if isinstance(one, Write) and one.grant == str(attempt)]

    def last_writes(self) -> list[Write]:
        """The last write of each job that has posted it, in order."""
        return [one for one in self.transfer.requests if isinstance(one, Write) and one.key == one.grant]

    def sent(self, attempt: Attempt) -> Write:
        """The last write of this job, which was posted."""
        return next(one for one in self.last_writes() if one.key == str(attempt))

    def end_chunks(self) -> None:
        """End all writes but the last ones of jobs. They have carried what is right, up to this moment."""
        for write in [one for one in self.transfer.open_writes.values() if one.key != one.grant]:
            self.check_sent_write(write, self._jobs[write.grant])
            self.transfer.end(write.key)

    def check_sent(self, attempt: Attempt, prompt: list[int]) -> None:
        """The blocks that are being written to the peer hold the prompt's KV, at this moment."""
        self.check_sent_write(self.sent(attempt), prompt)

    def check_sent_write(self, write: Write, prompt: list[int]) -> None:
        """As `check_sent`, for the write itself."""
        first, found = write.remote_block_ids[0] - 100, contents(prompt)
        end = min(len(prompt), (first + len(write.local_block_ids)) * self.block_size)
        for position in range(first * self.block_size, end):
            slot = write.local_block_ids[position // self.block_size - first], position % self.block_size
            if self.slots.get(slot) != found[position]:
                raise WrongRead(f"position {position} is sent from {slot}, which holds something else")

    def fill(self, prompt: list[int], ok: bool = True, read: Read | None = None, said: bool | None = None) -> Read:
        """End the read, or the last one that was posted: the peer's KV lands in our blocks, or garbage. `said`: what
        the transport says of it, where that is something else."""
        read = read or [one for one in self.transfer.requests if isinstance(one, Read)][-1]
        found, first = contents(prompt), read.remote_block_ids[0] - 100
        for index, block in enumerate(read.local_block_ids):
            for offset in range(self.block_size):
                self.slots[block, offset] = found[(first + index) * self.block_size + offset] if ok else -1
        self.transfer.end(read.key, ok if said is None else said)
        return read

    # Steps.

    def has_work(self) -> bool:
        """What the engine's loop asks."""
        return self.scheduler.has_requests() or bool(self.begun_steps)

    def turn(self) -> None:
        """One turn of the engine's loop: schedule unless the pipeline is full, then process the oldest output."""
        self._turn()
        if self.ends_chunks:
            self.end_chunks()

    def _turn(self) -> None:
        if self.scheduler.has_requests():
            self.schedule()
            if len(self.begun_steps) < self.in_flight and self.begun_steps[-1][0].total_num_scheduled_tokens:
                return
        if self.begun_steps:
            self.process()

    def schedule(self):
        """Schedule a step; it is in flight then."""
        output = self.scheduler.schedule()
        self.steps += 1
        self.begun_steps.append((output, self.capture(output)))
        return output

    def capture(self, output) -> list[tuple]:
        """What the model runner gets with this step."""
        work = []
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            start = request.num_computed_tokens - count
            known = self._known.setdefault(request_id, self.seen(request))
            work.append((request_id, start, count, list(self.block_ids(request_id)), known, request.is_prefill_chunk))
        return work

    def execute(self, work: list[tuple]) -> ModelRunnerOutput:
        """Compute a step."""
        sampled = [self._compute(*one) for one in work]
        ids = [one[0] for one in work]
        return ModelRunnerOutput(req_ids=ids, req_id_to_index={name: index for index, name in enumerate(ids)},
                                 sampled_token_ids=sampled)

    def process(self) -> None:
        """Execute the oldest step in flight, and process its output."""
        output, work = self.begun_steps.popleft()
        self.deliver(self.scheduler.update_from_output(output, self.run_workers(output, work)))
        self.check()

    def run_workers(self, output, work: list[tuple]) -> ModelRunnerOutput:
        """What the workers do with a step."""
        return self.execute(work)

    def deliver(self, outputs) -> None:
        """What the front end does with a step's outputs."""
        for client, eco in outputs.items():
            found = eco.scheduler_stats and eco.scheduler_stats.prefix_cache_stats
            assert not found or min(found.requests, found.queries, found.hits) >= 0, "a counter would be taken back"
            if eco.scheduler_stats is not None and eco.scheduler_stats.kv_connector_stats:
                self.arrived(client, eco.scheduler_stats)
            for one in eco.outputs:
                assert one.request_id in self.prompts, f"{one.request_id} is no client's"
                self.outputs[one.request_id] += one.new_token_ids
                if one.kv_transfer_params is not None:
                    self.params[one.request_id] = one.kv_transfer_params
                if one.prefill_stats is not None:
                    self.cached[one.request_id] = one.prefill_stats.num_cached_tokens
                    self.created[one.request_id] = one.prefill_stats.num_cache_creation_tokens
                if one.finish_reason is not None:
                    assert one.request_id not in self.ended, f"{one.request_id} ended twice"
                    self.ended[one.request_id] = str(one.finish_reason)

    def arrived(self, front_end: int, stats) -> None:
        """These statistics have reached a front end."""
        if stats.kv_connector_stats is not None:
            self.figures.append(stats.kv_connector_stats)
            self.figures_of[front_end].append(stats.kv_connector_stats)

    def run(self, turns: int = 500) -> None:
        """Until the engine sleeps or has nothing to do."""
        for _ in range(turns):
            if not self.has_work():
                return
            self.turn()
        raise AssertionError("no end in sight")

    def _compute(self, request_id: str, start: int, count: int, block_ids: list[int], known: list[int],
                 is_chunk: bool) -> list[int]:
        found = contents(known[:start + count])
        assert len(found) == start + count, f"{request_id}: a token is computed that is not known"
        for position in range(start):
            slot = block_ids[position // self.block_size], position % self.block_size
            if self.slots.get(slot) != found[position]:
                raise WrongRead(f"{request_id} reads position {position} from {slot}, which holds something else")
        for position in range(start, start + count):
            self.slots[block_ids[position // self.block_size], position % self.block_size] = found[position]
        return self._sample(found, start, count, known, is_chunk)

    def _sample(self, found: list[int], start: int, count: int, known: list[int], is_chunk: bool) -> list[int]:
        """What comes of a request's part of a step, whose content these tokens have now."""
        self.tokens_computed += count
        if is_chunk:
            return []
        token = found[-1] % VOCAB
        if start + count == len(known):
            known.append(token)
        return [token]

    # Looking.

    def check(self) -> None:
        """What holds at any time between two steps."""
        fenced = [attempt for attempt in self.binding.fence.attempts() if attempt in self.protocol.jobs]
        users = collections.defaultdict(set)
        for name, request in self.scheduler.requests.items() if fenced else ():
            for block in self._blocks_of(request):
                users[block].add(name)
        for attempt in fenced:
            for block in self.grant(attempt):
                names = users[block]
                assert self.pool.blocks[block].ref_cnt >= 1, f"block {block} of {attempt} is free"
                assert names <= {request_of(attempt)}, f"block {block} of {attempt} is used by {names}"

    def _blocks_of(self, request: Request) -> list[int]:
        return self.block_ids(request.request_id)

    def check_answers(self) -> None:
        """Each request has ended once, with the right tokens."""
        for request_id, prompt in self.prompts.items():
            assert request_id in self.ended, f"{request_id} has not ended"
            right = answer(prompt, self.wanted[request_id])
            got = self.outputs[request_id]
            if self.ended[request_id] == "error":
                right = []
            assert got == (right if self.ended[request_id] != "aborted" else right[:len(got)]), request_id

    def counted(self) -> list[list]:
        """The calls of our metrics, those that reached the front end included."""
        pending = self.binding.take_stats()
        if pending is not None:
            self.figures.append(pending.data)
        return [call for data in self.figures for call in data["calls"]]

    def gauge(self, name: str) -> float:
        """What this gauge of ours shows in the front end."""
        return [value for call, *values in self.counted() if call == name for value in values][-1]

    def check_at_rest(self, errors: int = 0) -> None:
        """B20: nothing is held by anybody, and so many events have ended in an unexpected error."""
        scheduler = self.scheduler
        assert self.counted().count(["frames_dropped", "error"]) == errors
        scheduler.has_requests()
        assert not scheduler.requests and not scheduler.running and not len(scheduler.waiting)
        assert not len(scheduler.kv_holding_waiting) and not scheduler.deferred_frees
        assert not scheduler.finished_recving_kv_req_ids and not scheduler.failed_recving_kv_req_ids
        assert not len(self.binding.fence) and not self.binding.remote_prefills.waiting_for_peers
        assert not any(self.binding.holds.debug_state().values())
        assert not self.binding.remote_prefills.parked_ids() and not self.binding.remote_prefills._matched
        jobs = self.binding.prefill_jobs
        assert jobs is None or not (jobs._jobs or jobs._attempts or jobs._parked or jobs._open or jobs._to_keep
                                    or jobs._checks or jobs._unfit_since)
        assert self.pool.get_num_free_blocks() == self.free_at_start
        assert sum(block.ref_cnt for block in self.pool.blocks if not block.is_null) == 0
        assert not scheduler.has_requests()
