# SPDX-License-Identifier: Apache-2.0
"""What is in deploy/ can be run: its commands and settings are parsed by what will read them."""
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from _wheel import project

from tests.manifests import IMAGE
from vllm_pd.errors import ConfigError
from vllm_pd.settings.engine import PDConfig

DEPLOY = project.ROOT / "deploy"
CONTAINERS = sorted((DEPLOY / "containers").glob("*.Containerfile"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSE = DEPLOY / "compose.yaml"
KV_TRANSFER = "--kv-transfer-config="


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, the rest) of a Containerfile."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def container_problems(found: list[tuple[str, str]]) -> list[str]:
    """What is wrong with an image that these instructions make."""
    problems = [f"{image}: no exact tag" for name, image in found if name == "FROM" and not IMAGE.fullmatch(image)]
    users = [user for name, user in found if name == "USER"]
    if not users or users[-1].split(":")[0] in ("0", "root"):
        problems.append("it runs as root")
    for name in ("ENTRYPOINT", "CMD"):
        if [type(json.loads(value)) for key, value in found if key == name] != [list]:
            problems.append(f"{name}: not one list of words")
    return problems


@pytest.mark.parametrize("file", CONTAINERS, ids=lambda file: file.name)
def test_images_have_exact_tags_and_do_not_run_as_root(file):
    found = instructions(file)
    assert container_problems(found) == []
    [pip] = [words for name, words in found if name == "RUN" and "pip install" in words]
    [extras] = re.findall(r'"vllm-pd\[([\w,]+)\]"', pip)
    assert set(extras.split(",")) <= project.extras().keys()


def test_a_bad_image_is_seen():
    bad = [("FROM", "python:latest"), ("USER", "10001"), ("USER", "root"), ("ENTRYPOINT", '["a"]'), ("CMD", '"a"')]
    assert container_problems(bad) == ["python:latest: no exact tag", "it runs as root", "CMD: not one list of words"]


def services() -> dict[str, dict]:
    return yaml.safe_load(COMPOSE.read_text())["services"]


def test_the_composed_services_name_images_of_ours_and_exact_tags():
    tags = set(re.findall(r" -t (\S+)", "".join(file.read_text() for file in CONTAINERS)))
    assert {service["image"] for service in services().values() if "build" in service} == tags
    for name, service in services().items():
        assert IMAGE.fullmatch(service["image"]), name
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        if "build" in service:
            assert (COMPOSE.parent / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        else:
            assert service["user"] != "0"
        assert service.get("depends_on", {}).keys() <= services().keys()


def test_the_composed_router_accepts_its_command(parsed):
    parsed(services()["router"]["command"])


@pytest.mark.parametrize("name, prefills", [("prefill", True), ("decode", False)])
def test_the_composed_engines_have_settings_that_we_accept(name, prefills):
    command = services()[name]["command"]
    assert command[0] == "/model" and "/model:ro" in services()[name]["volumes"][0]
    transfer = json.loads(next(word.removeprefix(KV_TRANSFER) for word in command if word.startswith(KV_TRANSFER)))
    assert transfer["kv_connector"] == "PDConnector"
    config = PDConfig.parse(transfer["kv_role"], transfer["kv_connector_extra_config"])
    assert config.role.prefills is prefills and config.role.decodes is not prefills
    host = config.broker.removeprefix("nats://")
    nats = services()["nats"]["command"]
    assert host == f"{nats[nats.index('--addr') + 1]}:{nats[nats.index('--port') + 1]}" and "--jetstream" in nats
    assert config.broker in services()["router"]["command"]
    seconds = int(services()[name]["stop_grace_period"].removesuffix("s"))
    assert seconds > config.drain_timeout_s + 5


def test_the_composed_ports_are_not_used_twice():
    """All services share the host's network."""
    ports = [word.removeprefix("--port=") for one in services().values() for word in one["command"]
             if word.startswith("--port=")]
    ports += [one["command"][one["command"].index("--port") + 1] for one in services().values()
              if "--port" in one["command"]]
    assert len(ports) == len(set(ports)) == len(services())


def command_of(unit: Path) -> list[str]:
    """What a unit starts."""
    [line] = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_start_commands_that_we_accept(parsed, unit):
    program, *arguments = command_of(unit)
    assert program == "/opt/vllm-pd/bin/vllm-pd" and unit.name == f"vllm-pd-{arguments[0]}.service"
    parsed(arguments)


def test_a_wrong_command_is_refused(parsed):
    with pytest.raises(Exception, match="No such option") as refused:
        parsed(["router", "--brokr", "x"])
    assert type(refused.value).__name__ == "NoSuchOption"
    with pytest.raises(ConfigError, match="--bind"):
        parsed(["broker", "--bind", "tcp://0.0.0.0:5700"])
    with pytest.raises(ConfigError, match="--api-key"):
        parsed(["router", "--host", "0.0.0.0"])


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze missing: apt-get install systemd")
def test_systemd_reads_the_units_and_finds_them_hardened(tmp_path):
    """It verifies no unit whose program is not there, so another program stands in for ours."""
    def verify(*more: str) -> subprocess.CompletedProcess[str]:
        files = []
        for unit in UNITS:
            files.append(tmp_path / unit.name)
            files[-1].write_text(unit.read_text().replace(command_of(unit)[0], shutil.which("true"))
                                 .replace("[Service]", "\n".join(["[Service]", *more])))
        return subprocess.run(["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True,
                              timeout=300)

    done = verify()
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "Nonsense" in verify("Nonsense=yes").stderr
    for unit in UNITS:
        done = subprocess.run(["systemd-analyze", "security", "--offline=true", "--threshold=30",
                               tmp_path / unit.name], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-2000:]
