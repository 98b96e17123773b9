# SPDX-License-Identifier: Apache-2.0
"""B53: both wheels, file by file."""

import hashlib
import json
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from _wheel import extension, metadata, project, source, targets
from _wheel.archive import record_hash
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from tests.wheel import checks

BOTH = pytest.mark.parametrize("target", ["cpu", "cuda"])
OWN = ("vllm/_version.py", targets.BUILD_FILE)


def hash_of(file: Path) -> str:
    return record_hash(file.read_bytes())


@BOTH
def test_b53_name_and_version_say_pin_and_series(wheels, target):
    pin = source.upstream_pin()
    name, version, _, _ = parse_wheel_filename(wheels[target].path.name)
    assert (name, str(version)) == ("vllm", f"{pin.version}+pd.{project.settings()['release']}.{target}")
    head = Parser().parsestr(wheels[target].info("METADATA"))
    assert (head["Name"], head["Version"]) == ("vllm", str(version))
    scope = {}
    exec(wheels[target].text("vllm/_version.py"), scope)
    assert scope["__version__"] == str(version)
    assert ".".join(str(part) for part in scope["__version_tuple__"][:3]) == pin.version


@BOTH
def test_b53_files_outside_the_series_equal_upstreams(wheels, target, plain, patched, official_hashes, own_hashes):
    if target == "cpu":
        expected = {name: hash_of(file) for name, file in source.package(plain).items()}
    else:
        expected = dict(official_hashes)
    for name in targets.touched(plain, patched):
        expected[name] = hash_of(patched / name)
    assert "vllm_pd/__init__.py" in own_hashes
    expected |= own_hashes
    own = (*OWN, f"vllm/{extension.FILE}") if target == "cpu" else OWN
    expected |= {name: wheels[target].found[name] for name in own}
    assert checks.content_problems(wheels[target], expected) == []


@BOTH
def test_b53_touched_files_have_the_sums_of_the_series(wheels, target, plain, patched):
    sums = dict(line.split("  ")[::-1] for line in (source.PATCHES / "SHA256SUMS").read_text().splitlines())
    touched = targets.touched(plain, patched)
    assert set(touched) == {name for name in sums if name.startswith("vllm/")}
    for name in touched:
        assert hashlib.sha256(wheels[target].text(name).encode()).hexdigest() == sums[name], name


def test_b53_compiled_files_of_the_cuda_wheel_are_the_official_ones(wheels, official_hashes):
    compiled = {name: digest for name, digest in official_hashes.items() if name.endswith(".so")}
    assert len(compiled) >= 6
    assert {name: wheels["cuda"].found.get(name) for name in compiled} == compiled


@BOTH
def test_b53_record_is_right(wheels, target):
    assert checks.record_problems(wheels[target]) == []


def test_b53_checks_find_what_is_wrong(wheels, tmp_path):
    """The guards above, fed a wheel with a changed, an added and a missing file."""
    good = wheels["cpu"]
    with zipfile.ZipFile(good.path) as source_file, zipfile.ZipFile(tmp_path / "bad.whl", "w") as wheel:
        for name in good.found:
            if name != "vllm/scripts.py":
                wheel.writestr(name, source_file.read(name) + (b"\n" if name == "vllm/sequence.py" else b""))
        wheel.writestr("vllm/extra.py", b"")
    bad = checks.Wheel.read(tmp_path / "bad.whl")
    assert sorted(checks.record_problems(bad)) == [
        "RECORD and the entries name different files", "vllm/sequence.py: hash or size in RECORD is wrong"]  # fmt: skip
    expected = {name: digest for name, digest in good.found.items() if ".dist-info/" not in name}
    assert checks.content_problems(bad, expected) == [
        "vllm/extra.py: not expected", "vllm/scripts.py: missing", "vllm/sequence.py: differs"]  # fmt: skip


@BOTH
def test_b53_metadata_keeps_upstreams_and_pins_what_runs(wheels, target, official_text):
    text = wheels[target].info("METADATA")
    requires = {canonicalize_name(r.name): r for r in map(Requirement, metadata.requirements_of(text))}
    assert str(requires["torch"].specifier) == {"cpu": "==2.6.0", "cuda": "==2.7.0"}[target]
    assert "4.53.3" in requires["transformers"].specifier and "4.54.0" not in requires["transformers"].specifier
    assert "2.2.6" in requires["numpy"].specifier and "2.3.0" not in requires["numpy"].specifier
    assert {"nixl", "typer", "rich", "pyzmq", "msgspec", "nats-py", "nkeys", "xxhash"} <= requires.keys()
    assert set(Parser().parsestr(text).get_all("Provides-Extra")) >= {"bench", "audio"}
    theirs = {canonicalize_name(Requirement(r).name) for r in metadata.requirements_of(official_text("METADATA"))}
    left_out = {name for name, value in project.overrides(target).items() if value is False}
    only_cuda = {"ray", "xformers"} if target == "cpu" else set()
    assert theirs - left_out - only_cuda <= requires.keys()


def test_b53_locked_environment_satisfies_the_cpu_wheel(wheels):
    lines = (project.ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    locked = dict(line.split()[0].split("==") for line in lines if line and not line.startswith("#"))
    for text in metadata.requirements_of(wheels["cpu"].info("METADATA")):
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            assert locked.get(canonicalize_name(requirement.name), "absent") in requirement.specifier, text


@BOTH
def test_b53_entry_points_are_upstreams_and_ours(wheels, target, official_text):
    theirs = metadata.read_entry_points(official_text("entry_points.txt"))
    ours = metadata.read_entry_points(wheels[target].info("entry_points.txt"))
    assert ours["console_scripts"].pop("vllm-pd") == "vllm_pd.cli:main"
    assert ours == theirs


@BOTH
def test_b53_build_file_names_pin_series_and_touched_files(wheels, target, plain, patched):
    built = json.loads(wheels[target].text(targets.BUILD_FILE))
    assert built["target"] == target
    assert built["upstream"]["sha256"] == source.upstream_pin().sha256
    assert [p["patch"] for p in built["series"]] == [f.name for f in source.patches()]
    assert built["touched"] == targets.touched(plain, patched)


def test_b53_every_way_to_build_gives_the_same_bytes(tmp_path):
    """Twice the builder, once ``pip wheel .``."""
    first, second = (targets.build("cpu", tmp_path / name, sys.executable) for name in ("first", "second"))
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*command, str(tmp_path)], cwd=project.ROOT, check=True, capture_output=True, text=True)
    (third,) = tmp_path.glob("*.whl")
    assert first.name == second.name == third.name
    assert first.read_bytes() == second.read_bytes() == third.read_bytes()


def test_b53_extension_has_only_the_stable_interface_of_python(wheels, tmp_path):
    """The tag says abi3: the file may import Py* symbols of the limited API only (it needs the module creation
    alone)."""
    with zipfile.ZipFile(wheels["cpu"].path) as wheel:
        file = wheel.extract(f"vllm/{extension.FILE}", tmp_path)
    listed = subprocess.run(["nm", "-D", "--undefined-only", file], check=True, capture_output=True, text=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    assert {n for n in names if n.startswith(("Py", "_Py"))} == {"PyModule_Create2"}


def test_b53_touched_refuses_a_removed_file(tmp_path):
    for tree, names in (("a", ("one", "two")), ("b", ("one",))):
        for name in names:
            file = tmp_path / tree / "vllm" / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    with pytest.raises(targets.BuildError, match=r"vllm/two\.py"):
        targets.touched(tmp_path / "a", tmp_path / "b")


def test_b53_a_series_that_touches_compiled_code_makes_no_cuda_wheel(plain, tmp_path, monkeypatch):
    other = tmp_path / "csrc" / "ops.h"
    other.parent.mkdir()
    other.write_text("// changed\n")
    (tmp_path / "vllm").symlink_to(plain / "vllm")
    monkeypatch.setattr(source, "patched", lambda python: tmp_path)
    with pytest.raises(targets.BuildError, match="touches csrc/"):
        targets.build("cuda", tmp_path / "out", sys.executable)
    assert not list((tmp_path / "out").glob("*"))
