#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Send each form of request to an engine with PD off, to a decode engine, and to a router before it; compare (B11).

    VLLM_PD_ENGINE=v1 . scripts/env.sh
    python scripts/lab/compare_forms.py                        # all forms; some minutes on two cores
    python scripts/lab/compare_forms.py --only 'chat, seed'    # those whose name contains this
    python scripts/lab/compare_forms.py --json FILE

The tiny model, on the CPU. Long prompts are handed over to a prefill engine, which the decode engine's counters must
show. An answer must have the same status, type and content, without ids and times (`_forms/answers.py`). Differences
that are meant are listed in `MEANT`, with the reason; one that no longer occurs is an error, too.

Exit status: 0 where all is as it should be, 1 where something differs (each is named), 2 where nothing could be
compared.
"""
import argparse
import http.client
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from _forms.answers import FormAnswer, compare
from _forms.forms import MODEL, RequestForm, all_forms

from vllm_pd.bench.servers import Servers, exit_on_signals, log_to
from vllm_pd.errors import PDError
from vllm_pd.model.installation import World, find_installation
from vllm_pd.ops.launch.plan import HOST, SERVE, UpOptions, plan_fleet
from vllm_pd.ops.launch.up import Fleet
from vllm_pd.ops.scrape import MetricsSnapshot, scrape
from vllm_pd.rpc.ports import take_free, take_free_run

MAX_LOCAL_PREFILL_TOKENS = 100
V1 = find_installation().world is World.PLUGIN
SERVE_ARGS = ("--dtype", "float32", "--max-model-len", "2048", "--served-model-name", MODEL, "--enable-prefix-caching",
              *(("--block-size", "32", "--enforce-eager") if V1 else ("--block-size", "16", "--disable-log-requests")))
START_S, ANSWER_S, STOP_S = 600.0, 120.0, 30.0
COUNTED_S = 10.0  # an engine counts an attempt shortly after the client has its answer
LEAST_REMOTE = 0.8  # of the forms with a long prompt that are answered with 200; some features keep a prompt local
OFF, DECODE, ROUTER = "off", "decode", "router"
MEANT = {  # (place, form): why that answer differs from the one with PD off
    (ROUTER, "PUT of a completion"): "the router answers for itself, in the form of vLLM's errors",
    (ROUTER, "no such path"): "the router answers for itself, in the form of vLLM's errors",
    (ROUTER, "GET /health"): "the router answers for itself, and says how many workers it has",
    (ROUTER, "GET /ping"): "the router answers for itself, and says how many workers it has"}
IGNORED = {  # by place
    DECODE: frozenset[str](),
    ROUTER: frozenset({"cached_tokens", "cache_write_tokens"})}  # its engine has been asked the same just before


@dataclass
class FormResults:
    """What was found. `differences`: by place and form, where the answer differs first."""
    forms: int = 0
    engine: str = "v1" if V1 else "v0"
    statuses: dict[str, int] = field(default_factory=dict)
    remote: int = 0
    equal: dict[str, int] = field(default_factory=dict)
    meant: dict[str, str] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)
    took_s: float = 0.0

    def line(self) -> str:
        """In one line."""
        return (f"{self.forms} forms on {self.engine}: {self.equal[DECODE]} answers of the decode engine and "
                f"{self.equal[ROUTER]} of the router equal those with PD off, {len(self.meant)} differ as meant; "
                f"{self.remote} prompts were handed over")


def send(url: str, form: RequestForm) -> FormAnswer:
    """Send the form. Raises OSError, HTTPException."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=ANSWER_S)
    try:
        headers = {"Content-Type": "application/json", **form.headers}
        connection.request(form.method, form.path, form.data, {name: said for name, said in headers.items() if said})
        reply = connection.getresponse()
        return FormAnswer.of(reply.status, reply.getheader("Content-Type", ""), reply.read())
    finally:
        connection.close()


@contextmanager
def places(model: str, log: Path) -> Iterator[dict[str, str]]:
    """Starts all servers. Gives the URL of each place. Raises PDError."""
    env = {**({} if V1 else {"VLLM_USE_V1": "0"}), "OMP_WAIT_POLICY": "passive"}
    options = UpOptions(model=model, prefill=1, decode=1, port=take_free_run(HOST, 3), serve_args=SERVE_ARGS,
                        router=True, pd={"max_local_prefill_tokens": MAX_LOCAL_PREFILL_TOKENS})
    with log.open("w", buffering=1) as file, Servers(log_to(file), STOP_S) as servers:
        port = take_free(HOST)
        off = servers.start("PD off", port, [*SERVE, model, "--host", HOST, "--port", str(port), *SERVE_ARGS], env=env)
        servers.await_ready(off, timeout_s=START_S)
        with Fleet(plan_fleet(options, ()), timeout_s=START_S, stop_timeout_s=STOP_S, say=log_to(file)) as fleet:
            decode = next(engine.url for engine in fleet.plan.engines if engine.role.decodes)
            yield {OFF: off.url, DECODE: decode, ROUTER: fleet.plan.router.url}


def run(forms: Sequence[RequestForm], urls: dict[str, str], say: Callable[[str], None]) -> FormResults:
    """Send all forms to all places, one at a time."""
    found = FormResults(forms=len(forms), equal={DECODE: 0, ROUTER: 0})
    statuses: Counter[str] = Counter()
    least = 0.0
    began_s, before = time.monotonic(), scrape(urls[DECODE])
    for number, form in enumerate(forms, 1):
        answers = {place: send(url, form) for place, url in urls.items()}
        statuses[str(answers[OFF].status)] += 1
        least += LEAST_REMOTE * (form.is_long and answers[OFF].status == 200)
        for place in (DECODE, ROUTER):
            name = f"{place}: {form.name}"
            differs = compare(answers[OFF], answers[place], IGNORED[place])
            meant = MEANT.get((place, form.name))
            if differs is None and meant is None:
                found.equal[place] += 1
            elif differs is None or meant is None:
                found.differences[name] = differs or f"is equal, although it is meant to differ: {meant}"
                say(f"  {name}: {found.differences[name]}")
            else:
                found.meant[name] = meant
        if number % 20 == 0:
            say(f"{number} of {len(forms)} forms, {time.monotonic() - began_s:.0f} s")
    found.remote = count_remote(urls[DECODE], before, least)
    if found.remote < least:
        found.differences["handed over"] = f"{found.remote} prompts, where at least {least:.0f} should be"
    found.statuses = dict(sorted(statuses.items()))
    found.took_s = round(time.monotonic() - began_s, 1)
    return found


def count_remote(url: str, before: MetricsSnapshot, least: float) -> int:
    """How many prompts the engine has handed over. Waits a while for the last ones to be counted."""
    deadline_s = time.monotonic() + COUNTED_S
    while True:
        remote = int(scrape(url).since(before).value("vllm:pd_attempts_total", outcome="done"))
        if remote >= least or time.monotonic() > deadline_s:
            return remote
        time.sleep(0.5)


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT",
                        help="only forms whose name contains this; may be repeated")
    parser.add_argument("--model", default=os.environ.get("VLLM_PD_TINY_MODEL"), help="default: $VLLM_PD_TINY_MODEL")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument("--log", type=Path, metavar="FILE", default=Path("build/forms.log"), help="the servers' lines")
    return parser


def main() -> int:
    """The program."""
    parser = arguments()
    args = parser.parse_args()
    forms = [form for form in all_forms() if not args.only or any(text in form.name for text in args.only)]
    if not args.model:
        parser.error("there is no model: enter the environment (. scripts/env.sh) or write --model")
    if not forms:
        parser.error(f"--only {' --only '.join(args.only)}: no form has a name with this")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exit_on_signals()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # three engines on the same cores, and one computes at a time
    args.log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with places(args.model, args.log) as urls:
            found = run(forms, urls, lambda line: print(line, flush=True))
    except (PDError, OSError, http.client.HTTPException) as error:
        print(f"compare_forms: {error!r}\ncompare_forms: the servers' lines are in {args.log}", file=sys.stderr)
        return 2
    print(found.line())
    if args.json:
        args.json.write_text(json.dumps(asdict(found), indent=1) + "\n")
    return 1 if found.differences else 0


if __name__ == "__main__":
    sys.exit(main())
