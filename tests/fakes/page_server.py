# SPDX-License-Identifier: Apache-2.0
"""An HTTP server on a thread that answers as a table says."""
import http.server
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """An answer; a body that is no bytes is sent as JSON. `delay_s` passes before it. `drip`: a byte each 50 ms."""
    body: Any = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drip: bool = False


class PageServer:
    """`answer` gets method, path, headers by names in small letters, and body; None: there is no such page."""

    def __init__(self, answer: Callable[[str, str, dict[str, str], bytes], Reply | None]) -> None:
        self.answer = answer
        self.ended = threading.Event()
        handler = type("Handler", (_Handler, ), {"pages": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> "PageServer":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    pages: PageServer

    def do_GET(self) -> None:
        self._reply(b"")

    def do_POST(self) -> None:
        self._reply(self.rfile.read(int(self.headers["content-length"])))

    def _reply(self, body: bytes) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        reply = self.pages.answer(self.command, self.path, headers, body) or Reply({"detail": "Not Found"}, 404)
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.pages.ended.wait(reply.delay_s)
        try:
            self.send_response(reply.status)
            for name, value in {**reply.headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if not reply.drip:
                self.wfile.write(content)
            for number in range(len(content) if reply.drip else 0):
                self.wfile.write(content[number:number + 1])
                if self.pages.ended.is_set():
                    return
                time.sleep(0.05)
        except OSError:
            pass  # who asked has left

    def log_message(self, *args: object) -> None:
        pass
