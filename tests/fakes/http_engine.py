# SPDX-License-Identifier: Apache-2.0
"""Stands in for a decode engine: answers with fixed tokens at fixed times and counts what a real one would count."""

import http.server
import json
import threading
import time
from collections.abc import Sequence

import prometheus_client


class FakeEngine:
    """A server on a thread. The prompt's length decides: above `max_local` it is counted as remote."""

    def __init__(self, *, max_local: int = 100, first_s: float = 0.05, gap_s: float = 0.01,
                 stages_s: Sequence[tuple[str, float]] = (("queue", 0.001), ("claim", 0.002), ("prefill", 0.02),
                                                          ("transfer", 0.005), ("first_step", 0.01)),
                 token_ids: Sequence[int] = (11, 12, 13, 14), late_s: float = 0.2) -> None:
        self.max_local, self.first_s, self.gap_s = max_local, first_s, gap_s
        self.stages_s, self.token_ids, self.late_s = stages_s, token_ids, late_s
        self.bodies: list[dict] = []
        self.registry = prometheus_client.CollectorRegistry()
        self.decisions = prometheus_client.Counter("vllm:pd_decisions_total", "", ["decision", "reason"],
                                                   registry=self.registry)
        self.attempts = prometheus_client.Counter("vllm:pd_attempts_total", "", ["outcome"], registry=self.registry)
        self.handover = prometheus_client.Histogram("vllm:pd_handover_seconds", "", ["stage"], registry=self.registry)
        self.parked = prometheus_client.Histogram("vllm:pd_parked_seconds", "", registry=self.registry)
        self.prefill = prometheus_client.Histogram("vllm:request_prefill_time_seconds", "", registry=self.registry)
        self.bytes = prometheus_client.Counter("vllm:pd_transfer_bytes_total", "", registry=self.registry)
        self._counting = threading.Lock()  # a page shows all of a request's figures, or none
        handler = type("Handler", (_Handler, ), {"engine": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> "FakeEngine":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def page(self) -> bytes:
        with self._counting:
            return prometheus_client.generate_latest(self.registry)

    def count(self, prompt_tokens: int) -> None:
        with self._counting:
            self.prefill.observe(self.first_s / 2)
            if prompt_tokens <= self.max_local:
                self.decisions.labels("local", "threshold").inc()
                return
            self.decisions.labels("remote", "length").inc()
        threading.Timer(self.late_s, self._count_late, [prompt_tokens]).start()

    def _count_late(self, prompt_tokens: int) -> None:
        with self._counting:
            self.attempts.labels("done").inc()
            self.bytes.inc(1000 * prompt_tokens)
            self.parked.observe(0.03)
            for stage, seconds in self.stages_s:
                self.handover.labels(stage).observe(seconds)


class _Handler(http.server.BaseHTTPRequestHandler):
    engine: FakeEngine

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._reply(self.engine.page())
        elif self.path == "/v1/models":
            self._reply(json.dumps({"data": [{"id": "fake"}]}).encode())
        elif self.path == "/health":
            self._reply(b"")
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.engine.bodies.append(body)
        if body["model"] != "fake":
            self._reply(b'{"message": "no such model"}', 404)
            return
        prompt = body.get("prompt") or [0] * 10
        self.engine.count(len(prompt))
        chat = self.path.startswith("/v1/chat")
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(self.engine.token_ids)}
        if not body.get("stream"):
            time.sleep(self.engine.first_s)
            choice = self._choice(chat, self.engine.token_ids, stream=False) | {"finish_reason": "length"}
            self._reply(json.dumps({"choices": [choice], "usage": usage}).encode())
            return
        self.send_response(200)
        self.end_headers()
        for number, token_id in enumerate(self.engine.token_ids):
            time.sleep(self.engine.gap_s if number else self.engine.first_s)
            last = number == len(self.engine.token_ids) - 1
            choice = self._choice(chat, [token_id], stream=True) | {"finish_reason": "length" if last else None}
            self._event({"choices": [choice]})
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _choice(self, chat: bool, token_ids: Sequence[int], stream: bool) -> dict:
        tokens = [f"token_id:{token_id}" for token_id in token_ids]
        text = "".join(f"<{token_id}>" for token_id in token_ids)
        if chat:
            return {"delta" if stream else "message": {"content": text},
                    "logprobs": {"content": [{"token": token} for token in tokens]}}
        likely = [{token: -0.1, "token_id:1": -5.0} for token in tokens]
        return {"text": text, "logprobs": {"tokens": tokens, "top_logprobs": likely}}

    def _event(self, part: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(part).encode() + b"\n\n")
        self.wfile.flush()

    def _reply(self, payload: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: object) -> None:
        pass
