# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd doctor --for LINE`: whether an engine of V1 would start with that command line, and fit those of others.

The lines are looked at in a program of their own (`vllm_pd.v1.preview`), which vLLM's import needs for a few seconds;
lines with the same environment variables in front share one. Nothing is started, no port opened, no weights read.
"""
from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from vllm_pd.broker.members import MemberList
from vllm_pd.errors import ConfigError
from vllm_pd.extras import require_extra, require_vllm
from vllm_pd.model.installation import World, find_installation
from vllm_pd.ops.doctor import check_names, check_plugin, check_world, judge_peers
from vllm_pd.ops.finding import Finding
from vllm_pd.v1.preview import ERROR, LINES, REPLY, Preview

FLAG = "--for"
MAX_LINES = 64
SHOWN_CHARS = 60
IMPORT_TIMEOUT_S, LINE_TIMEOUT_S = 240.0, 60.0  # on an idle machine 8 s, and 1 s; 10 s for a model that vLLM looks up
PROGRAM = "from vllm_pd.v1.preview import main; main()"
QUOTING = ('write the line as a shell would get it, with \'...\' around JSON; from a file it comes whole: --for "$(cat '
           'FILE)"')
SHELL_WORDS = frozenset({"|", "||", "&", "&&", ";", ">", ">>", "2>&1", "<"})
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_IN_FRONT = re.compile(r"\A\s*(?:[A-Za-z_][A-Za-z0-9_]*=(?:'[^']*'|\"[^\"]*\"|[^\s'\"])*\s+)+")
_QUOTED = re.compile(r"'[^']*'")
_UNEXPANDED = re.compile(r"\$(\w+|\{|\()|`")
NO_PREFIX = ("write `vllm serve MODEL --flags ...`, with or without its first two words, and with environment "
             "variables in front as NAME=VALUE")


class CommandLine(NamedTuple):
    """One `vllm serve`: the environment variables in front of it, and what comes after `serve`."""
    env: tuple[tuple[str, str], ...]
    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> CommandLine:
        """The line that a shell would make of this text. Raises ConfigError."""
        try:
            words = shlex.split(text.replace("\\\n", " "))
        except ValueError as error:
            raise ConfigError(FLAG, _shown(text), f"{str(error).lower()}: {QUOTING}") from error
        for word in words:
            if word in SHELL_WORDS or word.endswith(";"):
                raise ConfigError(FLAG, _shown(text), f"{word!r} is the shell's: write one command, and repeat {FLAG} "
                                  "for more")
        if found := _UNEXPANDED.search(_QUOTED.sub("", text)):
            raise ConfigError(FLAG, _shown(text), f"nobody has put a value in the place of {found[0]!r}: write the "
                              "value; no shell looks at this line")
        place = next((place for place, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
        env, words = words[:place], words[place:]
        if words and Path(words[0]).name == "vllm":
            if words[1:2] != ["serve"]:
                raise ConfigError(FLAG, _shown(text), NO_PREFIX)
            words = words[2:]
        if not words or Path(words[0]).name.startswith(("python", "vllm-pd")):
            raise ConfigError(FLAG, _shown(text), NO_PREFIX)
        return cls(tuple(tuple(one.split("=", 1)) for one in env), tuple(words))


def _shown(text: str) -> str:
    """As much of a line as tells it from others: the rest, and the variables in front, may be long, and have keys."""
    text = _IN_FRONT.sub("", text)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def examine_lines(texts: Sequence[str]) -> list[Finding]:
    """What each of these engines would say at its start, and whether they fit each other. Raises ConfigError for a line
    that is none, MissingPackage where there is no vLLM of V1 that could say it."""
    if len(texts) > MAX_LINES:
        raise ConfigError(FLAG, f"{len(texts)} lines", f"write at most {MAX_LINES}")
    require_vllm()
    if find_installation().world is World.PATCHED:
        raise ConfigError(FLAG, _shown(texts[0]), "it asks the plugin beside a stock vllm (engine V1), and here is the "
                          "patched vllm, engine V0: ask where vllm-pd and a stock vllm are installed (docs/v1.md)")
    require_extra("engine")
    lines = [CommandLine.parse(text) for text in texts]
    wrong = [found for found in (*check_world(), *check_plugin(), *check_names()) if not found.ok]
    if wrong:
        return wrong
    previews = preview_lines(lines)
    for text, preview in zip(texts, previews, strict=True):
        if preview.usage:
            raise ConfigError(FLAG, _shown(text), preview.usage)
    return [*_about_device(previews),
            *(found for number, preview in enumerate(previews, 1) for found in judge_line(number, preview)),
            *judge_lines(previews),
            Finding("start", "not asked: free ports, NIXL, memory, and what only a loaded model shows: its weights, "
                    "attention backend and layout, groups of blocks", hint="`vllm-pd doctor` asks the first two; of "
                    "engines that run, `vllm-pd doctor --broker ADDRESS` compares the rest")]


def preview_lines(lines: Sequence[CommandLine]) -> list[Preview]:
    """A preview of each line, in their order."""
    found: dict[int, Preview] = {}
    for env in dict.fromkeys(line.env for line in lines):
        numbers = [number for number, line in enumerate(lines) if line.env == env]
        found |= zip(numbers, _run([lines[number].words for number in numbers], dict(env)), strict=True)
    return [found[number] for number in range(len(lines))]


def _run(lines: Sequence[Sequence[str]], env: dict[str, str]) -> Iterator[Preview]:
    """The program's replies. Raises ConfigError for a line that it gave none to: it has crashed, or took too long."""
    with tempfile.TemporaryDirectory(prefix="vllm-pd-for-") as name:
        folder = Path(name)
        (folder / LINES).write_text(json.dumps(lines))
        with (folder / "log").open("w") as log:
            program = subprocess.Popen([sys.executable, "-c", PROGRAM, name], stdin=subprocess.DEVNULL, stdout=log,
                                       stderr=log, start_new_session=True, env=os.environ | env | {
                                           "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
                                           "VLLM_NO_USAGE_STATS": "1"})
            try:
                program.wait(IMPORT_TIMEOUT_S + LINE_TIMEOUT_S * len(lines))
                end = f"it ended with status {program.returncode}"
            except subprocess.TimeoutExpired:
                end = "it took too long"
            finally:
                _kill(program)
        for number, words in enumerate(lines):
            reply = folder / REPLY.format(number)
            if not reply.is_file():
                error = reply.with_suffix(ERROR)
                said = (error if error.is_file() else folder / "log").read_text(errors="replace").strip().splitlines()
                raise ConfigError(FLAG, _shown(shlex.join(words)), f"what looks at it gave no answer ({end}; "
                                  f"{said[-1] if said else 'it said nothing'}): look whether vllm can be imported "
                                  "(vllm-pd doctor)")
            yield msgspec.json.decode(reply.read_bytes(), type=Preview)


def _kill(program: subprocess.Popen) -> None:
    """End it and all that it has started, if anything of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


def _about_device(previews: Sequence[Preview]) -> Iterator[Finding]:
    if any(preview.is_guessed for preview in previews):
        yield Finding("device", "vllm finds none here, so all is as it would be on a CPU", hint="what vllm chooses by "
                      "the device may be other: block size, executor, what it has kernels for")


def judge_line(number: int, preview: Preview) -> Iterator[Finding]:
    """What the engine of one line would say."""
    name = f"line {number}"
    if preview.refusal is not None:
        yield Finding(name, preview.refusal.fact, preview.refusal.cure)
        return
    yield Finding(name, f"accepted on {preview.device}: {preview.engine}")
    if preview.stays:
        yield Finding(name, f"prefills by itself: {'; '.join(preview.stays)}")
    for refusal in preview.here:
        yield Finding(name, f"on this machine {refusal.fact}", refusal.cure)
    if preview.weights is not None:
        yield Finding(name, f"without weights here it would not start: {preview.weights.fact}",
                      hint=preview.weights.cure)


def judge_lines(previews: Sequence[Preview]) -> Iterator[Finding]:
    """Whether the engines of several lines fit each other, as far as that is known before a model is loaded."""
    if len(previews) < 2:
        return
    refused = [str(number) for number, preview in enumerate(previews, 1) if preview.refusal is not None]
    members = [msgspec.structs.replace(preview.member, incarnation=f"line {number}", address=f"line {number}")
               for number, preview in enumerate(previews, 1) if preview.member is not None]
    if refused:
        yield Finding("peers", f"not compared with others: line {', '.join(refused)}",
                      hint="do first what is said there")
    if len(members) < 2:
        return
    named = {preview.backend for preview in previews if preview.member is not None}
    if "" not in named:  # else one is vLLM's to choose
        members = [msgspec.structs.replace(member, fingerprint=msgspec.structs.replace(
            member.fingerprint, engine=preview.backend)) for member, preview in zip(
                members, [one for one in previews if one.member is not None], strict=True)]
    yield from judge_peers(MemberList(tuple(members), 0))
    brokers = sorted({preview.broker for preview in previews if preview.member is not None})
    if len(brokers) > 1:
        yield Finding("peers", f"they name {len(brokers)} brokers: {', '.join(brokers)}",
                      hint="these must be addresses of one: engines of two brokers never meet")
