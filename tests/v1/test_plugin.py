# SPDX-License-Identifier: Apache-2.0
"""B91: without PDConnector an installed vllm-pd changes nothing. Run in the V1 environment."""
import json
import os
import subprocess
import sys

import pytest
from _bench_v1.steps import untouched

SNAPSHOT = """
import json, sys, threading, types
KINDS = (types.FunctionType, classmethod, staticmethod, property, type)
def attributes():
    classes = {one for name, module in list(sys.modules.items()) if name.split(".")[0] == "vllm"
               for one in list(vars(module).values()) if isinstance(one, type)}
    return {one: {name: value for name, value in vars(one).items() if isinstance(value, KINDS)} for one in classes
            if str(one.__module__).split(".")[0] == "vllm"}
import vllm.config, vllm.engine.arg_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.core import DPEngineCoreProc
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.worker.worker_base import WorkerBase
first, threads, modules = attributes(), set(threading.enumerate()), set(sys.modules)
ACTION
last = attributes()
print(json.dumps({"changed": sorted(f"{one.__qualname__}.{name}" for one in first
                                    for name in first[one].keys() | last[one].keys()
                                    if first[one].get(name) is not last[one].get(name)),
                  "classes": len(first), "threads": [one.name for one in set(threading.enumerate()) - threads],
                  "modules": sorted(set(sys.modules) - modules)}))
"""
SERVER = """
import sys
sys.argv = WORDS
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
made = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", *sys.argv[2:]])).create_engine_config()
print(made.scheduler_config.scheduler_cls, made.scheduler_config.disable_hybrid_kv_cache_manager)
"""
LOAD = "from vllm.plugins import load_general_plugins\nload_general_plugins()"


def snapshot(action: str) -> dict[str, list[str]]:
    """What `action` changes in a process that has imported vLLM's engine: attributes of classes, threads, modules."""
    done = subprocess.run([sys.executable, "-c", SNAPSHOT.replace("ACTION", action)], capture_output=True,
                          text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_b91_loading_the_plugin_changes_no_class_and_starts_nothing():
    """B91"""
    found = snapshot(LOAD + """
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
assert "PDConnector" in KVConnectorFactory._registry
from vllm_pd.v1.plugin import register
register()  # again: plugins may be loaded several times
""")
    assert found["changed"] == [] and found["threads"] == [] and found["classes"] > 500
    ours = [name for name in found["modules"] if name.startswith("vllm_pd")]
    assert ours == ["vllm_pd", "vllm_pd.errors", "vllm_pd.extras", "vllm_pd.model", "vllm_pd.model.installation",
                    "vllm_pd.model.offloading", "vllm_pd.v1", "vllm_pd.v1.plugin"]
    about = {"wrapped": [], "threads": [], "plugin_modules": ours}
    assert untouched(about, about), "and scripts/lab/bench_v1.py takes it for that"
    theirs = [name for name in found["modules"] if name.split(".")[0] in ("vllm", "zmq", "nixl", "msgspec", "torch")]
    assert theirs == [] or all("lora" in name for name in theirs), theirs  # vLLM's own plugins are loaded with ours


def test_b91_the_snapshot_sees_a_wrapped_method():
    """The guard above, fed a wrap."""
    found = snapshot(LOAD + """
from vllm.config import VllmConfig
from vllm_pd.v1.claim import claim_configurations
claim_configurations()
""")
    assert found["changed"] == ["DPEngineCoreProc._init_data_parallel", "VllmConfig._verify_kv_transfer_compat"]


def test_b114_a_server_s_configuration_is_ours_with_the_flag_in_a_file(tmp_path):
    """B114: with the rest of it, for `--config`."""
    file = tmp_path / "options.yaml"
    file.write_text("disable-hybrid-kv-cache-manager: true\nmax-model-len: 512\nkv-transfer-config:\n"
                    "  kv_connector: PDConnector\n  kv_role: kv_consumer\n"
                    "  kv_connector_extra_config: {broker: 'tcp://127.0.0.1:5700'}\n", encoding="utf-8")
    words = ["vllm", "serve", os.environ["VLLM_PD_TINY_MODEL"], "--config", str(file)]
    done = subprocess.run([sys.executable, "-c", SERVER.replace("WORDS", repr(words))], capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "vllm_pd.v1.scheduler.make_scheduler True"


@pytest.mark.parametrize("flag", ["--disable-hybrid-kv-cache-manager", "--no-disable-hybrid-kv-cache-manager"])
def test_b114_a_server_s_configuration_is_ours_with_either_form_of_the_flag(flag):
    """B114: as `vllm serve` makes it, in a process that knows the plugin by its entry point alone."""
    words = ["vllm", "serve", os.environ["VLLM_PD_TINY_MODEL"], flag, "--max-model-len", "512", "--kv-transfer-config",
             '{"kv_connector": "PDConnector", "kv_role": "kv_consumer", '
             '"kv_connector_extra_config": {"broker": "tcp://127.0.0.1:5700"}}']
    done = subprocess.run([sys.executable, "-c", SERVER.replace("WORDS", repr(words))], capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == f"vllm_pd.v1.scheduler.make_scheduler {flag[2:4] != 'no'}"
