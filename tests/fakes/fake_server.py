# SPDX-License-Identifier: Apache-2.0
"""Stands in for `vllm serve`, the broker and the router in tests of `vllm-pd up`: listens at once, obeys a few words.

The words are the model's name, joined by "+": `grandchild` starts a process of its own, `utf-8` prints a word in
UTF-8, `stubborn` ignores SIGTERM, `dies` ends before it listens, `dies-late` ends when it is asked for `/die`, `slow`
never listens, `slow-but-logs` listens after LATE_LINES_S and prints lines until then, `shares` lets others listen at
its port, as vLLM 0.9.2 does. The router takes a second to end.
"""

import http.server
import os
import signal
import subprocess
import sys
import time

LATE_LINES_S, LATE_LINES = 7.0, 28


class Health(http.server.BaseHTTPRequestHandler):

    def do_GET(self) -> None:
        if self.path == "/die":
            os._exit(9)
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def end(delay_s: float) -> None:
    """Say so, and end after a while."""
    print("asked to end", flush=True)
    time.sleep(delay_s)
    print("ends", flush=True)
    os._exit(0)


def value_of(flag: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1]


def main() -> None:
    if sys.argv[1] == "broker":
        words, port = set(), int(value_of("--bind").rpartition(":")[2])
    elif sys.argv[1] == "router":
        words, port = set(), int(value_of("--port"))
    else:
        words, port = set(sys.argv[2].split("+")), int(value_of("--port"))
    print("arguments", sys.argv[1:], flush=True)
    print("cores", sorted(os.sched_getaffinity(0)), os.environ.get("VLLM_CPU_OMP_THREADS_BIND"),
          os.environ.get("OMP_NUM_THREADS"), flush=True)
    print("operator key", os.environ.get("VLLM_PD_OPERATOR_KEY"), flush=True)
    if "grandchild" in words:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("grandchild", child.pid, flush=True)
    if "utf-8" in words:
        os.write(1, "gr\u00fc\u00df\n".encode())
    signal.signal(signal.SIGTERM, lambda *_: end(float(sys.argv[1] == "router")))
    if "stubborn" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "dies" in words:
        print("my last words", flush=True)
        sys.exit(7)
    if "slow-but-logs" in words:
        for part in range(LATE_LINES):
            print(f"loading part {part}", flush=True)
            time.sleep(LATE_LINES_S / LATE_LINES)
    if "slow" in words:
        time.sleep(600)
    http.server.ThreadingHTTPServer.allow_reuse_port = "shares" in words
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Health)
    if "dies-late" in words and "kv_producer" in value_of("--kv-transfer-config"):
        print("my late last words", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
