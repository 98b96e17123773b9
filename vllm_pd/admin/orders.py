# SPDX-License-Identifier: Apache-2.0
"""Telling a running engine what to do, from outside: an operator's messages on its control socket."""
import time
from dataclasses import dataclass

from vllm_pd.admin.members import Access, list_members
from vllm_pd.core import messages as m
from vllm_pd.errors import ConfigError, ControlError
from vllm_pd.rpc.call import Call

POLL_S = 0.5


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine listens for orders, and who it is, if that is known."""
    address: str
    incarnation: str | None = None


def find_engine(engine: str, broker: str, access: Access, timeout_s: float = 5.0) -> EngineAddress:
    """The registered engine whose incarnation begins so; an address is taken as it is, for an engine that has drained
    is registered no more. Raises ConfigError where it is none or not the only one, and what `list_members` does."""
    if engine.startswith("tcp://"):
        return EngineAddress(engine)
    members = list_members(broker, timeout_s, access).members
    found = [member for member in members if engine and member.incarnation.startswith(engine)]
    if len(found) == 1:
        return EngineAddress(found[0].address, found[0].incarnation)
    listed = ", ".join(map(introduce, found or members))
    raise ConfigError("ENGINE", engine, f"{'more than one begins so' if found else 'no such engine is registered'}: "
                      f"write one of {listed or 'those that you start; there is none now'}")


def introduce(member: m.Member) -> str:
    """A registry entry in a few words."""
    return (f"{member.incarnation[:12]} ({member.role.value}{', draining' if member.draining else ''} at "
            f"{member.address})")


class Operator:
    """A connection to one engine. Also a context manager."""

    def __init__(self, target: EngineAddress, access: Access):
        self.target = target
        self._call = Call("engine", target.address, access.load_keys(), only_connected=False)

    def __enter__(self) -> "Operator":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def tell(self, order: m.Message, timeout_s: float = 5.0) -> m.StatusReply:
        """The engine's answer. Raises ControlError where none comes in time, or where the engine refuses."""
        deadline = time.monotonic() + timeout_s
        self._call.say(order, deadline)
        for sender, reply in self._call.answers(deadline):
            if self.target.incarnation not in (None, sender):
                raise ControlError(f"another engine listens at {self.target.address} by now: {sender}")
            if isinstance(reply, m.StatusReply):
                if reply.problem:
                    raise ControlError(reply.problem)
                return reply
        raise ControlError(f"the engine at {self.target.address} does not answer: it is stopped or gone, or has "
                           "another key")

    def drain(self, timeout_s: float) -> m.StatusReply:
        """Have it drained, and wait for the end of that; the last answer says whether it came in time."""
        deadline = time.monotonic() + timeout_s
        reply = self.tell(m.Drain())
        while not is_drained(reply) and time.monotonic() < deadline:
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
            reply = self.tell(m.Status())
        return reply

    def close(self) -> None:
        """Hang up."""
        self._call.close()


def is_drained(reply: m.StatusReply) -> bool:
    """Whether nothing is open there any more, and the engine has left the registry."""
    return bool(reply.gauges.get("drained"))


def describe(reply: m.StatusReply) -> list[str]:
    """A status, line by line."""
    member = reply.member
    state = "drained" if is_drained(reply) else "draining" if member.draining else "serving"
    return [f"engine {member.incarnation} at {member.address}: {member.role.value}, {state}",
            *([f"  degraded, {reply.degraded}"] if reply.degraded else []),
            *(f"  {name:<15} {value}" for name, value in reply.gauges.items())]
