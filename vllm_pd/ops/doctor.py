# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd doctor`: checks what this host can be, that its installation is complete and that engines fit each other.

Each check gives one or more findings; one that is not ok has a cure. Checks change nothing. Those that load native
libraries do so in a process of their own, because a wrong library may end the process instead of raising.
"""

import base64
import contextlib
import csv
import hashlib
import json
import os
import runpy
import socket
from collections.abc import Iterator, Sequence
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from vllm_pd.broker.members import Access, MemberList, list_members
from vllm_pd.errors import ConfigError, MissingPackage, OtherProtocol, PDError
from vllm_pd.extras import PLUGIN, install_command, missing_modules
from vllm_pd.model.installation import World, check_installation, find_installation
from vllm_pd.ops.doctor_gpu import check_gpu
from vllm_pd.ops.finding import Finding, run_native
from vllm_pd.ops.kept import check_kept
from vllm_pd.ops.kinds import check_kinds, complete_extras
from vllm_pd.ops.launch.plan import engines_run_on_cpu
from vllm_pd.ops.listening import check_listening
from vllm_pd.ops.paths import EngineCalls, check_paths
from vllm_pd.peer.liveness.process import is_visible
from vllm_pd.rpc.addresses import parse_endpoint
from vllm_pd.rpc.nats_address import NatsAddress
from vllm_pd.rpc.ports import require_free
from vllm_pd.v1.required import REQUIRED, check_installed

NO_WORLD_CURE = ("pip install a wheel of scripts/build_wheel.py for engine V0, or vllm-pd for a broker, a router and, "
                 "beside a stock vllm, engine V1 (docs/v1.md); or enter the environment of either: `. scripts/env.sh`")
ENTRY_POINT = "vllm_pd"  # of the plugin
PLUGIN_CURE = ("pip install a supported vllm and vllm-pd again (docs/v1.md), or enter the environment: "
               "`VLLM_PD_ENGINE=v1 . scripts/env.sh`")
INSTALL_CURE = "enter the environment (`. scripts/env.sh`), or pip install the wheel of scripts/build_wheel.py again"
LISTENS_TIMEOUT_S = 2.0
LOAD_STOCK = "import vllm.config; from vllm.platforms import current_platform as p; print('vllm on', p.device_type)"
LOAD_EXTENSION = "import torch, vllm._C; print('torch', torch.__version__)"
CREATE_AGENT = """
from importlib.metadata import version
from vllm_pd.transfer.nixl.agent import NixlAgent
NixlAgent("vllm-pd-doctor", False)
print("nixl", version("nixl"), "with UCX")
"""


def examine_paths(engine: str, broker: str | None, access: Access) -> list[Finding]:
    """The broker and its engines, and the paths between that engine and its peers. Nothing of this machine. Raises
    ConfigError where there is no broker, or no such engine."""
    if broker is None:
        raise ConfigError("--from", engine, "give --broker, where it is registered")
    findings = [*check_peers(broker, access)]
    return [*findings, *check_paths(engine, broker, access)] if findings[0].ok else findings


def examine(broker: str | None, ports: Sequence[int], access: Access | None = None) -> list[Finding]:
    """All findings, in the order in which one would repair them. A broker and ports are checked only where given."""
    findings = [*check_world()]
    world = find_installation().world
    if world is World.PATCHED:
        findings += [*check_pin(), *check_series(), *check_requirements("vllm"), *check_wheel(LOAD_EXTENSION)]
    elif world is World.PLUGIN:
        findings += [*check_plugin(), *check_names(), *check_requirements(PLUGIN), *check_wheel(LOAD_STOCK)]
    elif world is World.ALONE:
        findings += [*check_plugin(), *check_requirements(PLUGIN)]
    if findings[0].ok:
        findings += check_kinds(world)
    if world is not World.ALONE:
        findings += check_nixl()
    if torch_cuda() is not None and not engines_run_on_cpu():
        findings += check_gpu(world is World.PLUGIN)
    findings += [finding for port in ports for finding in check_port(port)]
    if broker is not None:
        findings += check_peers(broker, access, here=True)
    return findings


def check_world() -> Iterator[Finding]:
    """Which of the two distributions is installed, and only one of them."""
    found = find_installation()
    try:
        check_installation()
    except ConfigError as error:
        yield Finding("world", str(error), error.cure)
        return
    cure = NO_WORLD_CURE if found.world is World.NONE else ""
    yield Finding("world", found.world.value, cure)


def check_plugin() -> Iterator[Finding]:
    """The plugin is whole; where there is a vLLM it loads the plugin, and its command runs."""
    found = find_installation()
    distribution = metadata.distribution(PLUGIN)
    ours = [file.as_posix() for file in distribution.files or () if file.suffix == ".py"]
    changed = changed_files(distribution, ours)
    allowed = os.environ.get("VLLM_PLUGINS")
    if changed:
        yield Finding("plugin", f"not as in the wheel: {', '.join(changed)}", PLUGIN_CURE)
    elif found.vllm is None:
        yield Finding("plugin", f"{PLUGIN} {found.plugin}")
    elif allowed is not None and ENTRY_POINT not in allowed.split(","):
        yield Finding("plugin", f"VLLM_PLUGINS={allowed!r} excludes it", f"add {ENTRY_POINT} to it, or unset it")
    elif found.distribution != "vllm":
        yield Finding("plugin", f"{found.distribution} {found.vllm} leaves out the metadata of vllm: the command vllm "
                      "ends with PackageNotFoundError", 'add it: docs/v1.md, "On the CPU"')
    else:
        yield Finding("plugin", f"{PLUGIN} {found.plugin} for vllm {found.vllm}")


def check_names() -> Iterator[Finding]:
    """The stock vLLM has the names that the V1 binding stands on."""
    if find_spec("vllm") is None:
        return
    try:
        check_installed()
    except ConfigError as error:
        yield Finding("names", str(error), PLUGIN_CURE)
    else:
        yield Finding("names", f"vllm has all {sum(map(len, REQUIRED.values()))} names that the binding stands on")


def check_pin() -> Iterator[Finding]:
    """The installed vllm is a wheel of this project, and vllm_pd is of the same wheel."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        yield Finding("pin", "no vllm is installed", INSTALL_CURE)
        return
    if "+pd" not in version:
        yield Finding("pin", f"vllm {version} is not a patched one", INSTALL_CURE)
        return
    built = build_file()
    if built is None:
        yield Finding("pin", f"vllm {version} has no build file beside vllm_pd", INSTALL_CURE)
    elif built["version"] != version:
        yield Finding("pin", f"vllm {version} is installed, vllm_pd is from {built['version']}", INSTALL_CURE)
    else:
        pin = built["upstream"]
        yield Finding("pin", f"vllm {version}, from {pin['version']} ({pin['commit'][:12]})")


def check_series() -> Iterator[Finding]:
    """The files that the patches change are as in the wheel."""
    built = build_file()
    if built is None:
        yield Finding("series", "unknown: there is no build file", INSTALL_CURE)
        return
    changed = changed_files(metadata.distribution("vllm"), built["touched"])
    if changed:
        yield Finding("series", f"not as in the wheel: {', '.join(changed)}", INSTALL_CURE)
    else:
        count, files = len(built["series"]), len(built["touched"])
        yield Finding("series", f"{count} patches over {files} files, all as in the wheel")


def check_requirements(distribution: str) -> Iterator[Finding]:
    """The requirements of our wheel, which is that distribution, are installed in versions that fit. Those of an extra
    count where it is installed."""
    try:
        wanted = [Requirement(text) for text in metadata.requires(distribution) or ()]
    except metadata.PackageNotFoundError:
        return
    extras = ("", *(complete_extras() if distribution == PLUGIN else ()))
    wanted = [each for each in wanted  # the others are for an extra, another Python, another system
              if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras)]
    wrong = []
    for requirement in wanted:
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} {found} is installed, {requirement.specifier} is needed")
    if wrong:
        yield Finding("packages", "; ".join(wrong), INSTALL_CURE)
    else:
        yield Finding("packages", f"all {len(wanted)} requirements are met")


def check_wheel(program: str) -> Iterator[Finding]:
    """vLLM loads with the installed torch."""
    if find_spec("vllm") is None:
        yield Finding("wheel", "vllm cannot be imported", INSTALL_CURE)
        return
    yield run_native("wheel", program, "the wheel does not fit this machine or this torch: build one here with "
                     "scripts/build_wheel.py, or for engine V1 see docs/v1.md")


def check_nixl() -> Iterator[Finding]:
    """A NIXL agent with the UCX back end can be created."""
    missing = missing_modules("engine") if find_installation().world is World.PLUGIN else []
    if missing:
        yield Finding("nixl", f"not installed: {', '.join(missing)}", install_command("engine"))
        return
    yield run_native("nixl", CREATE_AGENT, nixl_cure(torch_cuda()))


def nixl_cure(cuda: str | None) -> str:
    """How to install NIXL beside a torch that was built with this version of CUDA."""
    major = (cuda or "").partition(".")[0]
    if major in ("12", "13"):
        return f"pip install --no-deps nixl==1.5.1 nixl-cu{major}==1.5.1"
    return "pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1; beside CUDA 13, nixl-cu13 instead of nixl-cu12"


def torch_cuda() -> str | None:
    """`torch.version.cuda` of the installed torch, which is not loaded for it. None: without torch or without CUDA."""
    spec = find_spec("torch")
    file = None if spec is None or spec.origin is None else Path(spec.origin).with_name("version.py")
    return runpy.run_path(str(file)).get("cuda") if file is not None and file.is_file() else None


def check_port(port: int) -> Iterator[Finding]:
    """A server could listen at this port of the loopback."""
    if not 1 <= port <= 65535:
        yield Finding("port", f"{port} is no port", "write 1 to 65535")
        return
    try:
        require_free("port", "127.0.0.1", [port])
    except ConfigError as error:
        yield Finding("port", f"{port} can't be used", error.cure + " (--port, --broker-port or --bind)")
    else:
        yield Finding("port", f"{port} is free")


def check_peers(broker: str, access: Access | None = None, here: bool = False) -> Iterator[Finding]:
    """The broker answers, any server of a broker on NATS may go, and its engines fit each other. `here`: and those of
    this host listen where they should."""
    access = access or Access()
    try:
        listed = list_members(broker, access=access)
    except ConfigError as error:
        yield Finding("broker", f"{error.key}={error.value} can't be used", error.cure)
        return
    except MissingPackage as error:
        yield Finding("broker", f"{broker} can't be asked, not installed: {', '.join(error.modules)}", error.cure)
        return
    except PDError as error:
        yield Finding("broker", str(error), _broker_cure(error, broker, access))
        return
    yield Finding("broker", f"{broker} answers; {listed.queue_length} jobs wait")
    if NatsAddress.is_url(broker):
        yield from check_kept(broker, access)
    yield from judge_peers(listed)
    if here:
        with EngineCalls(access, filter(is_visible, listed.members)) as calls:
            yield from check_listening(listed.members, calls.ask)


def _broker_cure(error: PDError, broker: str, access: Access) -> str:
    """What to do about a broker that can't be asked."""
    if isinstance(error, OtherProtocol):
        return "install one release of vllm-pd here and at the broker, and start the broker again"
    if NatsAddress.is_url(broker):
        return ("start a nats-server with JetStream there, and an engine; where they run, give --nats-credentials, "
                "--nats-ca and --nats-prefix as the engines have them")
    host, port = parse_endpoint("--broker", broker, keyed=access.keys is not None)
    with contextlib.suppress(OSError), socket.create_connection((host, port), LISTENS_TIMEOUT_S):
        return ("something listens there: if it is a broker, give --keys as it has it; if it is stopped, or no broker, "
                "end it and start a broker")
    return f"start it: vllm-pd broker --bind {broker}{'' if access.keys is None else f' --keys {access.keys}'}"


def judge_peers(listed: MemberList) -> Iterator[Finding]:
    """Each decode engine with each prefill engine: they fit, or the first value in which they differ, or the one can't
    be reached by the other."""
    decodes = [member for member in listed.members if member.role.decodes]
    prefills = [member for member in listed.members if member.role.prefills]
    for name, found, kv_role in (("decode", decodes, "kv_consumer"), ("prefill", prefills, "kv_producer")):
        if not found:
            yield Finding("peers", f"no {name} engine is there",
                          f'start one with "kv_role": "{kv_role}" and this broker')
    for decode in decodes:
        for prefill in prefills:
            if prefill is decode:
                continue
            pair = f"decode {decode.address} and prefill {prefill.address}"
            difference = decode.fingerprint.first_difference(prefill.fingerprint)
            if difference is not None:
                key, ours, theirs = difference
                yield Finding("peers", f"{pair} differ in {key}: {ours!r} and {theirs!r}",
                              f"start both with the same {key}; until then the decode engine prefills by itself")
            elif decode.incarnation in prefill.unreached:
                yield Finding("peers", f"{pair} fit each other, but the prefill engine gets no answer from the other",
                              f"let its machine connect to {decode.address} by TCP: firewalls between the two, routes, "
                              "keys; nobody need be started again")
            else:
                yield Finding("peers", f"{pair} fit each other")


def build_file() -> dict | None:
    """What the wheel was built from; None where vllm_pd does not come from a wheel."""
    file = resources.files("vllm_pd") / "_build.json"
    return json.loads(file.read_text()) if file.is_file() else None


def changed_files(distribution: metadata.Distribution, names: Sequence[str]) -> list[str]:
    """The files of `names` that are missing or differ from the distribution's RECORD."""
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    recorded = {row[0]: row[1] for row in rows if len(row) > 1}
    return [name for name in names if recorded.get(name) != _record_digest(Path(distribution.locate_file(name)))]


def _record_digest(path: Path) -> str | None:
    if not path.is_file():
        return None
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
