# SPDX-License-Identifier: Apache-2.0
"""The RUN lines of the Containerfiles, run as they are: in a chroot whose root is this machine's, with all that they
write kept in memory and dropped. It stands for the base image, which nothing here can fetch: Debian's `useradd` and
`install`, and a virtual environment of this Python for the image's. Where the entry point is ours it is then started
as the image's user. Needs root.
"""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _wheel import cache, targets

from tests.wheel.test_deploy import CONTAINERS, instructions
from tests.wheel.test_empty_venv import can_not_run, clean

DIST = "--mount=type=bind,source=dist,target=/dist"
READY, CHECKED = "the root is there\n", "all lines have run"
ROOT = f"""
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/over" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/over,workdir=$1/work" "$1/root"
for each in /dev "$3" "$4"; do mount --rbind "$each" "$1/root$each"; done
mount -t proc proc "$1/root/proc"
mkdir "$1/root/dist"
mount --bind "$2" "$1/root/dist"
mount -t tmpfs -o mode=1777 tmpfs "$1/root/tmp"
chmod a+x "$1/root/root"
printf '{READY.strip()}\\n'
exec chroot "$1/root" /bin/sh -c "$5"
"""
PYTHON = "/opt/image"  # the virtual environment
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# What the user of an image is to have, checked as that user.
CHECK = """
[ "$(id -un)" = vllm-pd ] || echo "the user is $(id -un), not vllm-pd"
[ "$(id -g)" = "$(id -g vllm-pd)" ] || echo "the group of vllm-pd is $(id -g vllm-pd), not $(id -g)"
for folder in /run/vllm-pd /home/vllm-pd; do
    [ "$(stat -c %u:%g $folder)" = "$(id -u):$(id -g)" ] || echo "$folder belongs to $(stat -c %u:%g $folder)"
    touch $folder/written || true
done
"""


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def run_image(found: list[tuple[str, str]], dist: Path, folder: Path, user: str = "10001") -> tuple[int, str]:
    """Run these instructions' RUN lines one after the other, then CHECK and, if it is ours, the entry point, as that
    user and the group of the same number, as deploy/kubernetes has it. Of an image that begins with a vLLM the packages
    are looked for and not installed: they are 8 GB. Returns (exit status, output)."""
    has_vllm = any(name == "FROM" and "vllm" in image for name, image in found)
    installs = any(name == "RUN" and "pip install" in words for name, words in found)
    steps = ["set -e"]
    if installs:
        steps.append(f"{sys._base_executable} -m venv {PYTHON}")
    for name, words in found:
        if name == "RUN":
            line = words.replace(DIST, "").strip()
            assert not line.startswith("--"), f"an option of RUN that this test does not know: {line}"
            if has_vllm:
                line = line.replace("pip install", "pip install --dry-run --report /tmp/report")
            steps.append(f"/bin/sh -c {quoted(line)}")
    as_user = f"HOME=/home/vllm-pd chroot --userspec={user}:{user} --groups= / "
    steps += [f"echo {CHECKED}", f"{as_user} /bin/sh -c {quoted(CHECK)}"]
    [entry] = [json.loads(words) for name, words in found if name == "ENTRYPOINT"]
    [default] = [json.loads(words) for name, words in found if name == "CMD"]
    if entry[0] == "vllm-pd":
        steps.append(as_user + " ".join(map(quoted, [*entry, *default])) + " >/tmp/help")
        steps.append("grep -q Usage: /tmp/help")
    if installs and has_vllm:
        steps.append("grep -o '\"name\": \"vllm-pd\"' /tmp/report")
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", ROOT, "sh", folder, dist,
         cache.root(), sys.base_prefix, "\n".join(steps)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=900, env=clean() | {"PIP_QUIET": "1", "PATH": f"{PYTHON}/bin:{PATH}"})
    before, ready, said = done.stdout.partition(READY)
    if not ready:
        can_not_run(f"no mounts of our own: {before}")
    if done.returncode and "Could not find a version" in said:
        can_not_run(said.strip().splitlines()[-1])
    return done.returncode, said


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a chroot wants root")


@needs_root
@pytest.mark.heavy
@pytest.mark.parametrize("file", CONTAINERS, ids=lambda file: file.name)
def test_each_run_line_of_an_image_runs_and_its_user_has_what_it_needs(file, tmp_path):
    dist, folder = tmp_path / "dist", tmp_path / "root"
    dist.mkdir(), folder.mkdir()
    targets.build("plugin", dist)
    found = instructions(file)
    [user] = {words for name, words in found if name == "USER"} - {"0"}
    status, said = run_image(found, dist, folder, user)
    assert status == 0, said
    before, _, problems = said.partition(f"{CHECKED}\n")
    assert "useradd" not in before  # it warns
    assert problems.splitlines() == (['"name": "vllm-pd"'] if "engine" in file.name else []), said
    assert not any(folder.iterdir()) and "vllm-pd" not in Path("/etc/passwd").read_text()


@needs_root
@pytest.mark.parametrize("line, problem", [
    ("true", "the user is .*, not vllm-pd|cannot find name for user ID"),
    ("useradd --nonesuch vllm-pd", "unrecognized option"),
    ("useradd --system --uid 10001 --home-dir /home/vllm-pd --create-home vllm-pd && "
     "install --directory --owner 10001 --group 10001 /run/vllm-pd", r"the group of vllm-pd is \d+, not 10001"),
    ("groupadd --gid 10001 vllm-pd && useradd --uid 10001 --gid 10001 --create-home vllm-pd && "
     "install --directory /run/vllm-pd", "cannot touch '/run/vllm-pd/written': Permission denied"),
])
def test_a_bad_run_line_is_seen(line, problem, tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    _, said = run_image([("FROM", "a"), ("RUN", line), ("ENTRYPOINT", '["other"]'), ("CMD", "[]")], tmp_path, folder)
    assert re.search(problem, said), said
