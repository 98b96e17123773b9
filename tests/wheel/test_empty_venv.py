# SPDX-License-Identifier: Apache-2.0
"""The plugin's wheel in virtual environments with nothing else: what it requires is enough for what it says it can do.

pip takes the packages from its own index and keeps them in the cache folder. Where it can't have them these tests are
skipped with its reason, in CI they fail.
"""
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from _wheel import cache, project, targets

from tests.waiting import wait_for
from vllm_pd.protocol.messages import PROTOCOL
from vllm_pd.rpc.ports import take_free

MOST_BYTES = 200_000_000  # of a router's environment, pip included
MOST_IMAGE_BYTES = 250_000_000  # of what its image installs, the same
ROUTER_IMAGE = project.ROOT / "deploy" / "containers" / "router.Containerfile"
PYTHONS = ("3.12", "3.13")  # besides the one that runs the tests
# `vllm` brings or needs the next three; gRPC and `envoy` are the picker's
ABSENT = {"vllm", "torch", "numpy", "opentelemetry", "nats", "starlette", "grpc", "envoy"}
MODEL = Path(os.environ["VLLM_PD_MODEL"])
IMPORT_ALL = """
import importlib, json, pkgutil, sys, warnings
import vllm_pd
from vllm_pd.errors import MissingPackage
warnings.simplefilter("error", SyntaxWarning)
imported, absent, broken = 0, set(), {}
for module in pkgutil.walk_packages(vllm_pd.__path__, "vllm_pd."):
    try:
        importlib.import_module(module.name)
        imported += 1
    except ModuleNotFoundError as error:
        absent.add(error.name.partition(".")[0])
    except MissingPackage as error:
        absent.update(error.modules)
    except Exception as error:
        broken[module.name] = repr(error)
print(json.dumps([imported, sorted(absent), broken]))
"""


def clean() -> dict[str, str]:
    """The environment of a user who has not entered ours."""
    ours = ("PYTHON", "VIRTUAL_ENV", "VLLM", "HF_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {
        "PIP_CACHE_DIR": str(cache.root() / "downloads" / "pip"), "HF_HUB_OFFLINE": "1"}


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=clean(), cwd="/", capture_output=True, text=True, timeout=600)


def can_not_run(reason: str) -> None:
    """Skip the test, or fail it in CI."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def make(folder: Path, python: str | Path, wheel: Path, what: str, *options: str) -> Path:
    """Make a virtual environment with that Python and install what is written like `vllm-pd[router]`."""
    done = run(python, "-m", "venv", folder)
    assert done.returncode == 0, done.stderr
    return install(folder, wheel, what, *options)


def install(folder: Path, wheel: Path, what: str, *options: str) -> Path:
    """Install that into a virtual environment. Returns its folder."""
    done = run(folder / "bin" / "pip", "install", "--quiet", *options, "--find-links", wheel.parent, what)
    if done.returncode and "Could not find a version" in done.stderr + done.stdout:
        can_not_run(f"{what}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert run(folder / "bin" / "pip", "check").returncode == 0
    return folder


def size_bytes(folder: Path) -> int:
    """What the files in it take, each counted once."""
    files = {(file.stat().st_dev, file.stat().st_ino): file.stat().st_size for file in folder.rglob("*")
             if file.is_file() and not file.is_symlink()}
    return sum(files.values())


def image_installs() -> str:
    """What the router's Containerfile has pip install."""
    [what] = re.findall(r'pip install --no-cache-dir --find-links /dist "(vllm-pd\[[^"]+)"$', ROUTER_IMAGE.read_text(),
                        re.MULTILINE)
    return what


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return targets.build("plugin", tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory, wheel) -> Path:
    """An environment with the wheel alone."""
    return make(tmp_path_factory.mktemp("bare") / "env", sys.executable, wheel, "vllm-pd", "--no-compile")


@pytest.fixture(scope="module")
def router(tmp_path_factory, wheel) -> Path:
    """An environment with the extra `router`."""
    return make(tmp_path_factory.mktemp("router") / "env", sys.executable, wheel, "vllm-pd[router]")


@contextlib.contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen]:
    """A process of one of these environments."""
    process = subprocess.Popen(command, env=clean(), cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise


def ask(url: str, body: dict | None = None) -> tuple[int, str]:
    """(status, body) of an answer; (0, reason) where nobody listens."""
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


@contextlib.contextmanager
def broker(env: Path) -> Iterator[str]:
    """A broker; its address."""
    address = f"tcp://127.0.0.1:{take_free('127.0.0.1')}"
    with running(env / "bin" / "vllm-pd", "broker", "--bind", address) as process:
        assert process.stdout.readline() == f"broker: listening at {address}\n"
        yield address


def doctor(env: Path, *more: str) -> tuple[int, str]:
    done = run(env / "bin" / "vllm-pd", "doctor", "--port", str(take_free("127.0.0.1")), *more)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_the_wheel_alone_is_a_broker(bare):
    assert run(bare / "bin" / "vllm-pd", "--version").stdout == (
        f"vllm-pd {project.version('', 'plugin')}, protocol {PROTOCOL}\n")
    with broker(bare) as address:
        assert run(bare / "bin" / "vllm-pd", "status", "--broker", address).stdout == "no engine is registered\n"
    status, said = doctor(bare)
    assert status == 0 and "BAD" not in said, said
    assert "this host can run: broker\n" in said and "all 7 requirements are met" in said
    for extra in ("router", "engine", "nats"):
        assert re.search(rf"^--   {extra} .*\n +-> pip install .*\"vllm-pd\[{extra}\]\"$", said, re.MULTILINE), said


@pytest.mark.parametrize("arguments, extra", [
    (["router"], "router"), (["picker"], "picker"), (["up", "m"], "engine"), (["bench", "serve", "m"], "bench"),
    (["status", "--broker", "nats://127.0.0.1:4222"], "nats")])
def test_the_wheel_alone_says_what_is_missing(bare, arguments, extra):
    done = run(bare / "bin" / "vllm-pd", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"error: .* not installed: pip install .*\"vllm-pd\[{extra}\]\"\n", done.stderr), done.stderr


def test_a_router_needs_its_extra_only(router):
    """It is small, starts, follows the events of engines, tokenises with the model's tokenizer, passes requests on."""
    assert size_bytes(router) <= MOST_BYTES
    status, said = doctor(router)
    assert status == 0 and "this host can run: broker, router\n" in said and "BAD" not in said, said
    assert not run(router / "bin" / "python", "-c", "import transformers").stdout
    port, *engines = (str(take_free("127.0.0.1")) for _ in range(3))
    url, workers = f"http://127.0.0.1:{port}", [f"--worker=http://127.0.0.1:{engine}" for engine in engines]
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(broker(router))
        for engine in engines:
            stack.enter_context(running(router / "bin" / "python", "-m", "vllm_pd.bench.dummy", "--port", engine,
                                        "--model", "m", "--block-size", "16"))
        process = stack.enter_context(running(router / "bin" / "vllm-pd", "router", "--port", port, *workers,
                                              "--broker", address, "--tokenizer", MODEL))
        last: list[object] = []

        def serves() -> bool:
            assert process.poll() is None, process.stdout.read()
            last[:] = ask(f"{url}/workers")
            found = json.loads(last[1]) if last[0] == 200 else {"workers": [], "tokenizer": ""}
            states = [(one["state"], one["events"] and one["events"]["state"]) for one in found["workers"]]
            return states == [("up", "live")] * 2 and found["tokenizer"] == "ok" and ask(f"{url}/health")[0] == 200

        wait_for(serves, lambda: f"the router does not serve: {last}", timeout_s=120)
        for body in ({"prompt": "The capital of France is " * 10}, {"messages": [{"role": "user", "content": "Why?"}]}):
            path = "completions" if "prompt" in body else "chat/completions"
            status, text = ask(f"{url}/v1/{path}", body | {"model": "m", "max_tokens": 3})
            assert status == 200 and " t0 t1 t2" in text, text
        metrics = ask(f"{url}/metrics")[1]
        assert re.search(r'^vllm:pd_router_tokenized_total\{outcome="done"\} 2\.0$', metrics, re.MULTILINE), metrics
        assert doctor(router, "--broker", address)[1].count(f"{address} answers") == 1


def test_a_picker_needs_its_extra_only(tmp_path, wheel):
    """It starts, tokenises with the model's tokenizer, knows its engines, and says so by gRPC and HTTP."""
    env = make(tmp_path / "env", sys.executable, wheel, "vllm-pd[picker]", "--no-compile")
    port, metrics, engine = (str(take_free("127.0.0.1")) for _ in range(3))
    check = ("import grpc; from grpc_health.v1 import health_pb2 as h, health_pb2_grpc as g; print(g.HealthStub("
             f"grpc.insecure_channel('127.0.0.1:{port}')).Check(h.HealthCheckRequest(service='readiness')).status)")
    assert "this host can run: broker, picker\n" in doctor(env)[1]
    with running(sys.executable, "-m", "vllm_pd.bench.dummy", "--port", engine, "--model", "m", "--block-size",
                 "16") as dummy, \
            running(env / "bin" / "vllm-pd", "picker", "--port", port, "--metrics-port", metrics,
                    f"--worker=http://127.0.0.1:{engine}", "--tokenizer", MODEL) as process:

        def serves() -> bool:
            assert process.poll() is None, process.stdout.read()
            assert dummy.poll() is None, dummy.stdout.read()
            return ask(f"http://127.0.0.1:{metrics}/health")[0] == 200

        wait_for(serves, lambda: "the picker does not serve", timeout_s=120)
        wait_for(lambda: run(env / "bin" / "python", "-c", check).stdout == "1\n", lambda: "not ready", timeout_s=60)
        page = ask(f"http://127.0.0.1:{metrics}/metrics")[1]
        assert f'vllm:pd_router_worker_up{{worker="http://127.0.0.1:{engine}"}} 1.0' in page


def test_the_routers_image_installs_what_runs(router, wheel):
    """What its Containerfile has pip install also brings what a picker and a broker at nats:// need."""
    env = install(router, wheel, image_installs())
    status, said = doctor(env)
    assert status == 0 and "this host can run: broker, router, picker\n" in said and "no broker at nats://" not in said
    assert size_bytes(env) < MOST_IMAGE_BYTES
    picker = run(env / "bin" / "vllm-pd", "picker", "--order", "prefill-first")  # refused, and with gRPC loaded
    assert picker.returncode == 2 and "a picker changes no request" in picker.stderr
    done = run(env / "bin" / "vllm-pd", "status", "--broker", f"nats://127.0.0.1:{take_free('127.0.0.1')}")
    assert done.returncode == 2 and "not installed" not in done.stderr and "Traceback" not in done.stderr


def find_python(version: str) -> str | None:
    """A Python of that version. Where pyenv has one, its shim wants to be asked by name."""
    shim = shutil.which(f"python{version}")
    for variables in ({}, {"PYENV_VERSION": version}):
        if shim is None:
            return None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run([shim, "-c", "import sys, ensurepip, venv; print(sys.executable)"], timeout=60,
                                  env=clean() | variables, capture_output=True, text=True)
            if done.returncode == 0:
                return done.stdout.strip()
    return None


@pytest.mark.heavy
@pytest.mark.parametrize("version", PYTHONS)
def test_each_module_can_be_imported_by_each_python_that_is_named(tmp_path, wheel, version):
    """But for those that need a vLLM, or another extra than the router's."""
    python = find_python(version)
    if python is None:
        can_not_run(f"no python{version} with venv on the PATH")
    env = make(tmp_path / "env", python, wheel, "vllm-pd[router]", "--no-compile")
    done = run(env / "bin" / "python", "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    imported, absent, broken = json.loads(done.stdout)
    assert broken == {} and set(absent) == ABSENT and imported > 200
    assert run(env / "bin" / "vllm-pd", "--help").returncode == 0
    with broker(env):
        pass
