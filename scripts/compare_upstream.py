#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run upstream's own tests on the unpatched and on the patched tree and compare them, test by test (B50).

    . scripts/env.sh
    python scripts/compare_upstream.py                        the V0 and the V1 list; about ten minutes, then five
    python scripts/compare_upstream.py --list v0 --only tests/core/test_scheduler.py
    python scripts/compare_upstream.py --tree-b WORK_TREE     a tree of `series.py import` instead of patches/

Offline, on the CPU, with a tiny model under the names that the tests ask for. Every test that passes unpatched must
pass patched; so must those of _upstream_tests/mended.txt. Unpatched results without a failure (but for those of
mended.txt) are kept in the cache folder until the pin, the lists or the environment change. One comparison at a time
runs in a folder (--out). Exit status: 0 no regression, 1 regressions (named), 2 nothing could be compared.
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import shadow_hub
from _series.errors import Refusal
from _upstream_tests import lists, results, runner, trees
from _wheel import cache, process, project

FORMAT = "2"  # of the kept results
UNPATCHED, PATCHED = "unpatched", "patched"
_speak = threading.Lock()


def say(text: str) -> None:
    """Prints a line of progress; several runs may do so at once."""
    with _speak:
        cache.say(text)


def environment_key() -> str:
    """Hash of the Python and of all that is installed for it, except vLLM, which is what is compared."""
    installed = {f"{d.name}=={d.version}" for d in importlib.metadata.distributions()
                 if (d.name or "").lower() != "vllm"}
    return cache.key(sys.version, *sorted(installed))


@contextlib.contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Holds the folder, which is made if it is not there. Raises Refusal if another run holds it."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refusal(f"--out {out}: another comparison runs in this folder; wait for its end, or name another "
                          "folder") from None
        yield


class ComparisonRun:
    """Both trees, staged once for all lists, and the runs on them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.stop = threading.Event()
        with cache.lock():
            self.before, self.after = trees.plain(args.tree_a), trees.patched(args.tree_b)
            self.tests = trees.stage_tests(self.before, args.out / "tests-copy")
            self.hub = args.out / "hub"
            shadow_hub.make(args.model, self.hub)
            trees.stage(self.after, args.out / PATCHED, ours=True)
        self.key = cache.key(trees.tree_key(self.before), environment_key(), *shadow_hub.NAMES,
                             args.model / "config.json", trees.EDITS)

    def site(self, name: str) -> runner.Site:
        """Where the tests run on the tree called `name`."""
        return runner.Site(name, self.args.out / name, self.tests, self.hub, self.args.out, self.stop)

    def patched(self, wanted: lists.TestList) -> results.Results:
        """Always from a run."""
        return runner.run(self.site(PATCHED), wanted, say)

    def unpatched(self, wanted: lists.TestList) -> results.Results:
        """From the cache folder, if they are there. Kept only without a failure: what a full disk or a lack of memory
        makes fail would be no regression in later runs."""
        name = cache.key(self.key, FORMAT, wanted.use_v1, *wanted.arguments, "", *wanted.deselected)
        kept = cache.root() / "upstream_tests" / f"{wanted.name}-{name}.json"
        if kept.is_file() and not self.args.fresh:
            say(f"unpatched {wanted.name}: results of an earlier run, {kept}")
            return {test: results.UpstreamResult(results.UpstreamOutcome(outcome), *rest)
                    for test, (outcome, *rest) in json.loads(kept.read_text()).items()}
        found = runner.run(self.site(UNPATCHED), wanted, say)
        if failed := results.failing(found, wanted.mended):
            say(f"unpatched {wanted.name}: results not kept, for {len(failed)} tests failed, first {failed[0]}")
            return found
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(".partial")
        partial.write_text(json.dumps({t: (r.outcome.value, r.message, r.unsteady) for t, r in found.items()}))
        os.replace(partial, kept)
        return found

    def compare(self, wanted: list[lists.TestList]) -> list[results.Comparison]:
        """Runs all lists, `jobs` at a time, and compares the trees in each."""
        with cache.lock():
            trees.stage(self.before, self.args.out / UNPATCHED, ours=False)
        with ThreadPoolExecutor(self.args.jobs) as pool:
            pairs = [(pool.submit(self.unpatched, w), pool.submit(self.patched, w)) for w in wanted]
            try:
                return [results.compare(w.name, before.result(), after.result(), w.mended)
                        for w, (before, after) in zip(wanted, pairs, strict=True)]
            except BaseException:
                self.stop.set()
                pool.shutdown(cancel_futures=True)
                raise


def show(found: results.Comparison) -> None:
    """Prints the comparison of one list."""
    print(f"== {found.list_name}")
    for name, tally in ((UNPATCHED, found.before), (PATCHED, found.after)):
        print(f"{name:10} " + ", ".join(f"{number} {outcome}" for outcome, number in tally.items()))
    for heading, tests in (
        ("REGRESSED: passed unpatched, does not pass patched", found.regressed),
        ("NOT MENDED: must pass patched (mended.txt)", found.unmended),
        ("newly passing", found.mended),
        ("failing in both", found.failing_in_both),
        ("failing, and not in the unpatched run", found.failing_anew),
        ("unsteady: failed first, passed alone", found.unsteady),
    ):
        if tests:
            print(f"{heading} ({len(tests)}):")
        for test in tests:
            print(f"  {test}")
            if isinstance(tests, dict):
                print("".join(f"      {line}\n" for line in tests[test].splitlines()[:8]), end="")


def series_of(patches: Path) -> dict:
    """The names of the patches, and the hash of the sums of all files that they touch."""
    return {"patches": (patches / "series").read_text().split(),
            "sums_sha256": hashlib.sha256((patches / "SHA256SUMS").read_bytes()).hexdigest()}


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=[*lists.USE_V1, "all"], default="all",
                        help="all: " + " and ".join(lists.USUAL))
    parser.add_argument("--only", action="append", default=[], metavar="TEST", help="folders, files or node ids")
    trees.add_options(parser)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="pytest runs at a time (default 1)")
    parser.add_argument("--fresh", action="store_true", help="run the unpatched tree although its results are known")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison there, with the patches of it")
    parser.add_argument("--out", type=Path, metavar="DIR", default=cache.root() / "upstream_tests" / "last",
                        help="folder for trees, logs and junit files (default: in the cache folder)")
    return parser


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = arguments()
    args = parser.parse_args()
    if args.model is None or not (args.model / "config.json").is_file():
        parser.error("no tiny model: source scripts/env.sh, or --model DIR")
    args.out = args.out.absolute()
    try:
        wanted = [lists.load(name) for name in (lists.USUAL if args.list == "all" else [args.list])]
        if args.only:
            wanted = [narrow for narrow in (one.narrowed(args.only) for one in wanted) if narrow.arguments]
        if not wanted:
            raise Refusal(f"no test of the list is within {', '.join(args.only)}")
        with only_run(args.out):
            found = ComparisonRun(args).compare(wanted)
    except runner.RunDied as died:
        print(f"compare_upstream: {died}", file=sys.stderr)
        return 1 if died.tree == PATCHED else 2
    except KeyboardInterrupt:
        return 130
    except (Refusal, process.BuildError, OSError) as error:
        print(f"compare_upstream: {error}", file=sys.stderr)
        return 2
    for comparison in found:
        show(comparison)
    if args.json:
        series = {} if args.tree_b else series_of(project.ROOT / "patches")
        args.json.write_text(json.dumps({**series, **{c.list_name: c.as_dict() for c in found}}, indent=2) + "\n")
    return 0 if all(comparison.good for comparison in found) else 1


if __name__ == "__main__":
    sys.exit(main())
