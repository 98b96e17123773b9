# SPDX-License-Identifier: Apache-2.0
"""What the messages are made of: bounds, names and numbers, an engine, an attempt, a job.

An *incarnation* is one process life of an engine (a random id). An *attempt* is one try at having one request prefilled
remotely; all state on both sides is keyed by it.
"""
from enum import StrEnum
from typing import Annotated

import msgspec

from vllm_pd.protocol.rows import BlockRows
from vllm_pd.protocol.scope import MAX_MEDIA_BYTES, MAX_MEDIA_ITEMS, MAX_SCOPES, NO_SCOPE, PromptScope

MAX_ID_CHARS = 1024
MAX_TOKENS = 4_000_000
MAX_BLOCKS = 1_000_000
MAX_METADATA_BYTES = 8 << 20
MAX_MEMBERS = 4096
MAX_PROCESSES = 4096  # of one engine
MAX_AVOIDED = 16
MAX_UNREACHED = 256  # of one P; each goes to everybody
MAX_DETOURS = 64  # Ps, in one job
MAX_ZONE_CHARS = 64
MAX_FENCES = 1024  # peers, in one status
MAX_TRIED = 64  # addresses, in one order
MAX_GROUPS = 256  # of KV blocks, in one engine
MAX_PROMPTS = 256  # that an engine remembers
MAX_LISTENS = 1024  # of one engine: its ranks' network devices
# Layouts (transfer.layout.Layout) in which a range of heads can be moved by itself.
SPLIT_LAYOUTS = ("heads-first", "tokens-first", "packed", "kv-heads-first", "kv-tokens-first")

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_CHARS)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
MAX_PRIORITY = 2**31 - 1
Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
MAX_SECONDS = 1e9
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_SECONDS)]
MAX_RATE = 1e12
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_RATE)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MAX_TOKENS)]
Media = Annotated[tuple[Annotated[bytes, msgspec.Meta(max_length=MAX_MEDIA_BYTES)], ...],
                  msgspec.Meta(max_length=MAX_MEDIA_ITEMS)]
BlockIds = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]], msgspec.Meta(max_length=MAX_BLOCKS)]
Metadata = Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Role(StrEnum):
    """What an engine does for others. Values are vLLM's `kv_role`."""
    DECODE = "kv_consumer"
    PREFILL = "kv_producer"
    BOTH = "kv_both"

    @property
    def decodes(self) -> bool:
        """Whether the engine hands prefills over."""
        return self is not Role.PREFILL

    @property
    def prefills(self) -> bool:
        """Whether the engine takes jobs."""
        return self is not Role.DECODE


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """One try of one request. `number` grows with every attempt that its decode engine makes, over all requests: a
    client that reuses a request id gets a new attempt all the same."""
    incarnation: Name
    request_id: Name
    number: Count

    def __str__(self) -> str:
        return f"{self.incarnation}/{self.request_id}#{self.number}"


class Fingerprint(msgspec.Struct, frozen=True, array_like=True):
    """What two engines must agree on before KV blocks may go from one to the other."""
    protocol: int
    model: Text
    dtype: Text
    kv_dtype: Text
    block_size: int
    layers: int
    kv_heads: int
    head_size: int
    layout: Text
    tp: int = 1
    pp: int = 1
    engine: Text = ""  # what else decides the bytes of a block: engines name it as they see fit
    transport: Text = "nixl"  # one of an older release has no other
    # Of each group (`protocol.rows`). One of an older release has none, and is refused by `layers`: layers of several
    # groups share memory, and count once.
    windows: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    # What blocks hold that go whole, from rank to rank: those of groups with a recurrent state, or all, where layers
    # differ in shape.
    states: Text = ""
    # Tokens of a block of each group, where these differ.
    sizes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()

    @property
    def rows(self) -> BlockRows:
        """Which blocks of a prompt go from one to the other."""
        return BlockRows(self.block_size, self.windows, sizes=self.sizes)

    def first_difference(self, other: "Fingerprint") -> tuple[str, object, object] | None:
        """(key, ours, theirs) of the first field that differs, None where KV can go between both engines. `tp` may
        differ where the KV heads can be mapped and nothing else is in the blocks, `pp` as long as every stage has a
        layer. `engine` and `windows` come before what may differ because of them, and `tp` before what a rank holds."""
        if self == other:  # as nearly always, and much faster
            return None
        for key in ("protocol", "engine", "windows", *(("tp", ) if self.states else ()), *self.__struct_fields__):
            ours, theirs = getattr(self, key), getattr(other, key)
            if ours != theirs and not (key == "tp" and self._maps_heads(ours, theirs)
                                       or key == "pp" and 0 < min(ours, theirs) <= max(ours, theirs) <= self.layers):
                return key, ours, theirs
        return None

    def _maps_heads(self, ours: int, theirs: int) -> bool:
        """Whether the KV heads of so many ranks fall into whole runs of those of as many others."""
        return (self.layout in SPLIT_LAYOUTS and not self.states and min(ours, theirs) > 0
                and not max(ours, theirs) % min(ours, theirs))


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy an engine is; in every heartbeat. Of a prefill engine: `job_tokens`, the prompt tokens of the jobs that
    it has taken and not computed yet, without what their decode engines have cached, and `tokens_per_s`, how fast it
    computes prompts as it has measured; 0: not measured, or an older release. Over NATS: `queued_tokens`, those of the
    engine's own jobs that nobody has got yet; None: an older release. `clients`: those of `running` and `waiting` that
    are no jobs of peers; None: all, for it does none, or an older release."""
    running: Count = 0
    waiting: Count = 0
    free_blocks: Count = 0
    job_tokens: Count = 0
    tokens_per_s: Rate = 0.0
    queued_tokens: Count | None = None
    clients: Count | None = None


class PrefillLoad(msgspec.Struct, frozen=True, array_like=True):
    """The load of the prefill engine `incarnation`, as far as a decode engine asks: fields of its `Load`."""
    incarnation: Name
    job_tokens: Count = 0
    tokens_per_s: Rate = 0.0

    @classmethod
    def of(cls, member: "Member") -> "PrefillLoad":
        """That of this member, as it last reported it."""
        return cls(member.incarnation, member.load.job_tokens, member.load.tokens_per_s)


class Process(msgspec.Struct, frozen=True, array_like=True):
    """One process of an engine, as its host names it: the pid, and when it began in clock ticks since boot."""
    pid: Count
    start_time: Count


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A registry entry. `address` is the engine's control socket. (`host_id`, `processes`) names every process of it
    that can write, so that another process in the same process namespace of the same boot can see by fact whether any
    still exists; `lifeline` is a listening socket that nothing but the end of the process closes, for all others.
    `draining`: it takes no new jobs. `http`: the base URL of its OpenAI server, as far as it has one and others can
    reach it. `unreached`: decode engines that do not answer it, so it takes no jobs of theirs. `zone`: the setting;
    empty: none. `scopes`: what it reads of the scope of a job. One of an older release has neither."""
    incarnation: Name
    role: Role
    address: Text
    fingerprint: Fingerprint
    load: Load = Load()
    host_id: Text = ""
    processes: Annotated[tuple[Process, ...], msgspec.Meta(max_length=MAX_PROCESSES)] = ()
    lifeline: Text = ""
    draining: bool = False
    http: Text = ""
    unreached: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_UNREACHED)] = ()
    zone: Annotated[str, msgspec.Meta(max_length=MAX_ZONE_CHARS)] = ""
    scopes: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_SCOPES)] = ()


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """Where the time of a hand-over went; `transfer_s`: after the prompt was computed. `bytes` are those of all writes,
    `last_bytes` of the last one, 0: not known. `measured` is set once P's part (all but `queue_s`) is in."""
    queue_s: Seconds = 0.0
    claim_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    transfer_s: Seconds = 0.0
    bytes: Count = 0
    measured: bool = False
    last_bytes: Count = 0

    def stages(self) -> tuple[tuple[str, float], ...]:
        """The name and the seconds of each stage."""
        return (("queue", self.queue_s), ("claim", self.claim_s), ("prefill", self.prefill_s),
                ("transfer", self.transfer_s))


class DenyReason(StrEnum):
    """Why a claim was not granted: D's reasons, and TOKENS of P alone, for a hold of another prompt."""
    UNKNOWN = "unknown"
    TAKEN = "taken"
    ENDED = "ended"
    UNPEERED = "unpeered"
    AVOIDED = "avoided"
    TOKENS = "tokens"


class PutRefusal(StrEnum):
    """Why the broker did not queue a job."""
    UNREGISTERED = "unregistered"
    FULL = "full"
    NO_PEER = "no_peer"


class Job(msgspec.Struct, frozen=True, array_like=True):
    """A prefill that wants a P: goes from D through the queue. It names no block; only a grant does. The Ps in `avoid`
    have failed at it before, or can't reach D any more. `priority` is that of the request: lower comes first, where P
    schedules by priority. `prefer` is the incarnation of the P that D would choose, where nobody chooses for all
    (NATS); empty: none. `detours`: Ps, by incarnation, whose path to D takes so much longer than that of the nearest.
    One of an older release has none of the three, and an older P ignores them. `scope`: whose KV it is, beside the
    tokens; an older P ignores it, too, but gets no grant then."""
    attempt: Attempt
    address: Text
    token_ids: TokenIds
    cached_tokens: Count
    deadline_s: Seconds
    avoid: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_AVOIDED)] = ()
    priority: Priority = 0
    prefer: Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARS)] = ""
    detours: Annotated[tuple[tuple[Name, Seconds], ...], msgspec.Meta(max_length=MAX_DETOURS)] = ()
    scope: PromptScope = NO_SCOPE

    @property
    def new_tokens(self) -> int:
        """Tokens of the prompt that D has not cached, at least 1."""
        return max(1, len(self.token_ids) - self.cached_tokens)
