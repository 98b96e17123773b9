# SPDX-License-Identifier: Apache-2.0
"""An operator's orders to a running engine: drain, change the role, report the status."""
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_pd.broker.members import Access, list_members
from vllm_pd.decisions.paths import COMPARED_TOKENS
from vllm_pd.errors import ConfigError, ControlError
from vllm_pd.ops.printing import three_digits
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.messages import Member
from vllm_pd.rpc.call import Call

POLL_S = 0.5
SHOWN_PATHS = 16
_MB = 1e6
_INCARNATION = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine's control socket is, and the engine's incarnation, where that is known."""
    address: str
    incarnation: str | None = None


def find_engine(engine: str, broker: str, access: Access, timeout_s: float = 5.0) -> EngineAddress:
    """The registered engine whose incarnation begins with `engine`. A `tcp://` address is taken as it is, because an
    engine that has drained is no longer registered. Raises ConfigError where no engine or more than one fits, and what
    `list_members` raises."""
    if engine.startswith("tcp://"):
        return EngineAddress(engine)
    member = choose_engine(engine, list_members(broker, timeout_s, access).members)
    return EngineAddress(member.address, member.incarnation)


def choose_engine(engine: str, members: Sequence[Member]) -> Member:
    """That whose incarnation begins with `engine`, or whose control address it is. Raises ConfigError where none or
    more than one fits."""
    found = [member for member in members
             if engine and (member.incarnation.startswith(engine) or member.address == engine)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(map(introduce, found or members))
    raise ConfigError("ENGINE", engine, f"{'more than one begins so' if found else 'no such engine is registered'}: "
                      f"write one of {listed or 'those that you start; there is none now'}")


def introduce(member: Member) -> str:
    """A registry entry on one line."""
    return (f"{member.incarnation[:12]} ({member.role.value}{', draining' if member.draining else ''} at "
            f"{member.address})")


class Operator:
    """A connection to one engine, for orders. Also a context manager."""

    def __init__(self, target: EngineAddress, access: Access):
        self.target = target
        self._call = Call("engine", target.address, access.load_keys(), only_connected=False)

    def __enter__(self) -> "Operator":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def tell(self, order: m.Message, timeout_s: float = 5.0) -> m.StatusReply:
        """Send an order; returns the engine's status after it. Raises ControlError without an answer in time, or where
        the engine refuses. Where the incarnation is known, it is checked before an order that changes anything: the
        registry lists an engine for a while after its end, and another may have its address by then."""
        deadline = time.monotonic() + timeout_s
        if self.target.incarnation is not None and not isinstance(order, m.Status):
            self._ask(m.Status(), deadline)
        reply = self._ask(order, deadline)
        if reply.problem:
            raise ControlError(reply.problem)
        return reply

    def _ask(self, message: m.Message, deadline: float) -> m.StatusReply:
        self._call.say(message, deadline)
        for sender, reply in self._call.answers(deadline):
            if self.target.incarnation not in (None, sender):
                raise ControlError(f"another engine listens at {self.target.address} by now: {sender}")
            if isinstance(reply, m.StatusReply):
                return reply
        raise ControlError(f"the engine at {self.target.address} does not answer: it is stopped or gone, or has "
                           "another key")

    def drain(self, timeout_s: float) -> m.StatusReply:
        """Have the engine drained, and wait until it is or `timeout_s` is over. Returns its last status."""
        deadline = time.monotonic() + timeout_s
        reply = self.tell(m.Drain())
        while not is_drained(reply) and time.monotonic() < deadline:
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
            reply = self.tell(m.Status())
        return reply

    def close(self) -> None:
        """Close the connection."""
        self._call.close()


def say_gone(engine: str, broker: str, access: Access, timeout_s: float = 5.0) -> list[str]:
    """Tell all registered engines that the host of `engine` is off. That is the whole incarnation, as fences name it in
    a status: it may not be registered any more, and its beginning may be another one's. Returns a line with the answer
    of each. Raises ConfigError for anything else, and what `list_members` raises."""
    if not _INCARNATION.fullmatch(engine):
        raise ConfigError("ENGINE", engine, "write its whole incarnation, as `vllm-pd status` of its peers shows it")
    lines: list[str] = []
    for member in list_members(broker, timeout_s, access).members:
        if member.incarnation != engine:
            lines.append(f"{introduce(member)}: {_answer(member, m.Gone(engine), access, timeout_s)}")
    return lines or ["no other engine is registered"]


def _answer(member: Member, order: m.Message, access: Access, timeout_s: float) -> str:
    """Give an engine this order. Returns what comes of it, or why nothing does."""
    try:
        with Operator(EngineAddress(member.address, member.incarnation), access) as operator:
            operator.tell(order, timeout_s)
    except ControlError as error:
        return str(error)
    return "told; new transfer agents, then its blocks are free"


def is_drained(reply: m.StatusReply) -> bool:
    """Whether the engine has nothing open and has left the registry."""
    return bool(reply.gauges.get("drained"))


def describe(reply: m.StatusReply) -> list[str]:
    """The lines of a status."""
    member = reply.member
    state = "drained" if is_drained(reply) else "draining" if member.draining else "serving"
    return [f"engine {member.incarnation} at {member.address}: {member.role.value}, {state}",
            *([f"  degraded, {reply.degraded}"] if reply.degraded else []),
            *(f"  can't reach decode engine {name}" for name in member.unreached),
            *(f"  {count} fenced for engine {name}" for name, count in reply.fences.items()),
            *_describe_paths(reply.paths),
            *(f"  {name:<15} {value}" for name, value in reply.gauges.items())]


def _describe_paths(paths: Mapping[str, tuple[float, float, float]]) -> list[str]:
    """What each path costs: a line for the first ones, which are the farthest. See `PathCosts.report`."""
    lines: list[str] = []
    for name, (bytes_per_s, more_s, age_s) in list(paths.items())[:SHOWN_PATHS]:
        rate = f"{three_digits(round(bytes_per_s / _MB, 3))} MB/s, " if bytes_per_s else ""
        more = (f"{three_digits(round(more_s, 3))} s more than the nearest for {COMPARED_TOKENS:,} tokens" if more_s
                else "the nearest")
        lines.append(f"  prefill engine {name}: {rate}{more}, measured {age_s:,.0f} s ago")
    if left_out := len(paths) - len(lines):
        lines.append(f"  and {left_out} nearer prefill engines")
    return lines
