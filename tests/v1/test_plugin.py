# SPDX-License-Identifier: Apache-2.0
"""B91: without PDConnector an installed vllm-pd changes nothing. Run in the V1 environment."""
import json
import subprocess
import sys

SNAPSHOT = """
import gc, json, sys, threading, types
{before}
def classes():
    return [one for one in gc.get_objects() if isinstance(one, type) and one.__module__.split(".")[0] == "vllm"]
def attributes():
    return {{(one.__module__, one.__qualname__): {{name: id(value) for name, value in vars(one).items()
                                                 if isinstance(value, (types.FunctionType, classmethod, staticmethod,
                                                                       property, type))}}
            for one in classes()}}
import vllm.config, vllm.engine.arg_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.core import DPEngineCoreProc
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.worker.worker_base import WorkerBase
kept, first, threads, modules = classes(), attributes(), set(threading.enumerate()), set(sys.modules)
{action}
last = attributes()
print(json.dumps({{"changed": sorted(str((key, name)) for key in first for name in first[key].keys() | last[key].keys()
                                    if first[key].get(name) != last[key].get(name)),
                  "threads": [one.name for one in set(threading.enumerate()) - threads],
                  "modules": sorted(set(sys.modules) - modules)}}))
"""
LOAD = "from vllm.plugins import load_general_plugins\nload_general_plugins()"


def snapshot(action: str) -> dict[str, list[str]]:
    """What `action` changes in a process that has imported vLLM's engine: attributes of classes, threads, modules."""
    done = subprocess.run([sys.executable, "-c", SNAPSHOT.format(before="", action=action)], capture_output=True,
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
    assert found["changed"] == [] and found["threads"] == []
    ours = [name for name in found["modules"] if name.startswith("vllm_pd")]
    assert ours == ["vllm_pd", "vllm_pd.errors", "vllm_pd.installation", "vllm_pd.v1", "vllm_pd.v1.plugin"]
    theirs = [name for name in found["modules"] if name.split(".")[0] in ("vllm", "zmq", "nixl", "msgspec", "torch")]
    assert theirs == [] or all("lora" in name for name in theirs), theirs  # vLLM's own plugins are loaded with ours


def test_b91_the_snapshot_sees_a_wrapped_method():
    """The guard above, fed a wrap."""
    found = snapshot(LOAD + """
from vllm.config import VllmConfig
from vllm_pd.v1.claim import claim_configurations
claim_configurations()
""")
    assert found["changed"] == ["(('vllm.config.vllm', 'VllmConfig'), '_verify_kv_transfer_compat')"]
