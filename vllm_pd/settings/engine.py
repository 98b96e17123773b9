# SPDX-License-Identifier: Apache-2.0
"""The settings of one engine, checked before anything starts.

They come from `kv_role` and `kv_connector_extra_config` in `vllm serve --kv-transfer-config`. `PDConfig.parse` is the
only constructor to use: what it returns is complete and valid, so no other code checks a setting again. The rule of
each key is in the metadata of its field; a test compares docs/configuration.md with them.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_pd.decisions.fallback import FallbackConfig, FallbackRule
from vllm_pd.decisions.job_order import JobOrder
from vllm_pd.decisions.policy import PolicyConfig
from vllm_pd.decisions.prefix import PrefixReads
from vllm_pd.errors import ConfigError
from vllm_pd.protocol.messages import MAX_ZONE_CHARS, Role
from vllm_pd.protocol.metaserver import is_metaserver
from vllm_pd.rpc.addresses import (
    EXAMPLE_BIND,
    EXAMPLE_BROKER,
    hosts_of,
    parse_bind,
    parse_endpoint,
    parse_nats,
    url_of,
)
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.nats_address import DEFAULT_PREFIX, NatsAddress, check_certificates, check_credentials, check_encrypted
from vllm_pd.settings.store import EXAMPLE_DIGEST, StoreSettings, check_digest

AUTO = "auto"  # of max_local_prefill_tokens
START_LOCAL_PREFILL_TOKENS = 1000  # what `auto` does as long as nothing is measured
MAX_WHOLE = 2**62 - 1  # of a whole number: more is no `vllm_pd.protocol.values.Count`, so no engine could send it
TWO_SIDED = "torch"  # of `transport`
KV_ROLES = {role.value: role for role in Role}


@dataclass(frozen=True)
class Rule:
    """What a key means and which values it may have. `above` is exclusive, `least` and `most` are inclusive. `choices`
    are all values of a key that has only a few; `words` are those of a number that may be no number. `example`: of a
    number that has no default."""
    text: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    example: float | None = None

    def allows(self, value: float) -> bool:
        """Whether a number is within the bounds."""
        return ((self.least is None or value >= self.least) and (self.above is None or value > self.above)
                and (self.most is None or value <= self.most))

    def range_text(self) -> str:
        """The bounds in words."""
        bounds = [f"{word} {bound:g}" for word, bound in (("at least", self.least), ("above", self.above),
                                                          ("at most", self.most)) if bound is not None]
        return " and ".join(bounds)


def _key(default: Any, text: str, **bounds: Any) -> Any:
    return field(default=default, metadata={"rule": Rule(text, **bounds)})


@dataclass(frozen=True)
class PDConfig:
    """The valid settings of one engine, made by `parse`. Immutable, so all threads may share it."""

    role: Role
    broker: str = field(metadata={"rule": Rule("Where the broker listens. There is no default: an engine without a "
                                               "broker has no peers.")})
    bind: str = _key(EXAMPLE_BIND, "Where this engine's control socket listens; port 0 takes a free one. `auto`: at "
                     "the address of this machine that leads to the broker.")
    lifeline_port: int = _key(0, "The port at the address of `bind` by which other machines see that this engine's "
                              "process exists; 0: a free one.", least=0, most=65535)
    zone: str | None = _key(
        None, "What this engine's place is called, like a rack or a site. Engines of one zone count as near each "
        "other; for a prefill engine of another zone that is new to it, a decode engine expects what it has measured "
        "with the others there.")
    keys: str | None = _key(
        None, "The file with the cluster's key, which `vllm-pd keys` makes: the sockets then speak only to those that "
        "have it. Needed beyond the loopback.")
    nats_credentials: str | None = _key(
        None, "The file of a NATS user: what `nsc` writes, or the seed of an nkey alone. Needed beyond the loopback.")
    nats_ca: str | None = _key(
        None, "The certificates that a `tls://` broker's is checked against; without it the system's.")
    nats_prefix: str = _key(
        DEFAULT_PREFIX, "What the names of this fleet's bucket and stream on a NATS server begin with.")
    max_local_prefill_tokens: int | str = _key(
        1000, "A prompt with more tokens than this after the prefix hit may be prefilled remotely; up to it the "
        "decode engine prefills by itself, as it does whatever is less than a block. `auto`: the decode engine "
        "compares when the first token would come, by what it has measured.", least=0, words=(AUTO, ))
    itl_target_ms: float | None = _key(
        None, "With `max_local_prefill_tokens` `auto`: a prompt whose local prefill would make a step of running "
        "decodes longer than this goes to a prefill engine, even where its first token comes later there. Without it "
        "the first token alone decides.", above=0, most=60_000, example=100.0)
    policy: str | None = _key(
        None, "A class of your own, as `module.Class`, that says which prompts are worth a prefill engine, in place of "
        "`max_local_prefill_tokens`; what may and can go there is decided as ever.")
    max_queue_length: int = _key(
        64, "With this many jobs waiting at the broker, new prompts are prefilled locally.", least=1)
    max_parked_fraction: float = _key(
        0.5, "The share of a decode engine's KV blocks that waiting and quarantined remote prefills may hold, and of "
        "its `max_num_seqs` that the waiting ones may take; beyond it new prompts are prefilled locally. Also the "
        "share of a prefill engine's KV blocks that it may keep for decode engines to read, and of those that its "
        "reads of decode engines' prefix caches may fill. A `kv_both` engine counts the blocks that it keeps and those "
        "of its remote prefills together.", above=0, most=1)
    max_prefill_jobs: int = _key(8, "How many jobs a prefill engine holds at a time.", least=1)
    max_prefill_tokens: int = _key(
        65536, "A prefill engine takes no further job while those that it has not computed yet have this many prompt "
        "tokens together. The last one may go beyond, so a prompt of any length is taken.", least=1)
    prefill_step_s: float = _key(
        0.75, "How long a step of a prefill engine may take that computes jobs, or clients' prompts that it is to "
        "keep, as it has measured its speed; a job that arrives waits that long at most before its turn is looked at.",
        above=0, most=3600)
    prefill_overtaking: float = _key(
        8.0, "A job, or a client's prompt that is to be kept, may be passed by shorter ones that arrive within so many "
        "times its own computing time after it; 0: first in, first out.", least=0, most=1000)
    prefix_reads: str = _key(
        PrefixReads.AUTO.value, "Whether a prefill engine reads the part of a prompt that only the decode engine has "
        "in its prefix cache, instead of computing it: `auto` where that takes less time.",
        choices=tuple(word.value for word in PrefixReads))
    push_chunks: bool = _key(
        True, "Whether a prefill engine sends the blocks of a prompt that are computed while it computes the rest, "
        "after each step, instead of all at the end. On V1; no effect on V0.")
    transport: str = _key(
        "nixl", "What carries the KV: `nixl`, or `torch` (gloo, on the CPU only), which needs no library but torch, is "
        "slower, and reads no prefixes. All engines of a fleet must have the same.",
        choices=("nixl", TWO_SIDED))
    metaservers: str | None = _key(
        None, "The URLs, with commas between them, of the metaservers to which a decode engine may post the jobs of "
        "requests that name one of them. Without it, it posts to none. On V1; V0 refuses it.")
    lease_s: float = _key(
        30.0, "How long a prefill engine may write after a grant that is not renewed.", least=0.1, most=3600)
    hold_s: float = _key(
        30.0, "Prefill first, on V1: how long a prefill engine keeps the blocks of a prompt for a decode engine that "
        "has not claimed them yet; 0: it keeps none. What is claimed is kept until the decode engine has read it, or "
        "is dead.", least=0, most=3600)
    attempt_deadline_s: float = _key(
        120.0, "After this long a remote prefill is given up and the prompt prefilled elsewhere.", above=0, most=86400)
    attempts: int = _key(
        2, "How often a prompt is tried on a prefill engine, each time another one, before it is prefilled locally; "
        "all attempts together take at most `attempt_deadline_s`.", least=1, most=16)
    max_fallback_share: float = _key(
        0.5, "The share of a decode engine's time that prompts which come back from a failed prefill engine may take "
        "while other requests run.", above=0, most=1)
    fallback: str = _key(
        FallbackRule.LOCAL.value, "What a decode engine does with a prompt that should be prefilled remotely and can't "
        "be: `local`: it prefills it; `bounded`: it prefills it if it has room within `fallback_tokens`; `refuse`: it "
        "does not prefill it. With the last two a prompt waits for room or for a prefill engine, and ends with an "
        "error after `fallback_wait_s`. On V1; V0 has `local` only.",
        choices=tuple(rule.value for rule in FallbackRule))
    fallback_tokens: int = _key(
        8192, "With `fallback` `bounded`: how many tokens of such prompts a decode engine has to compute at a time. A "
        "longer prompt is let in where no other one is left.", least=1)
    fallback_wait_s: float = _key(
        10.0, "With `fallback` `bounded` or `refuse`: how long a prompt waits each time that it can't be prefilled "
        "remotely, before it ends with an error; 0: not at all.", least=0, most=3600)
    claim_retry_s: float = _key(
        2.0, "A job that nobody has claimed for this long is queued again.", least=0.01, most=3600)
    heartbeat_s: float = _key(
        1.0, "How often an engine reports to the broker and renews its leases.", least=0.01, most=600)
    ttl_s: float = _key(
        5.0, "How long an engine, or the broker, may be silent before it counts as gone; `vllm-pd broker` has its own "
        "`--ttl-s`.", least=0.02, most=3600)
    log_decisions: bool = _key(
        False, "Whether a decode engine logs where each prompt is prefilled and why; with `max_local_prefill_tokens` "
        "`auto` with all that was compared.")
    store: StoreSettings | None = _key(
        None, "The KV store that the engines of this host share, as an object of its own keys. What is there counts as "
        "a prefix hit.")
    weights_digest: str | None = _key(
        None, "The digest of weights that are no files of the model, for which the operator vouches: 64 hexadecimal "
        "digits, as `vllm-pd digest FOLDER` prints them of a folder with the same weights.")
    media: bool = _key(
        False, "Whether prompts with images, video or audio may be prefilled by another engine: the same on all. "
        "On V1; not tried on a GPU.")
    step_sync: bool = _key(
        False, "Whether the data-parallel ranks of a model with experts agree on their forward passes among "
        "themselves, in the place of vLLM's waves: the same on all ranks. On V1.")
    drain_timeout_s: float = _key(
        30.0, "How long a server may go on after the signal to stop with what is open, before that is ended.", least=0,
        most=86400)

    @classmethod
    def parse(cls, kv_role: str | None, extra: Mapping[str, Any] | None) -> "PDConfig":
        """The settings of an engine with this `kv_role` and `kv_connector_extra_config`.

        Raises ConfigError for the first key that is unknown, missing, of a wrong type or out of bounds. Reads files
        that are named, and looks for the address of a `bind` that is a name or `auto`, but not whether a port is free
        (see `vllm_pd.rpc.ports` for that).
        """
        if kv_role not in KV_ROLES:
            raise ConfigError("kv_role", kv_role, f"write one of {', '.join(KV_ROLES)}")
        values = dict(extra or {})
        known = {key.name: key for key in cls.settings()}
        for name in values:
            if name not in known:
                raise ConfigError(name, values[name], _cure_unknown(name, list(known)))
        if "broker" not in values:
            raise ConfigError("broker", None, f'it is missing: start vllm-pd broker and write "broker": '
                              f'"{EXAMPLE_BROKER}"')
        config = cls(role=KV_ROLES[kv_role], **{name: _checked(known[name], value, values)
                                                for name, value in values.items()})
        config._check_pairs()
        return config

    @classmethod
    def settings(cls) -> list[dataclasses.Field]:
        """The fields that are keys of `kv_connector_extra_config`, in the order of the documentation."""
        return [key for key in dataclasses.fields(cls) if "rule" in key.metadata]

    @classmethod
    def check_number(cls, name: str, value: Any, key: str) -> Any:
        """The value of the setting `name`, a number, that was given as `key`. Raises ConfigError naming `key`."""
        return _checked_number(next(one for one in cls.settings() if one.name == name), value, key)

    @property
    def decides_by_time(self) -> bool:
        """Whether expected times decide where a prompt is prefilled, and no fixed number of tokens."""
        return self.max_local_prefill_tokens == AUTO

    @property
    def bounds(self) -> PolicyConfig:
        """The bounds that decide where a prompt is prefilled."""
        fixed = START_LOCAL_PREFILL_TOKENS if self.decides_by_time else self.max_local_prefill_tokens
        return PolicyConfig(max_local_prefill_tokens=fixed, max_queue_length=self.max_queue_length,
                            max_parked_fraction=self.max_parked_fraction, attempts=self.attempts,
                            auto=self.decides_by_time,
                            itl_target_s=None if self.itl_target_ms is None else self.itl_target_ms / 1000)

    @property
    def fallback_config(self) -> FallbackConfig:
        """What becomes of prompts that can't go to a prefill engine."""
        return FallbackConfig(FallbackRule(self.fallback), self.fallback_tokens, self.fallback_wait_s)

    @property
    def job_order(self) -> JobOrder:
        """The order in which prefill engines compute their jobs, as far as they have the same settings."""
        return JobOrder(self.prefill_overtaking, self.prefill_step_s, self.attempt_deadline_s / 4)

    @property
    def is_two_sided(self) -> bool:
        """Whether this engine itself puts what it receives into its blocks."""
        return self.transport == TWO_SIDED

    @property
    def holds_prompts(self) -> bool:
        """Whether this engine may keep prompts for decode engines to read, which a two-sided transport can't."""
        return self.role.prefills and self.hold_s > 0 and not self.is_two_sided

    @property
    def metaserver_urls(self) -> tuple[str, ...]:
        """Those of `metaservers`."""
        return tuple(self.metaservers.split(",")) if self.metaservers and self.role.decodes else ()

    @property
    def transport_host(self) -> str:
        """The address at which the transport listens, which is that of the control socket."""
        return hosts_of(self.bind)[0]

    def _check_pairs(self) -> None:
        """Raises ConfigError for values that are valid alone and not together."""
        if self.is_two_sided and self.prefix_reads == PrefixReads.ALWAYS.value:
            raise ConfigError("prefix_reads", self.prefix_reads, f'the transport "{self.transport}" reads nothing from '
                              'a peer: write auto or never')
        if self.itl_target_ms is not None and not self.decides_by_time:
            raise ConfigError("itl_target_ms", self.itl_target_ms, "a fixed number of tokens decides, and no time: "
                              f'write "max_local_prefill_tokens": "{AUTO}" too, or leave it out')
        if self.nats_ca is not None:
            check_encrypted("nats_ca", self.nats_ca, self.broker)
        if self.lifeline_port and self.bind.endswith(f":{self.lifeline_port}"):
            raise ConfigError("lifeline_port", self.lifeline_port, "bind has that port: write another one, or 0")
        if self.ttl_s < 2 * self.heartbeat_s:
            raise ConfigError("ttl_s", self.ttl_s, f"one lost heartbeat would drop a live engine: write at least "
                              f"{2 * self.heartbeat_s:g} (twice heartbeat_s)")
        if self.lease_s <= self.heartbeat_s:
            raise ConfigError("lease_s", self.lease_s, f"a lease would end before it is renewed: write more than "
                              f"{self.heartbeat_s:g} (heartbeat_s)")
        if self.attempt_deadline_s <= self.claim_retry_s:
            raise ConfigError("attempt_deadline_s", self.attempt_deadline_s, f"a lost job would never be queued again: "
                              f"write more than {self.claim_retry_s:g} (claim_retry_s)")


def _cure_unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.5)
    if near:
        return f"there is no such key: did you mean {near[0]}?"
    return f"there is no such key: write one of {', '.join(known)}"


def _checked(key: dataclasses.Field, value: Any, values: Mapping[str, Any]) -> Any:
    """The valid form of one value; `values` are all that were given."""
    rule: Rule = key.metadata["rule"]
    if rule.choices:
        if value not in rule.choices:
            raise ConfigError(key.name, value, f"write one of {', '.join(rule.choices)}")
        return value
    if key.name in _TEXTS:
        if not isinstance(value, str):
            raise ConfigError(key.name, value, f"it must be a string: {_TEXTS[key.name]}")
        return _checked_text(key.name, value, values)
    if key.name == "store":
        if not isinstance(value, dict):
            raise ConfigError(key.name, value, 'it must be an object, like {"memory_gib": 4}, or {} for all defaults')
        return StoreSettings.parse(value, values.get("keys"))
    if key.type is bool:
        if not isinstance(value, bool):
            raise ConfigError(key.name, value, "it must be true or false, without quotes")
        return value
    if isinstance(value, str) and value in rule.words:
        return value
    return _checked_number(key, value, key.name)


def _checked_number(key: dataclasses.Field, value: Any, name: str) -> Any:
    """The valid form of a number: an int where the key's type is one, else a float. Raises ConfigError naming `name`,
    which is the key, or the option by which it was given."""
    rule: Rule = key.metadata["rule"]
    whole = key.type in (int, int | str)
    wanted = "a whole number" if whole else "a number"
    like = f"like {key.default if rule.example is None else rule.example}" + "".join(f', or "{word}"'
                                                                                  for word in rule.words)
    numeric = (int, ) if whole else (int, float)
    endless = isinstance(value, float) and not math.isfinite(value)
    if isinstance(value, bool) or not isinstance(value, numeric) or endless:
        raise ConfigError(name, value, f"it must be {wanted}, without quotes, {like}")
    if not rule.allows(value):
        raise ConfigError(name, value, f"it must be {rule.range_text()}, {like}")
    if whole and value > MAX_WHOLE:
        raise ConfigError(name, value, f"it must be at most {MAX_WHOLE}, {like}")
    return int(value) if whole else float(value)


_TEXTS = {
    "broker": f"write it like {EXAMPLE_BROKER}",
    "bind": f"write it like {EXAMPLE_BIND}",
    "zone": "write it like rack-7",
    "policy": "write it like my_module.MyPolicy",
    "keys": "write the name of the file that vllm-pd keys made",
    "nats_credentials": "write the name of a file",
    "nats_ca": "write the name of a file",
    "nats_prefix": f"write it like {DEFAULT_PREFIX}",
    "weights_digest": EXAMPLE_DIGEST,
    "metaservers": "write it like http://10.0.0.5:9000/v1/metaserver, with commas between several",
}
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,32}")


def _is_zone(value: str) -> bool:
    return 0 < len(value) <= MAX_ZONE_CHARS and value.isprintable() and " " not in value


def _checked_text(name: str, value: str, values: Mapping[str, Any]) -> str:
    """The valid form of a text, which may be another spelling of it; a file that it names is read and checked. `values`
    are all that were given: `bind` may depend on the broker's address, and keys or credentials allow more addresses.
    Raises ConfigError."""
    if name == "broker" and NatsAddress.is_url(value):
        return parse_nats(name, value, keyed="nats_credentials" in values)
    if name == "broker":
        return url_of(*parse_endpoint(name, value, keyed="keys" in values))
    if name == "bind":
        broker = _checked(next(key for key in PDConfig.settings() if key.name == "broker"), values["broker"], values)
        return url_of(*parse_bind(name, value, any_port=True, keyed="keys" in values, broker=broker))
    if name == "zone":
        if not _is_zone(value):
            raise ConfigError(name, value, f"it must be 1 to {MAX_ZONE_CHARS} printable characters without spaces: "
                              f"{_TEXTS[name]}")
    elif name == "policy":
        if not _CLASS.fullmatch(value):
            raise ConfigError(name, value, f"it must be the name of a module and of a class in it: {_TEXTS[name]}")
    elif name == "keys":
        Keys.load(value)
    elif name == "nats_credentials":
        check_credentials(name, value)
    elif name == "weights_digest":
        check_digest(value)
    elif name == "metaservers":
        urls = [url.strip() for url in value.split(",")]
        for url in urls:
            if not is_metaserver(url):
                raise ConfigError(name, value, f"each part must be the URL of a server: {_TEXTS[name]}")
        return ",".join(urls)
    elif name == "nats_ca":
        check_certificates(name, value)
    elif not _PREFIX.fullmatch(value):
        raise ConfigError(name, value, f"it must be 1 to 32 letters, digits, - or _: {_TEXTS[name]}")
    return value
