# SPDX-License-Identifier: Apache-2.0
"""Stands in for `vllm serve` and the broker in tests of `vllm-pd bench serve`: dummy engines that obey a few words.

The words are the model's name, joined by "+": `no-chunks` ends where a chunked prefill is asked for, `other` says other
words where it is disaggregated, `dies` ends at the first long prompt where it is disaggregated. Without disaggregation
a long prompt stops all answers for a while, as a prefill does.
"""

import os
import socket
import sys
import time

import uvloop

from vllm_pd.bench import dummy

LONG_CHARS = 1000
PREFILL_S = 0.3


def value_of(flag: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1]


class OtherAnswer(dummy.DummyAnswer):

    def events(self) -> list[bytes]:
        return [event.replace(b" t1\"", b" x1\"") for event in super().events()]


class EngineConnection(dummy.DummyConnection):
    """A prefill takes the engine's time."""

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if len(body) > LONG_CHARS:
            if "--kv-transfer-config" not in sys.argv:
                time.sleep(PREFILL_S)
            elif "dies" in sys.argv[2].split("+"):
                os._exit(9)


def main() -> None:
    if sys.argv[1] == "broker":
        with socket.create_server(("127.0.0.1", int(value_of("--bind").rpartition(":")[2]))):
            time.sleep(600)
    words = sys.argv[2].split("+")
    print("cores", sorted(os.sched_getaffinity(0)), os.environ.get("VLLM_CPU_OMP_THREADS_BIND"), flush=True)
    if "no-chunks" in words and "--enable-chunked-prefill" in sys.argv:
        print("my last words", flush=True)
        sys.exit(7)
    if "other" in words and "--kv-transfer-config" in sys.argv:
        dummy.DummyAnswer = OtherAnswer
    dummy.DummyConnection = EngineConnection
    engine = dummy.DummyEngine("small", dummy.DummyDelays(0.01, 0.01))
    uvloop.run(dummy.serve(engine, "127.0.0.1", int(value_of("--port"))))


if __name__ == "__main__":
    main()
