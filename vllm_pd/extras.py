# SPDX-License-Identifier: Apache-2.0
"""The extras of the distribution `vllm-pd`: what engine, router, picker, NATS and benchmarks need beyond the broker.

Whoever is about to import such a package calls `require_extra` first, so that a host without it answers with one line.
The wheel's own list, with versions, is `[tool.vllm-pd.plugin.extras]` of pyproject.toml.
"""
from importlib import metadata
from importlib.util import find_spec

from vllm_pd.errors import MissingPackage

PLUGIN = "vllm-pd"
ENGINE_INSTALL = f'pip install "vllm==0.32.*" "{PLUGIN}[engine]"'
PATCHED_MARK = "+pd"  # in the version of the patched vllm
MODULES = {  # by extra: what is imported. The patched vllm requires all of it, but for PATCHED_LACKS
    "engine": ("nixl", "httptools"),
    "router": ("uvicorn", "httptools", "aiohttp", "aiohappyeyeballs", "prometheus_client", "tokenizers", "jinja2",
               "dns"),
    "picker": ("grpc", "grpc_health", "xds", "httptools", "aiohttp", "aiohappyeyeballs", "prometheus_client",
               "tokenizers", "jinja2", "dns"),
    "nats": ("nats", "nkeys"),
    "bench": ("uvloop", "httptools", "numpy", "prometheus_client", "transformers"),
}
PATCHED_LACKS = {"picker": "pip install grpcio grpcio-health-checking xds-protos"}


def missing_modules(extra: str) -> list[str]:
    """The modules of an extra that are not installed. None is imported."""
    return [module for module in MODULES[extra] if find_spec(module) is None]


def require_extra(extra: str, *modules: str) -> None:
    """Raises MissingPackage where one of these modules of an extra, by default any of them, is not installed."""
    missing = [module for module in missing_modules(extra) if not modules or module in modules]
    if missing:
        raise MissingPackage(missing, install_command(extra))


def require_vllm() -> None:
    """Raises MissingPackage where no vLLM is installed."""
    if find_spec("vllm") is None:
        raise MissingPackage(["vllm"], ENGINE_INSTALL)


def install_command(extra: str) -> str:
    """What installs an extra here. The patched vllm has no extras, and no place beside it for the plugin."""
    if PATCHED_MARK in (version_of("vllm") or ""):
        return PATCHED_LACKS.get(extra, "pip install the wheel of scripts/build_wheel.py again, with its requirements")
    return f'pip install "{PLUGIN}[{extra}]"'


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
