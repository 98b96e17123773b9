# SPDX-License-Identifier: Apache-2.0
"""What this host can be: broker, router, engine. One that is only some of them is as it should be."""

from collections.abc import Iterator
from importlib.util import find_spec

from vllm_pd.extras import ENGINE_INSTALL, install_command, missing_modules
from vllm_pd.model.installation import World
from vllm_pd.ops.finding import Finding

ENGINES = {World.PATCHED: "engine V0", World.PLUGIN: "engine V1"}


def complete_extras() -> list[str]:
    """The extras all of whose modules are installed, the engine's only beside a vLLM."""
    return [extra for extra in ("engine", "router", "picker", "nats", "bench")
            if not missing_modules(extra) and (extra != "engine" or find_spec("vllm") is not None)]


def check_kinds(world: World) -> Iterator[Finding]:
    """What this host can run, and how it could run the rest. `world` is what is installed rightly here."""
    extras = complete_extras()
    can = ["broker", *(kind for kind in ("router", "picker") if kind in extras),
           *([ENGINES[world]] if world in ENGINES and "engine" in extras else [])]
    yield Finding("host", f"this host can run: {', '.join(can)}")
    if "router" not in extras:
        yield Finding("router", _lacks("router"), hint=install_command("router"))
    if world is World.ALONE:
        yield Finding("engine", "there is no vllm here", hint=ENGINE_INSTALL)
    if "nats" not in extras:
        yield Finding("nats", f"{_lacks('nats')}: no broker at nats://", hint=install_command("nats"))


def _lacks(extra: str) -> str:
    missing = missing_modules(extra)
    return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not here"
