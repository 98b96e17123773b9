# SPDX-License-Identifier: Apache-2.0
"""The wheels.

``cpu``: the package of the pinned sdist with the series applied, ``vllm_pd``, and the extension compiled here.
``cuda``: the official wheel of the pin with the touched Python files replaced and ``vllm_pd`` added; every compiled
file is the official one, byte for byte, so the series may touch nothing that is compiled.
``plugin``: see ``plugin``.

All carry ``vllm_pd/_build.json``: what the wheel was made from, for ``vllm-pd doctor`` and the tests.
"""

import hashlib
import json
import sys
import tomllib
import zipfile
from pathlib import Path

from . import cache, extension, metadata, plugin, project, source
from .archive import WheelWriter, read_record
from .process import BuildError, run

REQUIRES_PYTHON = "<3.13,>=3.11"
BUILD_FILE = plugin.BUILD_FILE


def version(target: str) -> str:
    return project.version(source.upstream_pin().version, target)


def requires_python(target: str) -> str:
    return plugin.REQUIRES_PYTHON if target == "plugin" else REQUIRES_PYTHON


def touched(plain: Path, patched: Path) -> list[str]:
    """Entry names of the package's files that the series changes or adds. BuildError if it removes one."""
    before, after = source.package(plain), source.package(patched)
    if gone := before.keys() - after.keys():
        raise BuildError(f"the series removes {', '.join(sorted(gone))}: a patched wheel must keep every file")
    return sorted(n for n, f in after.items() if n not in before or f.read_bytes() != before[n].read_bytes())


def build(target: str, out: Path, python: str = sys.executable) -> Path:
    """Write the wheel into out; returns its path. python: interpreter with the torch to compile against (cpu only)."""
    if project.check_target(target) == "plugin":
        return plugin.build(out)
    out.mkdir(parents=True, exist_ok=True)
    return {"cpu": build_cpu, "cuda": build_cuda}[target](out, python)


def build_cpu(out: Path, python: str) -> Path:
    torch = extension.check_torch(python)
    plain, patched = source.upstream(python), source.patched(python)
    compiled = extension.extension(patched, python)
    ours = version("cpu")
    writer = WheelWriter(out / f"vllm-{ours}-{extension.TAG}.whl", f"vllm-{ours}.dist-info")
    for name, file in source.package(patched).items():
        writer.add(name, file)
    writer.add(f"vllm/{extension.FILE}", compiled)
    files = {f.name: f.read_text() for f in (plain / "requirements").glob("*.txt")}
    requirements = metadata.override(metadata.read_requirements(files, "cpu.txt"), project.overrides("cpu"))
    setup = tomllib.loads((plain / "pyproject.toml").read_text())["project"]
    points = {"console_scripts": setup["scripts"]} | setup["entry-points"]
    text = metadata.metadata((plain / "PKG-INFO").read_text(), ours, requirements, REQUIRES_PYTHON)
    _add_ours(writer, "cpu", touched(plain, patched), torch=torch)
    _add_dist_info(writer, ours, text, metadata.wheel([extension.TAG]), metadata.entry_points(points))
    writer.add(f"vllm-{ours}.dist-info/licenses/LICENSE", plain / "LICENSE")
    return writer.close()


def build_cuda(out: Path, python: str) -> Path:
    plain, patched = source.upstream(python), source.patched(python)
    official = official_wheel(python)
    pin, ours = source.upstream_pin(), version("cuda")
    old_info, new_info = f"vllm-{pin.version}.dist-info", f"vllm-{ours}.dist-info"
    tag = official.name.removesuffix(".whl").split("-", 2)[2]
    writer = WheelWriter(out / f"vllm-{ours}-{tag}.whl", new_info)
    with zipfile.ZipFile(official) as wheel:
        record = read_record(wheel.read(f"{old_info}/RECORD").decode())
        for info in wheel.infolist():
            if info.filename.startswith(f"{old_info}/") or info.is_dir():
                continue
            writer.take(wheel, info, record[info.filename])
        changed = touched(plain, patched)
        if extension.sources_key(plain) != extension.sources_key(patched):
            raise BuildError("the series touches csrc/: the official wheel's compiled files cannot be patched")
        for name in changed:
            writer.add(name, patched / name)
        text = wheel.read(f"{old_info}/METADATA").decode()
        requirements = metadata.override(metadata.requirements_of(text), project.overrides("cuda"))
        text = metadata.metadata(text, ours, requirements, REQUIRES_PYTHON)
        points = metadata.read_entry_points(wheel.read(f"{old_info}/entry_points.txt").decode())
        tags = [line[5:] for line in wheel.read(f"{old_info}/WHEEL").decode().splitlines() if line.startswith("Tag: ")]
        _add_ours(writer, "cuda", changed, official=official.name)
        _add_dist_info(writer, ours, text, metadata.wheel(tags), metadata.entry_points(points))
        writer.add(f"{new_info}/licenses/LICENSE", wheel.read(f"{old_info}/licenses/LICENSE"))
        return writer.close()


def official_wheel(python: str) -> Path:
    """The pin's wheel as upstream published it, fetched once with pip and verified against pyproject.toml each time."""
    name, digest = project.settings()["cuda"]["wheel"], project.settings()["cuda"]["sha256"]
    pin = source.upstream_pin()

    def fetch(folder: Path) -> None:
        command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--implementation", "cp", "--abi", "abi3", "--platform", "manylinux1_x86_64"]
        command += ["--dest", str(folder), f"vllm=={pin.version}"]
        run(command)
        check(folder / name)

    def check(file: Path) -> None:
        if not file.is_file():
            raise BuildError(f"{file.name} was not found on the index")
        with open(file, "rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != digest:
            raise BuildError(f"{file}: sha256 is {found}, pyproject.toml pins {digest}; remove it and try again")

    file = cache.piece("official", digest[:16], fetch, f"fetching the official wheel of {pin.version}") / name
    check(file)
    return file


def _add_ours(writer: WheelWriter, target: str, changed: list[str], **facts: str) -> None:
    """``vllm_pd``, the version module and the build file."""
    for file in project.package_files(target):
        writer.add(file.relative_to(project.ROOT).as_posix(), file)
    pin = source.upstream_pin()
    writer.add("vllm/_version.py", metadata.version_module(version(target)).encode())
    built = {
        "version": version(target),
        "target": target,
        "upstream": {"version": pin.version, "commit": pin.commit, "sha256": pin.sha256},
        "series": [{"patch": f.name, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()} for f in source.patches()],
        "touched": changed,
    }
    writer.add(BUILD_FILE, (json.dumps(built | facts, indent=2) + "\n").encode())


def _add_dist_info(writer: WheelWriter, ours: str, text: str, wheel: str, points: str) -> None:
    folder = f"vllm-{ours}.dist-info"
    writer.add(f"{folder}/METADATA", text.encode())
    writer.add(f"{folder}/WHEEL", wheel.encode())
    writer.add(f"{folder}/entry_points.txt", points.encode())
    writer.add(f"{folder}/top_level.txt", b"vllm\nvllm_pd\n")


def key(target: str, python: str) -> str:
    """Hash of all that goes into the wheel."""
    if target == "plugin":
        return plugin.source_key()
    own = cache.tree_key(project.ROOT, [*project.package_files(target), *project.recipe_files()])
    compiled = ""
    if target == "cpu":
        compiled = extension.key(source.patched(python), extension.torch_version(python))
    return cache.key(target, source.series_key(), own, compiled)
