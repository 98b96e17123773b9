# SPDX-License-Identifier: Apache-2.0
"""A fleet on hosts, set up as docs/configuration.md says ("Beyond one machine"): a file with the cluster's key, which
`vllm-pd keys` makes, a broker, and light engines, each with `broker`, `bind` and `keys`.
"""
from __future__ import annotations

import collections
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.hosts.rack import Host
from tests.verdict import Crash, Leak, WrongAnswer

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("host_engine.py")
VLLM_PD = [sys.executable, "-m", "vllm_pd.cli"]
BROKER_PORT = 5700
START_S = 120.0
WAIT_S = 60.0
BLOCKS, BLOCK_SIZE = 64, 16  # of tests/peers/light_engine.py
PROMPT_BLOCKS = 10  # unless a test wants others
SMALL_HEAD, LARGE_HEAD = 16, 512  # a block has 8 KiB and 256 KiB
# The defaults, with a lease and a deadline that a test can wait for.
SETTINGS = {"heartbeat_s": 1.0, "ttl_s": 5.0, "claim_retry_s": 2.0, "lease_s": 5.0, "attempt_deadline_s": 60.0}


class HostedEngine:
    """An engine on a host, from here. It may be used once `start` has returned."""

    def __init__(self, host: Host, role: str, settings: dict, head_size: int, environment: dict[str, str]) -> None:
        self.host = host
        self._log = host.folder / f"{role}.log"
        self._program = host.start([sys.executable, str(PROGRAM), role, json.dumps(settings), str(head_size)],
                                   subprocess.PIPE, self._log, environment, stdin=subprocess.PIPE)

    def start(self) -> HostedEngine:
        """Wait until it is ready, and let it take part."""
        self._answer("the start", START_S)
        self.member = self.ask("start")
        return self

    def ask(self, name: str, *arguments: object) -> object:
        """Have it carry a command out. Raises what it says if that fails."""
        self._program.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        self._program.stdin.flush()
        return self._answer(name, WAIT_S)

    def report(self) -> dict:
        """See `HostEngine.do_report`."""
        return self.ask("report")

    def figures(self) -> dict:
        """See `HostEngine.do_figures`."""
        return self.ask("figures")

    def kill(self) -> None:
        """SIGKILL. Returns when it is gone."""
        kill(self._program)

    def wait_until(self, holds: Callable[[dict], object], what: str, timeout_s: float = WAIT_S,
                   error: type[AssertionError] = AssertionError) -> float:
        """Wait for a report that fulfils it. Returns the seconds that took; raises `error` with `what` and the last
        report after `timeout_s`."""
        begin = time.monotonic()
        while not holds(report := self.report()):
            if time.monotonic() - begin > timeout_s:
                raise error(f"{self.host.name}: {what}: not within {timeout_s:g} s: {report}\n{self._log_end()}")
            time.sleep(0.05)
        return time.monotonic() - begin

    def submit(self, count: int = 1, blocks: int = PROMPT_BLOCKS) -> set[str]:
        """Give it so many prompts of that size. Returns their names."""
        prompts = {f"{random.random()}": [random.randrange(1, 30_000) for _ in range(blocks * BLOCK_SIZE)]
                   for _ in range(count)}
        self.ask("submit", list(prompts.items()))
        return set(prompts)

    def ended(self, names: set[str], timeout_s: float = WAIT_S) -> collections.Counter[str]:
        """Wait until these have ended, and return how: "remote" or "local", and how many. Raises WrongAnswer if KV that
        was reported ready was not right, of these or of any prompt that has ended since the last call."""
        found: dict[str, str] = {}
        deadline_s = time.monotonic() + timeout_s
        while not found.keys() >= names:
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{self.host.name}: {len(names - found.keys())} of {len(names)} prompts have not "
                                     f"ended: {self.report()}\n{self._log_end()}")
            found |= self.take_ended()
            time.sleep(0.02)
        return collections.Counter(found[name] for name in names)

    def take_ended(self) -> dict[str, str]:
        """How each prompt has ended that has since the last call. Raises WrongAnswer as `ended`."""
        ended = self.ask("ended")
        if "wrong" in ended.values():
            raise WrongAnswer(f"{self.host.name}: KV was reported ready and is not right: {ended}\n{self._log_end()}")
        return ended

    def serve(self, count: int = 1, blocks: int = PROMPT_BLOCKS) -> collections.Counter[str]:
        """Have it answer so many prompts. Returns how they ended, see `ended`."""
        return self.ended(self.submit(count, blocks))

    def hands_over(self, timeout_s: float) -> float:
        """Wait until it has a prompt prefilled by a peer, with right KV. Returns the seconds that took. It gets one
        prompt of a block after another."""
        begin = time.monotonic()
        is_remote = False
        while not is_remote:
            is_remote = self.serve(blocks=1)["remote"] == 1
            if (took_s := time.monotonic() - begin) > timeout_s:
                raise AssertionError(f"{self.host.name}: nothing was handed over within {timeout_s:g} s; after "
                                     f"{took_s:.1f} s {is_remote=}: {self.report()}\n{self._log_end()}")
            time.sleep(0.1)
        print(f"{self.host.name} handed over again after {took_s:.1f} s")
        return took_s

    def rests(self, timeout_s: float) -> float:
        """Wait until nothing is open and every block is free again. Returns the seconds that took. Raises Leak after
        `timeout_s`."""
        def is_at_rest(report: dict) -> bool:
            gauges = report["gauges"]
            return (report["free"] == BLOCKS and report["error"] is None
                    and not any(report[name] for name in ("open", "jobs", "waiting", "handles", "held", "reading"))
                    and not any(gauges[name] for name in ("decode_fenced", "holds", "parted")))
        return self.wait_until(is_at_rest, "everything is back", timeout_s, Leak)

    def keeps_free_blocks(self) -> None:
        """Raises WrongAnswer if any block was written while it was free."""
        if changed := self.ask("overwritten"):
            raise WrongAnswer(f"{self.host.name}: {changed} blocks were written while they were free: {self.report()}"
                              f"\n{self._log_end()}")

    def _answer(self, to: str, timeout_s: float) -> object:
        line, deadline_s = b"", time.monotonic() + timeout_s
        output = self._program.stdout.fileno()
        while not line.endswith(b"\n"):
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([output], [], [], left_s)[0]:
                raise AssertionError(f"{self.host.name} does not answer {to}\n{self._log_end()}")
            part = os.read(output, 1 << 16)
            if not part:
                raise Crash(f"the engine of {self.host.name} has ended\n{self._log_end()}")
            line += part
        fine, result = json.loads(line)
        assert fine, result
        return result

    def _log_end(self) -> str:
        return "\n".join(self._log.read_text().splitlines()[-15:])


def _program_of(entered: subprocess.Popen) -> psutil.Process:
    """The process that `Host.start` has started, behind the one that waits for it."""
    [program] = psutil.Process(entered.pid).children()
    return program


def kill(entered: subprocess.Popen) -> None:
    """SIGKILL to a program that `Host.start` has started. Returns when it is gone."""
    _program_of(entered).kill()
    entered.wait(WAIT_S)


def freeze(entered: subprocess.Popen) -> None:
    """SIGSTOP to such a program, until `thaw`."""
    _program_of(entered).suspend()


def thaw(entered: subprocess.Popen) -> None:
    """It goes on."""
    _program_of(entered).resume()
    entered.send_signal(signal.SIGCONT)  # who waits for it has stopped as well


class Fleet:
    """A broker on a host, and a key. `settings` are those of all engines that are made. `known_as`: the host in the
    broker's URL, instead of its IPv4 address."""

    def __init__(self, host: Host, known_as: str | None = None, **settings: object) -> None:
        self._prepare(host, f"tcp://{known_as or host.ip}:{BROKER_PORT}", settings)
        self.start_broker(host)

    def start_broker(self, host: Host) -> None:
        """From now on the broker is one on that host, at the URL that all know."""
        self._broker = host.start([*VLLM_PD, "broker", "--bind", self.url, "--keys", str(self.keys)],
                                  subprocess.DEVNULL, host.folder / "broker.log", {"PYTHONPATH": str(ROOT)})

    def kill_broker(self) -> None:
        """SIGKILL. Returns when it is gone."""
        kill(self._broker)

    def freeze_broker(self) -> None:
        """SIGSTOP, until `thaw_broker`."""
        freeze(self._broker)

    def thaw_broker(self) -> None:
        """It goes on."""
        thaw(self._broker)

    def _prepare(self, host: Host, url: str, settings: dict[str, object]) -> None:
        """Make the key; `url` is that of the broker."""
        self.url, self._settings = url, {**SETTINGS, **settings}
        self.keys = host.folder / "vllm-pd.keys"
        subprocess.run([*VLLM_PD, "keys", str(self.keys)], check=True, capture_output=True, timeout=START_S,
                       env={**os.environ, "PYTHONPATH": str(ROOT)})

    def status(self, host: Host, *engine: str) -> set[str]:
        """The lines of `vllm-pd status [ENGINE]` on that host."""
        return set(self._operate(host, "status", *engine))

    def say_gone(self, host: Host, engine: str) -> list[str]:
        """The lines of `vllm-pd gone ENGINE` on that host."""
        return self._operate(host, "gone", engine)

    def doctor(self, host: Host, engine: str) -> list[str]:
        """What `vllm-pd doctor --from ENGINE` says on that host of each path; a line has its cure."""
        said = re.sub(r"\n +", " ", "\n".join(self._operate(host, "doctor", "--from", engine, allowed="01")))
        return [line for line in said.splitlines() if line.split()[1] not in ("broker", "peers")]

    def _operate(self, host: Host, *command: str, allowed: str = "0") -> list[str]:
        """The lines of a command. Raises CalledProcessError where it does not end with one of the `allowed` statuses.
        """
        seed = self._settings.get("nats_credentials")
        access = ["--broker", self.url, "--keys", str(self.keys), *(["--nats-credentials", str(seed)] if seed else [])]
        return host.run("sh", "-c", f'"$@" || case $? in [{allowed}]) ;; *) exit 2;; esac', "sh",
                        "env", f"PYTHONPATH={ROOT}", *VLLM_PD, *command, *access).splitlines()

    def engine(self, host: Host, role: str, head_size: int = SMALL_HEAD,
               environment: dict[str, str] | None = None) -> HostedEngine:
        """One that gets ready there. Its `bind` is the host's address, unless the settings have another."""
        settings = {"bind": f"tcp://{host.ip}:0", **self._settings, "broker": self.url, "keys": str(self.keys)}
        return HostedEngine(host, role, settings, head_size, environment or {})

    def pair(self, prefill: Host, decode: Host, **more: object) -> tuple[HostedEngine, HostedEngine]:
        """A prefill and a decode engine that have met: each will see the other's death. See `engine`."""
        p, d = self.engine(prefill, "kv_producer", **more), self.engine(decode, "kv_consumer", **more)
        p.start()
        d.start()
        d.wait_until(lambda report: report["prefill_peers"] == 1, "P is there")
        assert d.serve(blocks=1) == {"remote": 1}
        for engine in (p, d):
            engine.wait_until(lambda report: report["reached"] == 1, "the peer's lifeline was reached")
        return p, d
