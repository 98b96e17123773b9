# SPDX-License-Identifier: Apache-2.0
"""Both wheels, built and read once, and what they are compared with; our commands, as far as they only parse. Needs the
environment of scripts/env.sh."""

import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from _wheel import cache, project, source, targets
from _wheel.archive import read_record, record_hash

from tests.wheel.checks import Wheel
from vllm_pd import cli
from vllm_pd.router import server
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.policy import RoutingPolicyConfig
from vllm_pd.rpc.addresses import parse_bind
from vllm_pd.rpc.keys import Keys


@pytest.fixture(scope="session")
def plain() -> Path:
    """The pinned upstream tree."""
    with cache.lock():
        return source.upstream(sys.executable)


@pytest.fixture(scope="session")
def patched() -> Path:
    """The same with the series applied."""
    with cache.lock():
        return source.patched(sys.executable)


@pytest.fixture(scope="session")
def official() -> zipfile.ZipFile:
    """The wheel that upstream published for CUDA, verified against its pinned sha256."""
    with cache.lock():
        path = targets.official_wheel(sys.executable)
    with zipfile.ZipFile(path) as opened:
        yield opened


@pytest.fixture(scope="session")
def official_hashes(official) -> dict[str, str]:
    """Entry -> hash of every file of the official wheel outside its dist-info."""
    record = read_record(official.read(f"{official_info()}/RECORD").decode())
    return {name: digest for name, (digest, _) in record.items() if ".dist-info/" not in name}


def official_info() -> str:
    return f"vllm-{source.upstream_pin().version}.dist-info"


@pytest.fixture(scope="session")
def official_text(official):
    """Reads a text file of the official wheel's dist-info."""
    return lambda name: official.read(f"{official_info()}/{name}").decode()


@pytest.fixture(scope="session")
def own_hashes() -> dict[str, str]:
    """Entry -> hash of every file of ``vllm_pd``."""
    return {f.relative_to(project.ROOT).as_posix(): record_hash(f.read_bytes()) for f in project.package_files("cpu")}


@pytest.fixture(scope="session")
def wheels(tmp_path_factory, own_hashes) -> dict[str, Wheel]:
    """Target -> wheel."""
    out = tmp_path_factory.mktemp("dist")
    with cache.lock():
        return {target: Wheel.read(targets.build(target, out, sys.executable)) for target in ("cpu", "cuda")}


@pytest.fixture
def parsed(monkeypatch) -> Callable[[Sequence[str]], dict[str, Any]]:
    """Have our command parse arguments and check its settings, and return them; nothing is started."""
    def check(options: RouterOptions, policy: RoutingPolicyConfig) -> None:
        options.checked(), policy.check()

    monkeypatch.setattr(server, "serve", check)
    monkeypatch.setattr(cli, "require_extra", lambda *names: None)  # gRPC is in a folder of its own
    monkeypatch.setitem(sys.modules, "vllm_pd.picker.server", SimpleNamespace(serve=check))
    monkeypatch.setenv("VLLM_API_KEY", "")

    def run(arguments: Sequence[str]) -> dict[str, Any]:
        name, *rest = arguments
        command = typer.main.get_command(cli.app).commands[name]
        context = command.make_context(name, rest)
        given = dict(context.params)
        if name in ("router", "picker"):
            command.invoke(context)
        else:
            assert name == "broker"
            keys = given["keys"] and Keys.load(given["keys"], "--keys")
            parse_bind("--bind", given["bind"], keyed=keys is not None)
        return given

    return run
