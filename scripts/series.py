#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The patch series on the pinned upstream: check it, take it apart into commits, put it together again.

Exit status: 0 done; 2 refused, with one message and nothing written; 1 a rebase stopped at a conflict.
docs/patching.md shows how the commands are used together.
"""
import argparse
import sys
import tempfile
from pathlib import Path
from typing import List, Optional

from _series import folder, pin, proposals, readme, rebase, source, verify, work
from _series.errors import Refusal, refuse_all
from _series.git import Repo
from _series.patch import Patch, file_name


class Project:
    """What every command needs: the pin, the pinned source, the patches as they are on disk."""

    def __init__(self, args: argparse.Namespace, other: Optional[pin.Pin] = None) -> None:
        """`other` is a pin to use instead of the project's own."""
        self.root: Path = args.root
        self.cache: Path = args.cache
        self.folder = self.root / "patches"
        self.pin = other or pin.read(self.root)
        self.source = source.pinned(self.pin, self.cache, args.sdist)

    def patches(self) -> List[Patch]:
        return folder.patches(folder.load(self.folder))

    def good(self, patches: List[Patch], python: Optional[str] = None) -> verify.Verdict:
        """The verdict on `patches`; refuses if it isn't that all is well."""
        verdict = verify.series(patches, self.source, python)
        refuse_all(f"the series does not hold on {self.pin.stem}:", verdict.problems)
        return verdict


def check(args: argparse.Namespace) -> None:
    project = Project(args)
    patches = project.patches()
    verdict = verify.series(patches, project.source, args.imports)
    problems = list(verdict.problems)
    if verdict.made:
        problems += [f"{project.folder / name} is not what an export writes (series.py import DIR, then export DIR)"
                     for name in folder.differences(project.folder, verdict.made)]
    refuse_all(f"the series does not hold on {project.pin.stem}:", problems)
    print(f"{project.pin.stem}: {len(patches)} patches apply with no fuzz, alone where they say so, and compile after "
          f"each{'; their modules import' if args.imports else ''}; checksums, table and bytes are up to date")


def import_(args: argparse.Namespace) -> None:
    project = Project(args)
    patches = project.patches()
    repo = work.create(patches, project.source, args.dir)
    print(f"{repo.path}: {project.pin.stem} (tag {work.UPSTREAM_TAG}) and {len(patches)} commits, one per patch.\n"
          f"Edit, commit, then: {sys.argv[0]} export {args.dir}")


def export(args: argparse.Namespace) -> None:
    repo = Repo(args.dir)
    moved = work.next_pin(repo)
    project = Project(args, moved)
    patches = work.commits(repo)
    work.same_base(repo, project.source)
    if not patches:
        raise Refusal(f"{repo.path}: no commit after the tag `{work.UPSTREAM_TAG}`, so that an export would remove all "
                      "patches. If a rebase was given up, begin it anew; `drop` removes a patch.")
    written(project, project.good(patches))
    if moved and moved != pin.read(project.root):
        source.store(project.root / pin.FILE, moved.text().encode())
        print(f"wrote {project.root / pin.FILE}: the pin is {moved.stem} now")


def written(project: Project, verdict: verify.Verdict) -> None:
    """Write what a verdict has made, and say so."""
    changed = folder.write(project.folder, verdict.made)
    for name in changed:
        print(f"{'wrote' if name in verdict.made else 'removed'} {project.folder / name}")
    if not changed:
        print(f"{project.folder}: was up to date, nothing written")


def diff(args: argparse.Namespace) -> None:
    project = Project(args)
    sys.stdout.write(project.good(project.patches()).whole)


def table(args: argparse.Namespace) -> None:
    project = Project(args)
    patches = project.patches()
    whole = project.good(patches).whole
    print(readme.table(patches) + "\n" + readme.totals(patches, whole))


def new(args: argparse.Namespace) -> None:
    repo = Repo(args.tree)
    message = work.begin(repo, args.subject)
    print(f"{repo.path}: committed what had changed as {file_name(args.subject)}:\n\n{message}\n"
          f"Write the message: git -C {repo.path} commit --amend\nThen: {sys.argv[0]} export {args.tree}")


def drop(args: argparse.Namespace) -> None:
    project = Project(args)
    patches = project.patches()
    kept = [patch for patch in patches if patch.name != args.name]
    if len(kept) == len(patches):
        raise Refusal(f"{args.name}: no such patch; the series has {', '.join(patch.name for patch in patches)}")
    verdict = verify.series(kept, project.source)
    refuse_all(f"{args.name} cannot be dropped, the rest does not hold without it:", verdict.problems)
    written(project, verdict)


def rebase_(args: argparse.Namespace) -> int:
    project = Project(args)
    patches = project.patches()
    target = source.release(args.version, project.cache, args.sha256, args.commit)
    print(f"{target.pin.stem}: sha256 {target.pin.sha256}"
          f"{'' if args.sha256 else f' (from {target.origin}, see --sha256)'}")
    if args.try_:
        with tempfile.TemporaryDirectory(prefix="vllm-pd-rebase-") as temporary:
            repo = rebase.begin(patches, project.source, target, Path(temporary, "tree"))
            print(rebase.table(rebase.fates(repo, patches, project.pin.version)))
        return 0
    if args.dir is None:
        raise Refusal("rebase needs --dir DIR for its work tree (or --try to see only what would happen)")
    if args.dir.exists() and any(args.dir.iterdir()):
        repo = rebase.resume(args.dir, args.version)
        stuck = rebase.go_on(repo)
    else:
        repo = rebase.begin(patches, project.source, target, args.dir)
        stuck = rebase.pick(repo)
    if stuck:
        print(f"conflict in {rebase.current(repo)!r}:" + "".join(f"\n  - {line}" for line in stuck), file=sys.stderr)
        print(f"Next: mend the files in {repo.path}, then `git -C {repo.path} add` them (or give the patch up with\n"
              f"`git -C {repo.path} cherry-pick --skip`), then run this command again.", file=sys.stderr)
        return 1
    left = rebase.left_out(repo)
    print(f"{repo.path}: {'these patches are not' if left else 'all patches are'} on {target.pin.stem}"
          f"{', which contains them, or they were given up:' if left else '.'}"
          + "".join(f"\n  - {subject}" for subject in left))
    print(f"Next: {sys.argv[0]} export {args.dir}   (writes patches/ and the pin, if the series holds)")
    return 0


def for_upstream(args: argparse.Namespace) -> None:
    place = args.root / "patches" / proposals.FOLDER
    wanted, found = proposals.release(place), proposals.load(place)
    name, address = proposals.sender()
    target = source.release(wanted.version, args.cache, wanted.sha256, "unknown")
    for path in proposals.write(found, target, args.dir, name, address):
        print(f"wrote {path}")
    print(f"{args.dir / 'tree'}: {target.pin.stem} and a branch for each")


def dropped(args: argparse.Namespace) -> None:
    place = args.root / "patches" / proposals.FOLDER
    wanted, known = proposals.release(place), proposals.conditions(place)
    patches = folder.patches(folder.load(args.root / "patches"))
    target = source.release(wanted.version, args.cache, wanted.sha256, "unknown")
    found = proposals.dropped(patches, known, target)
    for condition in known:
        names = found.get(condition.text)
        print(f"{target.pin.stem}: {'true, drop ' + ', '.join(names) if names else 'not yet'}: {condition.text}")


def main(argv: Optional[List[str]] = None) -> int:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--root", type=Path, metavar="DIR", default=Path(__file__).resolve().parent.parent,
                        help="the project, with UPSTREAM_VERSION and patches/ in it (default: this one)")
    common.add_argument("--cache", type=Path, metavar="DIR", default=source.default_cache(),
                        help="where sdists are kept (default: $VLLM_PD_CACHE, or vllm-pd in the user's caches)")
    common.add_argument("--sdist", type=Path, metavar="FILE", help="the pinned sdist, if the index cannot be reached")
    parser = argparse.ArgumentParser(description=__doc__, parents=[common],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(run=check, imports=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    def add(run, name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    add(check, "check", "see that everything about the series holds; writes nothing (the default)").add_argument(
        "--imports", metavar="PYTHON", help="an interpreter with vLLM's requirements: import touched modules as well")
    add(import_, "import", "make a git work tree of upstream, with a commit per patch").add_argument(
        "dir", type=Path, metavar="DIR")
    add(export, "export", "write patches/ from the commits of a work tree").add_argument(
        "dir", type=Path, metavar="DIR")
    add(diff, "diff", "print the whole upstream diff")
    add(table, "table", "print the table of the patches and their size")
    command = add(new, "new", "commit what has changed in a work tree as a new patch")
    command.add_argument("subject", metavar="'AREA: SUBJECT'")
    command.add_argument("--tree", type=Path, metavar="DIR", required=True)
    add(drop, "drop", "take a patch out of the series").add_argument("name", metavar="NAME.patch")
    command = add(rebase_, "rebase", "move the series to another release, in a work tree; the same command resumes")
    command.add_argument("version", metavar="NEW_VERSION")
    command.add_argument("--dir", type=Path, metavar="DIR", help="the work tree: new, or that of a rebase to resume")
    command.add_argument("--sha256", help="of the new sdist; without it its origin is trusted, and shown with the sum")
    command.add_argument("--commit", default="unknown", help="of the new release's tag, for upstream.py --from")
    command.add_argument("--try", dest="try_", action="store_true", help="only report what would become of each patch")
    add(for_upstream, "for-upstream", "write the proposals for upstream's newest release, each alone and signed off"
        ).add_argument("dir", type=Path, metavar="DIR")
    add(dropped, "dropped", "say which patches upstream's newest release makes superfluous, by their Drop-When")
    args = parser.parse_args(argv)
    try:
        return args.run(args) or 0
    except Refusal as refusal:
        print(f"series.py: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
