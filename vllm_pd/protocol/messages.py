# SPDX-License-Identifier: Apache-2.0
"""Everything that travels between engines and the broker, as structs.

What they are made of is in `protocol.values`: an incarnation, an attempt, a job. A *claim number* is drawn anew by P
for every claim that it makes and rides in every later message between P and D about it, so that a late message about an
earlier claim of the same attempt can never be taken for one about the present claim.

A *generation* is one life of the transfer agents of an engine (`protocol.generations`), counted from 0. What is granted
is granted in a generation, and nothing lands by it once the agents of that generation are gone.

Durations are relative (seconds left), never absolute: two machines share no clock.
"""
from enum import StrEnum
from typing import Annotated

import msgspec

from vllm_pd.protocol.values import (  # noqa: F401  whoever has the messages has what they are made of
    MAX_AVOIDED,
    MAX_BLOCKS,
    MAX_DETOURS,
    MAX_FENCES,
    MAX_GROUPS,
    MAX_ID_CHARS,
    MAX_LISTENS,
    MAX_MEMBERS,
    MAX_METADATA_BYTES,
    MAX_PRIORITY,
    MAX_PROCESSES,
    MAX_PROMPTS,
    MAX_RATE,
    MAX_SECONDS,
    MAX_TOKENS,
    MAX_TRIED,
    MAX_UNREACHED,
    MAX_ZONE_CHARS,
    SPLIT_LAYOUTS,
    Attempt,
    BlockIds,
    Count,
    DenyReason,
    Digest,
    Fingerprint,
    Job,
    Load,
    Media,
    Member,
    Metadata,
    Name,
    PrefillLoad,
    Priority,
    Process,
    PutRefusal,
    Rate,
    Role,
    Seconds,
    Text,
    Timings,
    TokenId,
    TokenIds,
)

PROTOCOL = 3


class WireMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all wire messages. The tag on the wire is the class name, or the name that it once had."""


# Between P (sends Hello, Claim, Renew, Writing, Sent, Failed, GaveUp, Stopped) and D (the others). P opens the
# connection.


class Hello(WireMessage):
    """P introduces itself to D, and says how its memory is read: in `generation`. Sent again with each later one."""
    member: Member
    transfer_metadata: Metadata
    generation: Count = 0


class HelloReply(WireMessage):
    """D accepts P and says how its memory is reached: in `generation`. Nothing lands there any more of generations
    before `oldest`. Sent again when one of the two has changed."""
    member: Member
    transfer_metadata: Metadata
    generation: Count = 0
    oldest: Count = 0


class Refused(WireMessage):
    """The two don't fit. `ours` is the sender's value."""
    key: Text
    ours: Text
    theirs: Text


class Claim(WireMessage):
    """P claims this attempt; `ranks` of its processes will write, and each gives notice. They will reach D's memory in
    `generation` of D. `scope`: the digest of the scope that P has read in the job."""
    attempt: Attempt
    claim: Count
    ranks: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    generation: Count = 0
    scope: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


class Grant(WireMessage):
    """P may write `block_ids[cached_blocks:]`, for `lease_s` counted from before its claim was sent. `media`: the
    encoded data of each item of the scope, which the job does not carry. `next_token`: the one after the job's tokens,
    where a drafter's KV of the last of these depends on it; an older release neither sends nor reads it."""
    attempt: Attempt
    claim: Count
    block_ids: BlockIds
    cached_blocks: Count
    lease_s: Seconds
    media: Media = ()
    next_token: TokenId | None = None


class Deny(WireMessage):
    """D does not grant the claim."""
    attempt: Attempt
    claim: Count
    reason: DenyReason


class Renew(WireMessage):
    """P still works on it; `stamp` comes back in the answer."""
    attempt: Attempt
    claim: Count
    stamp: Count


class Renewed(WireMessage):
    """The lease runs anew from the moment the renewal with this stamp was sent."""
    attempt: Attempt
    claim: Count
    stamp: Count
    lease_s: Seconds


class Writing(WireMessage):
    """P posts its writes now: D's transport may have to help them along, and the notice comes soon."""
    attempt: Attempt
    claim: Count


class Sent(WireMessage):
    """All handles of all of P's ranks are done. A wake-up with timings; the proof of arrival is the transfer's notice.
    """
    attempt: Attempt
    claim: Count
    timings: Timings


class Failed(WireMessage):
    """P gave the attempt up and does not write any more. `parted`: a transfer between the two has failed and may still
    land, so P takes no further job of D."""
    attempt: Attempt
    claim: Count
    reason: Text
    parted: bool = False


class GaveUp(WireMessage):
    """P gave the attempt up, and what it wrote may still land: D's fence stays up until D has fenced by itself, or P is
    dead. Without this message D learns it from its lease."""
    attempt: Attempt
    claim: Count
    reason: Text


class Cancel(WireMessage):
    """D asks P to stop. Repeated until P has answered."""
    attempt: Attempt
    claim: Count


class Stopped(WireMessage):
    """P does not write any more: the answer to Cancel."""
    attempt: Attempt
    claim: Count


# Prefill first, over the same connection: from D (ClaimHold, HoldDone) and from P (the others). A hold is named as an
# attempt of P's own is: P's incarnation, a random id, a number.


class ClaimHold(WireMessage):
    """D wants to read what P holds under this name, for a prompt whose token ids and scope have this digest
    (`protocol.hashes.token_digest`), in `generation` of P. Repeated until the answer, and while D reads."""
    attempt: Attempt
    hold: Attempt
    digest: Digest
    generation: Count = 0


class HoldGrant(WireMessage):
    """P keeps these blocks, which are those of the whole prompt, until D's HoldDone or death, or until nothing can be
    read in this generation of P any more. A D on another machine is doubted that has not claimed it again for
    `lease_s`."""
    attempt: Attempt
    hold: Attempt
    block_ids: BlockIds
    generation: Count = 0
    lease_s: Seconds = 30.0


class HoldDenied(WireMessage):
    """P does not hold that for this attempt, or no more."""
    attempt: Attempt
    hold: Attempt
    reason: DenyReason


class HoldQuery(WireMessage):
    """Does D still want the hold for this attempt? Repeated while it is claimed. D answers where it does not."""
    attempt: Attempt
    hold: Attempt


class HoldDone(WireMessage):
    """Under this attempt D uses nothing that it reads of the hold, now or later."""
    attempt: Attempt
    hold: Attempt


# Between an engine and the broker.


class Register(WireMessage):
    """Heartbeat. `broker`, `version`: which registry the sender knows, so that a missed change is sent again."""
    member: Member
    broker: Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARS)] = ""
    version: Count = 0


class Heard(WireMessage):
    """Answer to a heartbeat where the sender knows the present registry. For a decode engine also: the prompt tokens
    that wait in the queue, of jobs for the same prefill engines, without what their decode engines have cached; None:
    not known; and the loads of the prefill engines that fit, as last reported. An older release sends neither."""
    broker: Name
    queue_length: Count
    queue_tokens: Count | None = None
    loads: Annotated[tuple[PrefillLoad, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()


class Peers(WireMessage):
    """The registry in `version`, as what has changed after the version `since`: the `members` that came or changed, and
    the names of those that are `gone`. With `since` 0 it is the whole. Sent to all some time after a change, and to one
    that has another version. `broker` is the incarnation of the broker's process."""
    broker: Name
    version: Count
    members: Annotated[list[Member], msgspec.Meta(max_length=MAX_MEMBERS)]
    queue_length: Count
    since: Count = 0
    gone: Annotated[list[Name], msgspec.Meta(max_length=MAX_MEMBERS)] = []


class Leave(WireMessage):
    """The sender leaves the registry."""


class Put(WireMessage):
    """Queue this job; a second put of a queued job changes nothing."""
    job: Job


class PutReply(WireMessage):
    """`refusal` is None where the job is in the queue. `is_new`: it was not there before. A broker of an older release
    does not say so."""
    attempt: Attempt
    refusal: PutRefusal | None
    queue_length: Count
    is_new: bool = False


class Withdraw(WireMessage):
    """Take this job out of the queue."""
    attempt: Attempt


class Credit(WireMessage, tag="Take"):
    """P can take `jobs` more jobs than those whose offer it has seen; `serial` is the last offer seen. As long as any
    of `tokens` is left, the next of them may have any length; None: P counts no tokens. `queued_tokens` are those that
    it has to compute for the jobs seen (`Job.new_tokens`). One of an older release has neither."""
    jobs: Count
    serial: Count
    tokens: Count | None = None
    queued_tokens: Count = 0


class Offer(WireMessage):
    """A job that P may claim at D. `serial` counts the offers made to this P."""
    job: Job
    serial: Count


class ListMembers(WireMessage, tag="Census"):
    """Request the list of members from the broker. Anybody may; the answer is a `Peers`. `broker`, `version`: which
    registry the sender knows, as in `Register`."""
    broker: Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARS)] = ""
    version: Count = 0


# Between an operator and an engine, on the engine's control socket.


class Drain(WireMessage):
    """Take nothing new, finish what is open, leave the registry."""


class SetRole(WireMessage):
    """Act as `role` from now on; what is open is finished. Only a `kv_both` engine can change."""
    role: Role


class Gone(WireMessage):
    """The host of that engine is off, says who knows: wait for nothing that it has."""
    incarnation: Name


class PromptRecord(msgspec.Struct, frozen=True, array_like=True):
    """What an engine remembers of the prompt of one request. `asked`, `decision` ("remote", "local" or "refused") and
    `reason` are those of the last decision about it, as in the metrics; empty for a request that it does not know.
    `attempts` counts those on prefill engines. Of the last one: its `peer` by incarnation, as far as one had it, and
    that one's control `address` while it is registered; its `outcome` (`protocol.actions.AttemptEnd`), empty while it
    is open; its fault in `detail`; how many of the `tokens` were cached here. `parked_s`: until the request was
    scheduled with its KV, `first_step_s`: from then to its first token; None: not yet. `age_s`: since
    that decision; None: not asked for."""
    request_id: Text
    tokens: Count = 0
    asked: Text = ""
    decision: Text = ""
    reason: Text = ""
    attempts: Count = 0
    cached_tokens: Count = 0
    peer: Text = ""
    address: Text = ""
    outcome: Text = ""
    detail: Text = ""
    timings: Timings = Timings()
    parked_s: Seconds | None = None
    first_step_s: Seconds | None = None
    age_s: Seconds | None = None

    def is_of(self, name: str) -> bool:
        """Whether the request has this name. vLLM makes `cmpl-NAME-0` of a client's X-Request-Id, or adds even more."""
        given = self.request_id.partition("-")[2]
        return bool(name) and (name in (self.request_id, given) or given.startswith(f"{name}-"))


class Status(WireMessage):
    """Request a StatusReply. The engine's own front end sends with it where it serves, and the name of a request about
    whose `prompt` it asks, or how many of the last `prompts` it asks about."""
    http: Text = ""
    prompt: Text = ""
    prompts: Count = 0


class StatusReply(WireMessage):
    """Answer to the four orders. `problem` says why it was not done; `gauges` are those of `OperatorSession.status`;
    `degraded` says why the engine has nobody to work with, empty where it has. `fences`: how many attempts each peer
    may still write or read here. `prompt`: of the request that was asked about, under the name that was asked for where
    it is not known. `paths`: see `PathCosts.report`, the farthest. `prompts`: those that were asked about, the newest
    last; None: none were."""
    member: Member
    problem: Text = ""
    gauges: dict[Name, Count] = {}
    degraded: Text = ""
    fences: Annotated[dict[Name, Count], msgspec.Meta(max_length=MAX_FENCES)] = {}
    prompt: PromptRecord | None = None
    paths: Annotated[dict[Name, tuple[Rate, Seconds, Seconds]], msgspec.Meta(max_length=MAX_FENCES)] = {}
    prompts: Annotated[tuple[PromptRecord, ...], msgspec.Meta(max_length=MAX_PROMPTS)] | None = None


class TryAddresses(WireMessage):
    """Begin a connection by TCP to each of these addresses, send nothing, and close it again. An engine without keys
    tries those of the loopback only. An address of another kind than `tcp://ADDRESS:PORT` can't be tried."""
    addresses: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_TRIED)] = ()


class Trial(StrEnum):
    """What has come of beginning a connection."""
    OPEN = "open"
    REFUSED = "refused"
    SILENT = "silent"
    NO_ROUTE = "no_route"
    FAILED = "failed"  # in another way, or it could not be tried


class AddressesTried(WireMessage):
    """Answer to `TryAddresses`: what has come of each. `listens`: where the ranks of this engine listen for KV by TCP.
    `faults`: why it does not work with a peer, where it knows."""
    trials: Annotated[dict[Text, Trial], msgspec.Meta(max_length=MAX_TRIED)] = {}
    listens: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_LISTENS)] = ()
    faults: Annotated[dict[Name, Text], msgspec.Meta(max_length=MAX_FENCES)] = {}


# Between an engine and its own front end.


class DirectJob(WireMessage):
    """A client of the front end brought this job: claim it now, past the queue."""
    job: Job


class DirectJobTaken(WireMessage):
    """Answer to `DirectJob`, at once: it has come, and its `DirectJobEnd` will."""
    attempt: Attempt


class DirectJobEnd(WireMessage):
    """Answer to `DirectJob`, once nothing is done for it any more. `problem`: empty if the prompt was written."""
    attempt: Attempt
    problem: Text = ""


TO_DECODE: tuple[type[WireMessage], ...] = (Hello, Claim, Renew, Writing, Sent, Failed, GaveUp, Stopped, HoldGrant,
                                            HoldDenied, HoldQuery)
TO_PREFILL: tuple[type[WireMessage], ...] = (HelloReply, Refused, Grant, Deny, Renewed, Cancel, ClaimHold, HoldDone)
TO_BROKER: tuple[type[WireMessage], ...] = (Register, Leave, Put, Withdraw, Credit, ListMembers)
TO_ENGINE: tuple[type[WireMessage], ...] = (Drain, SetRole, Gone, Status, TryAddresses)  # from an operator
TO_OPERATOR: tuple[type[WireMessage], ...] = (StatusReply, AddressesTried)
FROM_FRONT: tuple[type[WireMessage], ...] = (*TO_ENGINE, DirectJob)
FROM_BROKER: tuple[type[WireMessage], ...] = (Heard, Peers, PutReply, Offer, Refused)

Message = (Hello | HelloReply | Refused | Claim | Grant | Deny | Renew | Renewed | Writing | Sent | Failed | Cancel
           | GaveUp | Stopped | Register | Heard | Peers | Leave | Put | PutReply | Withdraw | Credit | Offer
           | ListMembers | Drain | SetRole | Gone | Status | StatusReply | TryAddresses | AddressesTried | ClaimHold
           | HoldGrant | HoldDenied | HoldQuery | HoldDone | DirectJob | DirectJobTaken | DirectJobEnd)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What a frame holds after its version: who sent it, and what."""
    sender: Name
    body: Message


Counters = dict[str, int]
