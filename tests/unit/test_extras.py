# SPDX-License-Identifier: Apache-2.0
"""Whoever needs a package that is only in an extra says so in one line, with what installs it."""
import ast
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_pd import cli, errors, extras
from vllm_pd.broker import members
from vllm_pd.errors import MissingPackage
from vllm_pd.model import checks
from vllm_pd.model.installation import World
from vllm_pd.ops import for_command

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["vllm-pd"]
DISTRIBUTIONS = {"dns": "dnspython", "nats": "nats-py", "zmq": "pyzmq", "grpc": "grpcio", "xds": "xds-protos",
                 "envoy": "xds-protos", "grpc_health": "grpcio-health-checking"}  # whose module has another name
WITHOUT_EXTRA = {"msgspec", "pyzmq", "psutil", "typer", "rich", "xxhash", "packaging"}


def distribution(module: str) -> str:
    return DISTRIBUTIONS.get(module, module.replace("_", "-"))


@pytest.fixture
def missing(monkeypatch):
    """Modules that are not to be found."""
    names: set[str] = set()
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in names else True)
    monkeypatch.setattr(extras, "version_of", lambda name: None)
    return names


def test_the_extras_bring_what_is_asked_for():
    wanted = SETTINGS["plugin"]["extras"]
    assert wanted.keys() == extras.MODULES.keys()
    for extra, modules in extras.MODULES.items():
        assert {distribution(module) for module in modules} <= wanted[extra].keys(), extra


def test_without_an_extra_there_is_what_a_broker_needs():
    requires = SETTINGS["requires"]
    kept = {name for name, given in (requires["common"] | requires["plugin"]).items() if given is not False}
    assert kept == WITHOUT_EXTRA


def eager_imports(module: str, seen: set[str]) -> set[str]:
    """The packages of others that an import of a module of ours imports."""
    file = ROOT / (module.replace(".", "/") + ".py")
    if module in seen or not file.is_file():
        return set()
    seen.add(module)
    found = set()
    for node in ast.parse(file.read_text()).body:
        names = ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                 [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                 if isinstance(node, ast.ImportFrom) else [])
        for name in names:
            found |= eager_imports(name, seen) if name.startswith("vllm_pd") else {name.partition(".")[0]}
    return found - set(sys.stdlib_module_names)


@pytest.mark.parametrize("module, extra", [
    ("cli", None), ("broker.server", None), ("broker.members", None), ("ops.doctor", None), ("ops.orders", None),
    ("ops.paths", None), ("ops.sizing", None), ("ops.split", None), ("ops.launch.up", None), ("v1.plugin", None),
    ("ops.options", None), ("ops.for_command", None), ("v1.preview", None), ("ops.trial_requests", "router"),
    ("ops.top_readings", "router"), ("ops.planner", "router"),
    ("router.server", "router"), ("picker.options", None), ("picker.server", "picker"),
    ("router.tokenizer_files", "router"), ("broker.nats_members", "nats"),
    ("broker.nats_backend", "nats"), ("bench.handover", "bench"), ("bench.router", "bench"),
    ("bench.policies", "bench"), ("bench.serve.command", "bench"), ("bench.share.measure", "bench")])
def test_a_module_imports_only_what_its_extra_brings(module, extra):
    found = {distribution(name) for name in eager_imports(f"vllm_pd.{module}", set())}
    assert found - WITHOUT_EXTRA <= {distribution(name) for name in extras.MODULES.get(extra, ())}


def test_imports_are_seen():
    assert "uvicorn" in eager_imports("vllm_pd.router.server", set())
    assert "torch" in eager_imports("vllm_pd.transfer.torch.transport", set())
    assert "nixl" not in eager_imports("vllm_pd.transfer.nixl.agent", set())  # a function of it does


def test_what_is_missing_is_one_line_with_the_command(missing):
    extras.require_extra("router")
    missing.update({"uvicorn", "tokenizers", "nixl"})
    with pytest.raises(MissingPackage) as refused:
        extras.require_extra("router")
    assert str(refused.value) == 'uvicorn, tokenizers are not installed: pip install "vllm-pd[router]"'
    extras.require_extra("engine", "httptools")
    with pytest.raises(MissingPackage, match=r'^nixl is not installed: pip install "vllm-pd\[engine\]"$'):
        extras.require_extra("engine", "nixl")
    missing.add("vllm")
    with pytest.raises(MissingPackage, match=r'^vllm is not installed: pip install "vllm==0\.32\.\*" "vllm-pd\[eng'):
        extras.require_vllm()


def test_the_patched_vllm_has_no_extras(missing, monkeypatch):
    monkeypatch.setattr(extras, "version_of", lambda name: "0.9.2+pd.1.cpu")
    missing.add("nkeys")
    with pytest.raises(MissingPackage, match="nkeys is not installed: pip install the wheel"):
        extras.require_extra("nats")
    missing.add("xds")
    with pytest.raises(MissingPackage, match="xds is not installed: pip install grpcio grpcio-health"):
        extras.require_extra("picker")


def test_the_error_of_a_worker_arrives(missing):
    """Upstream pickles it. (An error of ours that is pickled is made again by its arguments.)"""
    error = MissingPackage(["nixl"], "cure")
    kind, arguments = error.__reduce__()
    assert str(kind(*arguments)) == str(error) and kind is errors.MissingPackage


@pytest.mark.parametrize("arguments, modules, command", [
    (["router"], {"aiohttp"}, '"vllm-pd[router]"'),
    (["picker"], {"grpc"}, '"vllm-pd[picker]"'),
    (["doctor", "--try", "http://h"], {"httptools"}, '"vllm-pd[router]"'),
    (["doctor", "--for", "vllm serve m"], {"vllm"}, '"vllm==0.32.*" "vllm-pd[engine]"'),
    (["top", "--broker", "tcp://127.0.0.1:5700"], {"prometheus_client"}, '"vllm-pd[router]"'),
    (["up", "m"], {"vllm"}, '"vllm==0.32.*" "vllm-pd[engine]"'),
    (["up", "m", "--router"], {"uvicorn"}, '"vllm-pd[router]"'),
    (["status", "--broker", "nats://127.0.0.1:4222"], {"nats"}, '"vllm-pd[nats]"'),
    (["bench", "serve", "m"], {"numpy"}, '"vllm-pd[bench]"'),
    (["bench", "handover", "--decode", "http://h", "--prefill", "http://h"], {"numpy"}, '"vllm-pd[bench]"'),
    (["bench", "router"], {"uvloop"}, '"vllm-pd[bench]"'),
    (["bench", "policies", "--tokenizer", "m", "--worker", "http://h"], {"transformers"}, '"vllm-pd[bench]"'),
    (["bench", "share", "trace"], {"numpy"}, '"vllm-pd[bench]"'),
])
def test_each_command_says_what_it_lacks(missing, monkeypatch, capsys, arguments, modules, command):
    missing.update(modules)
    monkeypatch.setattr(sys, "argv", ["vllm-pd", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert re.fullmatch(rf"error: {modules.pop()} is not installed: pip install {re.escape(command)}\n", said)


def test_engines_say_what_they_lack_before_they_try_it(missing):
    missing.add("nixl")
    with pytest.raises(MissingPackage, match=r"nixl is not installed.*vllm-pd\[engine\]"):
        checks.check_nixl("127.0.0.1")
    missing.add("nats")
    with pytest.raises(MissingPackage, match=r"nats is not installed.*vllm-pd\[nats\]"):
        members.list_members("nats://127.0.0.1:4222")


@pytest.mark.parametrize("world, words", [
    (World.PLUGIN, r'nixl is not installed: pip install "vllm-pd\[engine\]"'),
    (World.PATCHED, "--for='vllm serve m' can't be used: .*engine V1.*engine V0.*docs/v1.md")])
def test_what_a_command_line_is_looked_at_with(missing, monkeypatch, capsys, world, words):
    """The engine's own packages, beside a stock vLLM."""
    missing.add("nixl")
    monkeypatch.setattr(for_command, "find_installation", lambda: SimpleNamespace(world=world))
    monkeypatch.setattr(sys, "argv", ["vllm-pd", "doctor", "--for", "vllm serve m"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and re.fullmatch(f"error: {words}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("other", [["--broker", "tcp://127.0.0.1:5700"], ["--port", "1"], ["--try", "http://h"],
                                   ["--from", "e", "--broker", "tcp://127.0.0.1:5700"]])
def test_a_command_line_is_asked_about_alone(monkeypatch, capsys, other):
    monkeypatch.setattr(sys, "argv", ["vllm-pd", "doctor", "--for", "vllm serve m", *other])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and "checks of their own" in capsys.readouterr().err
