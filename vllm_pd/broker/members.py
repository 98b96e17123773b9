# SPDX-License-Identifier: Apache-2.0
"""Listing the engines that are registered at a broker."""

import time
from dataclasses import dataclass
from typing import Annotated

import zmq

from vllm_pd.broker.changes import RegistryView
from vllm_pd.errors import ControlError
from vllm_pd.extras import require_extra
from vllm_pd.protocol import messages
from vllm_pd.protocol.messages import Member, Peers
from vllm_pd.rpc.addresses import parse_endpoint, parse_nats, url_of
from vllm_pd.rpc.call import Call
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.locality import is_here, resolve
from vllm_pd.rpc.nats_address import DEFAULT_PREFIX, NatsAddress, check_certificates, check_credentials, check_encrypted
from vllm_pd.settings.engine import PDConfig
from vllm_pd.settings.options import Option

TTL_S = next(key.default for key in PDConfig.settings() if key.name == "ttl_s")


@dataclass(frozen=True)
class MemberList:
    """The engines that are registered at a broker, and the number of jobs in its queue."""
    members: tuple[Member, ...]
    queue_length: int
    elsewhere: tuple[str, ...] = ()  # addresses of those that are left out: of other machines, and there are no keys

    def on_this_machine(self) -> "MemberList":
        """Without the engines that have an address of another machine, or a name."""
        foreign = [_foreign_url(member) for member in self.members]
        here = tuple(member for member, url in zip(self.members, foreign, strict=True) if url is None)
        return MemberList(here, self.queue_length, tuple(filter(None, foreign)))


def _foreign_url(member: Member) -> str | None:
    """Its first address that is not of this machine; None where all are."""
    urls = (member.address, member.lifeline, member.http)
    return next((url for url in urls if url and not is_here(url)), None)


@dataclass(frozen=True)
class Access:
    """How a command reaches brokers and engines, as in the engines' settings of these names. Times in seconds."""
    keys: Annotated[str | None, Option("The cluster's key, made by `vllm-pd keys`; needed beyond the loopback.",
                                       metavar="FILE")] = None
    nats_credentials: Annotated[str | None, Option("The NATS user's file.", metavar="FILE")] = None
    nats_ca: Annotated[str | None, Option("Certificates to check a tls:// server with.", metavar="FILE")] = None
    nats_prefix: Annotated[str, Option("As nats_prefix in the engines' settings.")] = DEFAULT_PREFIX
    ttl_s: Annotated[float, Option("As ttl_s in the engines' settings: over NATS, one that has sent nothing for this "
                                   "long is gone.")] = TTL_S

    def load_keys(self) -> Keys | None:
        """The cluster's key; None without a file. Raises ConfigError for an invalid file."""
        return None if self.keys is None else Keys.load(self.keys, "--keys")

    def nats(self, key: str, broker: str) -> NatsAddress:
        """The NATS address `broker`, given as option `key`. Raises ConfigError for an invalid option or file."""
        PDConfig.check_number("ttl_s", self.ttl_s, "--ttl-s")
        if self.nats_credentials is not None:
            check_credentials("--nats-credentials", self.nats_credentials)
        if self.nats_ca is not None:
            check_certificates("--nats-ca", self.nats_ca)
            check_encrypted("--nats-ca", self.nats_ca, broker)
        url = parse_nats(key, broker, keyed=self.nats_credentials is not None)
        return NatsAddress.of(url, self.nats_prefix, self.nats_credentials, self.nats_ca)


def list_members(broker: str, timeout_s: float = 5.0, access: Access | None = None,
                 key: str = "--broker", context: zmq.Context | None = None,
                 known: RegistryView | None = None) -> MemberList:
    """Ask the broker for its engines. `context` is as for `Call`. Raises ConfigError, naming `key`, for an invalid
    address, MissingPackage without what NATS needs, ControlError without an answer in time, OtherProtocol where the
    broker has another protocol version. Without keys, engines of other machines are left out: anybody on this machine
    could have named them. `known` is what the caller has read from this broker before. It is brought up to date, and
    `vllm-pd broker` sends only what has changed; the loads of the others are old then."""
    access = access or Access()
    if NatsAddress.is_url(broker):
        require_extra("nats")
        from vllm_pd.broker.nats_members import list_nats_members
        members, queue_length = list_nats_members(access.nats(key, broker), access.ttl_s, timeout_s)
        listed = MemberList(tuple(members), queue_length)
        return listed if access.keys or access.nats_credentials else listed.on_this_machine()
    keys = access.load_keys()
    host, port = parse_endpoint(key, broker, keyed=keys is not None)
    resolve(key, broker, host)
    listed = _ask(url_of(host, port), keys, timeout_s, context, known or RegistryView())
    return listed if keys is not None else listed.on_this_machine()


def _ask(broker: str, keys: Keys | None, timeout_s: float, context: zmq.Context | None,
         known: RegistryView) -> MemberList:
    """Ask the `vllm-pd broker` at this URL what has changed since `known`, and bring that up to date. Raises as
    `list_members`."""
    deadline = time.monotonic() + timeout_s
    with Call("broker", broker, keys, only_connected=True, context=context) as call:
        if not call.say(messages.ListMembers(known.broker, known.version), deadline):
            raise ControlError(f"no broker answers at {broker}: there is none, or it has another key")
        for _, message in call.answers(deadline):
            if isinstance(message, Peers):
                known.follow(message.broker)
                known.apply(message)
                return MemberList(tuple(known.members.values()), message.queue_length)
    raise ControlError(f"what listens at {broker} does not answer")
