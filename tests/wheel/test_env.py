# SPDX-License-Identifier: Apache-2.0
"""scripts/env.sh as a caller's shell sees it, with everything in the cache."""

import os
import subprocess

from _wheel import project


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
