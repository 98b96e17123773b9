# SPDX-License-Identifier: Apache-2.0
"""What operators and the front end tell an engine and ask of it, and what there is to be seen: what is open, gauges,
counters.

Sans-IO; each method holds the lock.
"""
import collections
import logging
from collections.abc import Collection
from typing import Any

import msgspec

from vllm_pd.peer.core import Session, locked
from vllm_pd.peer.degraded import Degraded, DegradedReason
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.attempts import AttemptState
from vllm_pd.transfer.transport import kv_addresses

logger = logging.getLogger("vllm.pd")

SHOWN_NAMES = 3
MAX_REASON_CHARS = 1000
_NOTHING = m.Status()  # about no prompt

_OTHER_WEIGHTS = ("the weights of this engine were replaced while it ran: it takes no jobs of others and hands none "
                  "over; restart it")


class OperatorSession(Session):
    """The calls of operators and the front end, and of whatever shows how an engine is."""

    @locked
    def drain(self) -> None:
        """Take nothing new from others, finish what is open, then leave the registry for good. To refuse the clients of
        this engine is its front end's part. What nobody has claimed is held for a few seconds more, and not at all
        where nobody could claim it."""
        if not self.state.draining:
            logger.info("draining: no new work, what is open is finished")
            self.state.drain()
            if self._prefill.peers():
                self._prefill.holds.drain(self._clock())
            else:
                self._do(self._prefill.holds.close_unclaimed())
            self._core.state_changed()

    @locked
    def weights_replaced(self) -> None:
        """The weights of this engine are not those of its fingerprint any more. It hands nothing over and takes no
        jobs, for good; for others a `kv_both` engine is a decode engine, and a prefill engine drains. To give back what
        it has of others, and to abort what others have of it, is the engine's part."""
        logger.error("%s", _OTHER_WEIGHTS)
        self.state.weights_replaced()
        self._do(self._prefill.holds.close_unclaimed())
        if self.state.role is m.Role.PREFILL:
            self.drain()
        else:
            self._core.state_changed()

    @locked
    def set_role(self, role: m.Role) -> str:
        """Act as `role` from now on; what is open is finished. Returns why not, empty where it is done."""
        problem = self.state.set_role(role)
        self._core.state_changed()
        return problem

    @locked
    def set_http(self, http: str) -> None:
        """The front end serves at this URL."""
        if self.state.set_http(http):
            self._core.state_changed()

    @locked
    def status(self, sockets: int, problem: str = "", asked: m.Status = _NOTHING) -> m.StatusReply:
        """The answer to an operator or the front end. `sockets` are open. `asked`: the prompts that it is about."""
        gauges = {**self.counts(), "sockets": sockets, **self.state.gauges()}
        degraded = self.degraded()
        return m.StatusReply(self.state.member(), problem, gauges,
                             "" if degraded is None else f"{degraded.reason}: {degraded.detail}", self._fences(),
                             self._find_prompt(asked.prompt) if asked.prompt else None, self._measured_paths(),
                             self._core.prompts.newest(asked.prompts) if asked.prompts else None)

    def _find_prompt(self, name: str) -> m.PromptRecord:
        """What is known of the prompt of the request with this name."""
        record = self._core.prompts.find(name)
        address = next((one.address for one in self._cluster.members() if one.incarnation == record.peer), "")
        return msgspec.structs.replace(record, address=address)

    @locked
    def degraded(self) -> Degraded | None:
        """Why this engine can't hand prefills over, or get any; None where it can, or drains."""
        if self._core.shut_detail:
            return Degraded(DegradedReason.CONTROL, self._core.shut_detail)
        if self.state.has_other_weights:
            return Degraded(DegradedReason.WEIGHTS, _OTHER_WEIGHTS)
        if self.state.draining:
            return None
        if lost := self.state.lost_address:
            return Degraded(DegradedReason.ADDRESS, f"this machine does not have the address {lost} of this engine any "
                            "more: give it that address again, or start the engine again at another one")
        if problem := self.state.agents_problem:
            return Degraded(DegradedReason.AGENTS, "this engine is in doubt about what peers do with its memory, and "
                            f"can't make new transfer agents: {problem[:MAX_REASON_CHARS]}")
        if not self._cluster.up:
            return Degraded(DegradedReason.BROKER, f"the broker {self._core.broker} does not answer")
        decodes, unadded = self.state.role.decodes, self._prefill.unadded_peers()
        unreached = self._prefill.unreached_peers(self._clock())
        if (self._cluster.prefills(self._core.greeted()) if decodes
                else self._prefill.peers().keys() - self._parted - set(unreached)):
            return None
        for name, reason in unadded.items():
            if not decodes and name not in self._parted:
                return Degraded(DegradedReason.PEER, f"the transport can't add decode engine {name}: {reason}")
        mismatch = self._cluster.find_mismatch(self._clock())
        if mismatch is not None and not self._parted:
            return Degraded(DegradedReason.MISMATCH, f"no peer fits: {mismatch}")
        kind = "prefill" if decodes else "decode"
        return Degraded(DegradedReason.PEER, f"no {kind} engine is there{self._why_not_those(decodes, unreached)}")

    def _why_not_those(self, decodes: bool, unreached: list[str]) -> str:
        """What keeps this engine from working with the engines that are there, each named."""
        if self._parted:
            return f", but {_list(self._parted)}, whose transfers with this one have failed: both make new agents"
        if not decodes:
            return f", but {_list(unreached)}, which this one can't reach" if unreached else ""
        if not_reaching := [one.incarnation for one in self._cluster.not_reaching_us()]:
            return f", but {_list(not_reaching)}, which can't reach this one at {self.member.address}"
        failed = self._core.failed_paths.avoided(self._clock())
        return f", but {_list(failed)}, to which prompts went in vain: it is tried again soon" if failed else ""

    def _fences(self) -> dict[str, int]:
        """How many attempts of ours each peer may still write, and how many holds of ours it may read; the first."""
        writers = () if self._decode.limits.own_fence else self._decode.fenced().values()
        readers = [one.incarnation for one in self._prefill.holds.states().values() if one is not None]
        return dict(collections.Counter([*writers, *readers]).most_common(m.MAX_FENCES))

    def _measured_paths(self) -> dict[str, tuple[float, float, float]]:
        """What the paths to the registered prefill engines cost, as far as it was measured; the farthest."""
        found = self._core.paths.report(self._clock(), [one.incarnation for one in self._cluster.members()])
        return dict(list(found.items())[:m.MAX_FENCES])

    @locked
    def listens(self) -> tuple[str, ...]:
        """Where the ranks of this engine listen for KV by TCP; the first."""
        return tuple(kv_addresses(self._core.generations.metadata)[:m.MAX_LISTENS])

    @locked
    def pair_faults(self) -> dict[str, str]:
        """Why this engine does not work with a peer, by the peer's name, as far as it knows; the first."""
        now = self._clock()
        faults = dict.fromkeys(self._core.failed_paths.avoided(now),
                               "prompts went there in vain, and it is tried again within a minute")
        faults |= dict.fromkeys(self._prefill.unreached_peers(now), "it does not answer")
        faults |= dict.fromkeys(self._parted, "a transfer between the two has failed, and both make new agents")
        faults |= {name: f"the transport can't add it: {reason[:MAX_REASON_CHARS]}"
                   for name, reason in self._prefill.unadded_peers().items()}
        return dict(list(faults.items())[:m.MAX_FENCES])

    @locked
    def unproven_attempts(self) -> set[m.Attempt]:
        """The open ones that may last for long: nothing ends them but new transfer agents, here or there, or a death: a
        peer's, or that of this engine."""
        return (self._prefill.unproven_jobs() | self._prefill.unproven_reads() | self._decode.unproven()
                | self._decode.reads.unproven_reads())

    @locked
    def open_attempts(self) -> list[m.Attempt]:
        """Every attempt with a record, in either half, and every read that may still land: empty when all has ended and
        all fences are down."""
        jobs = self._prefill.states().keys() - self._prefill.remembered()
        return [*self._decode.states(), *self._decode.reads.states(), *jobs, *self._prefill.holds.states(),
                *self._prefill.unproven_reads()]

    @locked
    def is_reached(self) -> bool:
        """Whether a peer may read or write this engine's memory by itself, or a read of ours that has failed may still
        fill it."""
        writers = self._decode.fenced() if not self._decode.limits.own_fence else ()
        return (bool(self._prefill.holds.readers()) or bool(writers) or bool(self._prefill.unproven_reads())
                or bool(self._decode.reads.unproven_reads()))

    @locked
    def counts(self) -> dict[str, int]:
        """Gauges: jobs and attempts by state, peers."""
        states = collections.Counter(self._decode.states().values())
        return {
            "decode_queued": states[AttemptState.QUEUED],
            "decode_granted": states[AttemptState.GRANTED],
            "decode_fenced": len(self._decode.fenced()),
            "prefill_jobs": len(self._prefill.states()),
            "unproven_jobs": len(self._prefill.unproven_jobs()),
            "holds": len(self._prefill.holds),
            "peers": len(self._prefill.peers()) + len(self._decode.peers),
            "parted": len(self._parted),
            "generation": self._core.generations.current,
            "unadded": len(self._prefill.unadded_peers()),
            "unreached": len(self._prefill.unreached_peers(self._clock())),
        }

    @locked
    def totals(self) -> dict[str, int]:
        """Counters of what happened to attempts and jobs since the start."""
        return merged(decode=self._decode.counters, prefill=self._prefill.counters)

    @locked
    def dropped(self) -> dict[str, int]:
        """Counters of messages that changed nothing: late, duplicate, unknown, refused."""
        return merged(decode=self._decode.dropped, prefill=self._prefill.dropped)

    @locked
    def debug_state(self) -> dict[str, Any]:
        """What tests and chaos look at, as plain values; not for the product."""
        return {
            "decode": self._decode.debug_state(),
            "prefill": self._prefill.debug_state(),
            "awaited_timings": self._decode.awaited_timings(),
            "peers": {*self._decode.peers, *self._prefill.peers()},
            "prefill_peers": sorted(self._cluster.prefills(self._decode.peers)),
            "members": sorted(member.incarnation for member in self._cluster.members()),
            "queue_length": self._cluster.queue_length,
        }

    @locked
    def bring_forward(self, until: float, leases: bool) -> int:
        """For tests alone, see `DecodeProtocol`. `until`: by this engine's clock."""
        return self._decode.bring_forward(until, leases)


def _list(names: Collection[str]) -> str:
    """The first of these engines, for a sentence."""
    first = ", ".join(sorted(names)[:SHOWN_NAMES])
    return first if len(names) <= SHOWN_NAMES else f"{first} and {len(names) - SHOWN_NAMES} more"


def merged(**counters: m.Counters) -> dict[str, int]:
    """All counters in one dictionary, their names prefixed by the keywords."""
    return {f"{prefix}_{name}": count for prefix, counter in counters.items() for name, count in counter.items()}
