# SPDX-License-Identifier: Apache-2.0
"""The metaserver form: the job of an attempt goes through a proxy, in place of the queue. Pure.

The proxy sends a request to D first and names its metaserver, a URL. D posts there what P needs (`post_params`); the
proxy sends the prompt to a P of its choice, with that as `kv_transfer_params`; P finds the job in it (`carried_job`).
The fields are those of vllm-ascend's layerwise connector, and `pd_job`, which has the job itself. The other fields name
no block: only a grant does.

Who knows the name of an attempt can have P compute other tokens for it. So an attempt that is posted has a name that
cannot be guessed (`posted_name`), and P takes no other one from a client (`is_posted`).
"""
import base64
import re
from typing import Any
from urllib.parse import urlsplit

import msgspec

from vllm_pd.protocol import messages as m
from vllm_pd.protocol.holds import transfer_params

URL_KEY = "metaserver"
JOB_KEY = "pd_job"
_POSTED = re.compile(r"posted-[0-9a-f]{32}-(.*)", re.DOTALL)
_RANDOM_END = re.compile(r"-[0-9a-f]{8}$")  # what V1 puts behind the id of each request
_jobs = msgspec.msgpack.Decoder(m.Job)


def named_metaserver(extra_args: Any) -> str | None:
    """The URL that a request names, by the `extra_args` of its sampling parameters, which may hold anything."""
    params = transfer_params(extra_args)
    url = params.get(URL_KEY)
    return url if params.get("do_remote_prefill") is True and isinstance(url, str) else None


def is_metaserver(url: str) -> bool:
    """Whether this is the URL of a server, and of nothing else: no user, no fragment."""
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0  # raises ValueError for one that is no number
    except ValueError:
        return False
    return (parts.scheme in ("http", "https") and bool(parts.hostname) and has_port and "@" not in parts.netloc
            and "#" not in url and url.isascii() and url.isprintable() and " " not in url)


def posted_name(request_id: str, secret: str) -> str:
    """The request id of an attempt that is posted. `secret`: 32 hexadecimal digits that nobody can guess."""
    return f"posted-{secret}-{request_id}"


def is_posted(attempt: m.Attempt) -> bool:
    """Whether `posted_name` made the name of this attempt."""
    return _POSTED.fullmatch(attempt.request_id) is not None


def request_of(attempt: m.Attempt) -> str:
    """The id of the request that it is of, whether or not it is posted."""
    posted = _POSTED.fullmatch(attempt.request_id)
    return attempt.request_id if posted is None else posted[1]


def external_id(request_id: str) -> str:
    """The id of a request outside of its engine, by which its proxy knows it."""
    return _RANDOM_END.sub("", request_id)


def post_params(job: m.Job, request_id: str, fingerprint: m.Fingerprint) -> dict[str, Any]:
    """What D posts. `job` is D's, and `fingerprint` too; `request_id` as `external_id` returns it."""
    address = urlsplit(job.address)
    return {"request_id": request_id, "do_remote_decode": True, "do_remote_prefill": False, "token_ids": [],
            "remote_block_ids": [], "remote_block_size": fingerprint.block_size,
            "remote_engine_id": job.attempt.incarnation, "remote_host": address.hostname, "remote_port": address.port,
            "remote_tp_size": fingerprint.tp, "remote_pcp_size": 1, "remote_dcp_size": 1,
            "remote_cached_tokens": job.cached_tokens,
            JOB_KEY: base64.b64encode(msgspec.msgpack.encode(job)).decode()}


def carried_job(value: Any) -> m.Job:
    """The job in `pd_job`, which may hold anything. Raises ValueError where there is none."""
    if not isinstance(value, str):
        raise ValueError("it is not a string")
    try:
        job = _jobs.decode(base64.b64decode(value, validate=True))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it holds no job: {str(error)[:200]}") from error
    if not is_posted(job.attempt):
        raise ValueError("its attempt was not posted to a metaserver")
    return job
