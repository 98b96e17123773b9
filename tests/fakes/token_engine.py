# SPDX-License-Identifier: Apache-2.0
"""An engine whose answers have token ids, in the events that vLLM 0.32 writes.

Its tokens are bytes, and two special ones. To each prompt it says `SCRIPT`, whatever is in it: what comes after the
last question mark of the prompt is taken for the part that is out already, and must be that.
"""
import codecs
import json
from collections.abc import Callable, Iterator

from tests.fakes.faulty_engine import Fault, FaultyEngine, chunk, whole

END, SPECIAL = 256, 257
SCRIPT = [*"Hé, 🦄".encode(), SPECIAL, *" wörld".encode(), SPECIAL, SPECIAL, *b"\"\\\n", END]
TEXT = bytes(one for one in SCRIPT if one < END).decode()
CHAT = "/v1/chat/completions"


def ids_of(path: str, asked: dict) -> list[int]:
    """The token ids of a request's prompt."""
    prompt = asked["messages"][-1]["content"] if path == CHAT else asked["prompt"]
    return list(f"{path}: {prompt}".encode()) if isinstance(prompt, str) else prompt


def answer(path: str, asked: dict, name: str = "1", together: int = 1) -> Iterator[bytes]:
    """The events of the answer to a request, with `together` tokens in each."""
    chat = path == CHAT
    prompt = ids_of(path, asked)
    said = prompt[len(prompt) - prompt[::-1].index(ord("?")):]
    assert said == SCRIPT[:len(said)], f"the prompt goes on with {said}"
    left = SCRIPT[len(said):]
    most = asked.get("max_completion_tokens") or asked.get("max_tokens") or (100 if chat else 16)
    shows = asked.get("return_token_ids")
    options = asked.get("stream_options") or {}
    head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{name}", "object": "chat.completion.chunk" if chat else
            "text_completion", "created": 1000 + len(name), "model": asked["model"]}
    counted = options.get("include_usage") and options.get("continuous_usage_stats")

    def event(choices: list[dict], tokens: int, usage: bool = counted, **more: object) -> bytes:
        value = {**head, "choices": choices, **more}
        if usage:
            value["usage"] = {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + tokens,
                              "completion_tokens": tokens}
        return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"

    if chat:
        yield event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                      "finish_reason": None}], 0, prompt_token_ids=prompt if shows else None)
    decoder = codecs.getincrementaldecoder("utf-8")()
    for begin in range(0, min(most, len(left)), together):
        ids = left[begin:min(begin + together, most)]
        text = decoder.decode(bytes(one for one in ids if one < END))
        tokens = begin + len(ids)
        reason = "stop" if ids[-1] == END else "length" if tokens == most else None
        choice = {"index": 0, **({"delta": {"content": text}} if chat else {"text": text}), "logprobs": None,
                  "finish_reason": reason}
        if not chat or reason:
            choice["stop_reason"] = None
        if not chat:
            choice["prompt_token_ids"] = prompt if shows and not begin else None
        yield event([choice | {"token_ids": ids if shows else None}], tokens)
    if options.get("include_usage"):
        yield event([], tokens, usage=True)
    yield b"data: [DONE]\n\n"


def detokenize(tokens: list[int]) -> str:
    """The text of tokens, special ones too."""
    parts = ("<end>" if one == END else "<special>" if one == SPECIAL else one for one in tokens)
    return b"".join(one.encode() if isinstance(one, str) else bytes([one]) for one in parts).decode(errors="replace")


class Plan(list):
    """What the next streams do, whichever engines get them; others are as they should be. An entry is how the answer
    goes wrong: a `Fault`, or ("break", bytes) with the end of the connection after so many bytes, ("die", bytes) where
    nothing listens there afterwards, ("error", events) with an error after so many events and then silence, ("stall",
    events) with silence."""


class TokenEngine(FaultyEngine):
    """Answers as `answer` does, or as the plan says."""

    def __init__(self, plan: Plan, together: int = 1) -> None:
        super().__init__()
        self.detokenize: Callable[[list[int]], str] | None = detokenize
        self.plan = plan
        self.together = together

    async def _answer(self, method, target, headers, body, reader, writer) -> bool:
        asked = json.loads(body or b"{}")
        if target == "/detokenize":
            assert asked["model"] == "m"
            said = self.detokenize and self.detokenize(asked["tokens"])
            return whole(writer, 404 if said is None else 200, {"prompt": said})
        if not asked.get("stream"):
            return await super()._answer(method, target, headers, body, reader, writer)
        self.asked.append((target, headers, body))
        step = self.plan.pop(0) if self.plan else ("break", None)
        if isinstance(step, Fault):
            return await self._do(step, asked, reader, writer)
        what, left = step
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                     b"transfer-encoding: chunked\r\n\r\n")
        for number, event in enumerate(answer(target.partition("?")[0], asked, str(self.port), self.together)):
            if what == "error" and number == left:
                event = b'data: {"error": {"message": "EngineCore died", "type": "x", "code": 500}}\n\n'
                chunk(writer, event + b"data: [DONE]\n\n")
                return await self._stay_silent(reader)
            if what == "stall" and number == left:
                return await self._stay_silent(reader)
            sent = event if left is None or what not in ("break", "die") else event[:left]
            if sent:
                chunk(writer, sent)
                await writer.drain()
            if what in ("break", "die") and left is not None:
                left -= len(sent)
                if not left:
                    if what == "die":
                        self._server.close()
                    return False
        return chunk(writer, b"")
