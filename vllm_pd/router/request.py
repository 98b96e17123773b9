# SPDX-License-Identifier: Apache-2.0
"""A client's request on its way through the router, and what became of it so far."""
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus

from vllm_pd.router import prefill_form
from vllm_pd.router.continuation import ContinuableStream
from vllm_pd.router.prefill_form import Fields, PrefillOutcome
from vllm_pd.router.responses import Headers
from vllm_pd.router.workers import RouterWorker


@dataclass
class PrefillLeg:
    """What became of it. `worker` is P, None where none was asked. With `params`, the `kv_transfer_params` of P's
    answer, the request's `fields` are there too. `took_s`: the time at P."""
    outcome: StrEnum = PrefillOutcome.CUT  # or a WorkerFailure
    worker: RouterWorker | None = None
    fields: Fields | None = None
    params: bytes | None = None
    took_s: float = 0.0

    def take_body(self) -> bytes | None:
        """The body for D with P's parameters, once: P's blocks may be gone after one D has had it. None afterwards."""
        params, self.params = self.params, None
        return None if params is None else prefill_form.decode_body(self.fields, params)

    def explained(self) -> str:
        """Its part of the header X-Vllm-Pd-Explain."""
        return f"; prefill={self.outcome.value}" + (f" at {self.worker.url}" if self.worker is not None else "")


@dataclass
class Suspect:
    """A worker that has answered a request with 500. `failure` is the number of that failure if it was taken out for
    it, else None."""
    worker: RouterWorker
    failure: int | None
    detail: str


class StreamBroke(Exception):
    """A stream broke that can perhaps go on elsewhere. `lost`: its connection broke. If it can't, it ends with an error
    of this `status`."""

    def __init__(self, worker: RouterWorker, why: str, status: HTTPStatus, lost: bool) -> None:
        super().__init__(why)
        self.worker = worker
        self.status = status
        self.lost = lost


@dataclass
class RouterRequest:
    """A client's request. `target` is path and query as received. `generates`: its answer takes a step of an engine.
    `prefill_leg`: what came of it in the order prefill-first, None in the order decode-first."""
    method: bytes
    path: str
    target: bytes
    headers: Headers
    body: bytes
    began_s: float
    generates: bool
    explain: bool = False
    tries: list[dict[str, str]] = field(default_factory=list)
    prefill_leg: PrefillLeg | None = None
    resent: int = 0  # tries on an idle connection that the worker had closed
    suspects: list[Suspect] = field(default_factory=list)
    refusals: list[tuple[RouterWorker, float]] = field(default_factory=list)  # workers that refused it, pause in s
    stream: ContinuableStream | None = None  # its answer, where that can be continued
    broke: StreamBroke | None = None  # how that broke last
    rest: tuple[bytes, bytes] | None = None  # target and body of the request for what is missing of it
