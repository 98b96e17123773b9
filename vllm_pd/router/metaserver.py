# SPDX-License-Identifier: Apache-2.0
"""The router as the proxy of the metaserver form (docs/protocol.md): the decode engine (D) is asked first, and posts
the job of a prompt to the router, which has a prefill engine (P) of its own choice do it.

Life of an `OpenTry`: it begins when a completion is sent to a D, under a request id that nobody else can know. From
then until the first byte of D's answer, D may post its job once. The router gives the job to a P with the client's
body, and to a second P where the first one has refused it, and answers the post at the end. Whatever the answer is, D
goes on: it has the KV of the job, or the attempt is over and D decides anew. An `OpenTry` ends with the try at D;
unless D has answered by then, so does P's request.
"""
import re
import uuid
from enum import StrEnum
from http import HTTPStatus

import msgspec

from vllm_pd.router import prefill_form, responses
from vllm_pd.router.bodies import BodyBudget
from vllm_pd.router.client_connection import ClientConnection, ClientGone, Receive, Send
from vllm_pd.router.errors import RouterErrors
from vllm_pd.router.fatal_requests import FatalRequests
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.placing import PlacementPlan, Placer
from vllm_pd.router.prefill_form import Fields, NotPrefilled, PrefillOutcome
from vllm_pd.router.prefill_leg import REQUEST_ID, PrefillSender
from vllm_pd.router.request import RouterRequest
from vllm_pd.router.responses import Headers, RouterResponse
from vllm_pd.router.routes import CHAT, COMPLETING
from vllm_pd.router.workers import RouterWorker, WorkerFailure

MAX_POST_BYTES = 8 << 20  # of a million token ids
MAX_POSTS_BYTES = 256 << 20  # of all open posts, which need no key
POST_BODY_S = 5.0  # for the body of a post
MAX_PREFILLS = 2  # Ps for one post
# How a try at a P fails that may have claimed the job: D then lets no other P have it.
_MAY_HAVE_CLAIMED = frozenset({WorkerFailure.BROKEN, WorkerFailure.TIMEOUT, WorkerFailure.PROBE})
_CLIENTS_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")  # a client's request id that the drawn one may begin with


class PostOutcome(StrEnum):
    """What became of a post; the label of a counter. Where no P was asked it may also be `NO_PREFILL`, `FATAL` or `CUT`
    of `PrefillOutcome`. Where the last P has failed it is a `WorkerFailure`, or REFUSED or BAD_PARAMS of those."""
    DONE = "done"
    UNREAD = "unread"  # no JSON object with a request id, or too long
    UNKNOWN = "unknown"  # no such request is open, or its answer has begun
    AGAIN = "again"  # it was posted before
    ENDED = "ended"  # the request has ended without an answer of this D
    GONE = "gone"  # D has ended its post


class _Post(msgspec.Struct):
    """The field that is read of a post."""
    request_id: str


_post = msgspec.json.Decoder(_Post)


class OpenTry:
    """A try of a completion at a D that may post its job. `headers` and `body` are for D. See the module."""

    def __init__(self, request: RouterRequest, plan: PlacementPlan, headers: Headers, fields: Fields, url: str,
                 open_tries: "dict[str, OpenTry]") -> None:
        self.request, self.plan, self.fields = request, plan, fields
        drawn = _draw(headers)
        target, _ = request.rest or (request.target, request.body)
        self.path = target.partition(b"?")[0].decode()
        self.request_id = f"chatcmpl-{drawn}" if self.path == CHAT else f"cmpl-{drawn}-0"
        self.headers = [*(one for one in headers if one[0] != REQUEST_ID), (REQUEST_ID, drawn.encode())]
        self.body = prefill_form.decode_body(fields, msgspec.json.encode(
            {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": url}))
        self.post: ClientConnection | None = None  # D's
        self.is_dropped = False  # it has ended before D has answered
        self._open_tries = open_tries
        open_tries[self.request_id] = self

    def answer_begins(self) -> None:
        """From now on D can't post: the client may read the request id in the answer. An answer may be long, so what is
        sent no more is not kept."""
        self._open_tries.pop(self.request_id, None)
        self.body, self.fields = b"", {}

    def end(self, answered: bool) -> None:
        """The try has ended. Unless D has `answered`, nobody needs the prompt's KV any more."""
        self.answer_begins()
        self.is_dropped = not answered
        if self.is_dropped and self.post is not None:
            self.post.leave()


class Metaserver:
    """See the module. `url`: where engines reach `/v1/metaserver` of this router. `bodies` counts those of posts.
    Belongs to the router's event loop."""

    def __init__(self, url: str, sender: PrefillSender, placer: Placer, fatal: FatalRequests, metrics: RouterMetrics,
                 errors: RouterErrors) -> None:
        self.bodies = BodyBudget(MAX_POST_BYTES, MAX_POSTS_BYTES)
        self._url = url
        self._sender = sender
        self._placer = placer
        self._fatal = fatal
        self._metrics = metrics
        self._errors = errors
        self._open: dict[str, OpenTry] = {}

    def __len__(self) -> int:
        """The tries whose D may post, or has posted and not answered."""
        return len(self._open)

    def begin(self, request: RouterRequest, plan: PlacementPlan, headers: Headers) -> OpenTry | None:
        """Open a try, which the caller has to `end`. None for a request that D gets as it is: no completion, or not one
        prompt for one answer."""
        target, body = request.rest or (request.target, request.body)
        if not request.generates or target.partition(b"?")[0].decode() not in COMPLETING:
            return None
        try:
            fields = prefill_form.read_fields(body)
        except NotPrefilled:
            return None
        return OpenTry(request, plan, headers, fields, self._url, self._open)

    async def serve(self, body: bytes, receive: Receive, send: Send) -> RouterResponse:
        """The answer to a post with this body. `receive` says when D has ended it."""
        client = ClientConnection(receive, send)
        outcome: StrEnum = PrefillOutcome.CUT
        try:
            outcome, answer = await self._answer(body, client)
        finally:
            client.close()
            self._metrics.posts.labels(outcome.value).inc()
        return answer

    def refuse_unread(self, status: int, why: str) -> RouterResponse:
        """The answer to a post whose body is not read."""
        self._metrics.posts.labels(PostOutcome.UNREAD.value).inc()
        return self._errors.response(status, why)

    async def _answer(self, body: bytes, client: ClientConnection) -> tuple[StrEnum, RouterResponse]:
        try:
            request_id = _post.decode(body).request_id
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return self._refuse(PostOutcome.UNREAD, HTTPStatus.BAD_REQUEST, f"{error}: post what engines post, a JSON "
                                "object with the request_id")
        this = self._open.get(request_id)
        if this is None:
            return self._refuse(PostOutcome.UNKNOWN, HTTPStatus.NOT_FOUND, f"request_id={request_id[:200]!r}: no "
                                "engine has such a request of this router that waits for its first token")
        if this.post is not None:
            return self._refuse(PostOutcome.AGAIN, HTTPStatus.CONFLICT, f"request_id={request_id!r} was posted before: "
                                "only the first job of a request goes through the metaserver")
        this.post = client
        try:
            outcome = await self._prefill(this, body, client)
        except ClientGone:
            return self._refuse(PostOutcome.ENDED if this.is_dropped else PostOutcome.GONE, HTTPStatus.CONFLICT,
                                f"request_id={request_id!r} has ended")
        if outcome is PostOutcome.DONE:
            return outcome, RouterResponse.of_json(None)
        return self._refuse(outcome, HTTPStatus.BAD_GATEWAY, f"no prefill engine has done the job: {outcome.value}")

    def _refuse(self, outcome: StrEnum, status: int, why: str) -> tuple[StrEnum, RouterResponse]:
        return outcome, self._errors.response(status, why)

    async def _prefill(self, this: OpenTry, post: bytes, client: ClientConnection) -> StrEnum:
        """Have a P do the job, and another one if that has refused it. Returns what became of it. Raises ClientGone."""
        path, key = this.request.path, this.request.body
        if self._fatal.is_known_at_prefill(path, key):
            return PrefillOutcome.FATAL
        outcome: StrEnum = PrefillOutcome.NO_PREFILL
        body = prefill_form.prefill_body(this.fields, msgspec.Raw(post))
        tried: list[RouterWorker] = []
        while len(tried) < MAX_PREFILLS and (worker := self._placer.place_prefill(this.plan, tried)) is not None:
            tried.append(worker)
            try:
                await self._sender.ask(worker, this.path.encode(), this.headers, body, client)
            except NotPrefilled as error:
                outcome = error.outcome
            else:
                self._fatal.prefilled(path, key)
                return PostOutcome.DONE
            if outcome is WorkerFailure.BROKEN:
                await self._fatal.connection_broke(worker, path, key, at_prefill=True)
            if outcome in _MAY_HAVE_CLAIMED:
                break
        return outcome


def _draw(headers: Headers) -> str:
    """A request id with 122 random bits, for one try. It begins with the client's own, if that has no odd character."""
    mine, drawn = responses.find(headers, REQUEST_ID), uuid.uuid4().hex
    return f"{mine.decode()}-{drawn}" if mine is not None and _CLIENTS_ID.fullmatch(mine) else drawn
