# SPDX-License-Identifier: Apache-2.0
"""Asking a broker who is there, from outside."""

import time
from dataclasses import dataclass

from vllm_pd.addresses import parse_endpoint, parse_nats
from vllm_pd.config import PDConfig
from vllm_pd.core import messages
from vllm_pd.core.messages import PROTOCOL, Member, Peers, Refused
from vllm_pd.errors import ConfigError, ControlError, PeerMismatch
from vllm_pd.rpc.call import Call
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.nats_address import DEFAULT_PREFIX, NatsAddress, check_certificates, check_credentials, check_encrypted

TTL_S = next(key.default for key in PDConfig.settings() if key.name == "ttl_s")


@dataclass(frozen=True)
class Census:
    """Who is registered at a broker, and how many jobs wait there."""
    members: tuple[Member, ...]
    queue_length: int


@dataclass(frozen=True)
class Access:
    """What a command needs to be let in: files, as an engine's settings of these names have them."""
    keys: str | None = None
    nats_credentials: str | None = None
    nats_ca: str | None = None
    nats_prefix: str = DEFAULT_PREFIX

    def load_keys(self) -> Keys | None:
        """Raises ConfigError where there is a file that is none."""
        return None if self.keys is None else Keys.load(self.keys, "--keys")

    def nats(self, key: str, broker: str) -> NatsAddress:
        """Raises ConfigError, naming `key`, where the address or a file can't be used."""
        if self.nats_credentials is not None:
            check_credentials("--nats-credentials", self.nats_credentials)
        if self.nats_ca is not None:
            check_certificates("--nats-ca", self.nats_ca)
            check_encrypted("--nats-ca", self.nats_ca, broker)
        url = parse_nats(key, broker, keyed=self.nats_credentials is not None)
        return NatsAddress.of(url, self.nats_prefix, self.nats_credentials, self.nats_ca)


def take_census(broker: str, timeout_s: float = 5.0, access: Access | None = None, key: str = "--broker") -> Census:
    """Raises ConfigError, naming `key`, for an address that is none, ControlError where nobody answers in time,
    PeerMismatch where the broker speaks another protocol."""
    access = access or Access()
    if NatsAddress.is_url(broker):
        try:
            from vllm_pd.broker.nats_members import list_nats_members
        except ImportError as error:
            raise ConfigError(key, broker, f"{error}; pip install 'nats-py[nkeys]'") from error
        members, queue_length = list_nats_members(access.nats(key, broker), TTL_S, timeout_s)
        return Census(tuple(members), queue_length)
    keys = access.load_keys()
    host, port = parse_endpoint(key, broker, keyed=keys is not None)
    return _ask(f"tcp://{host}:{port}", keys, timeout_s)


def _ask(broker: str, keys: Keys | None, timeout_s: float) -> Census:
    deadline = time.monotonic() + timeout_s
    with Call("broker", broker, keys, only_connected=True) as call:
        if not call.say(messages.ListMembers(), deadline):
            raise ControlError(f"nobody listens at {broker} who speaks to us: no broker, or one with another key")
        for _, message in call.answers(deadline):
            if isinstance(message, Refused):
                raise PeerMismatch(message.key, str(PROTOCOL), message.ours)
            if isinstance(message, Peers):
                return Census(tuple(message.members), message.queue_length)
    raise ControlError(f"what listens at {broker} does not answer")
