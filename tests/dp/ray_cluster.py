# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster for one group, on this machine only, that has GPUs in vLLM's eyes.

Ray may be in a folder of its own, named by VLLM_PD_RAY, because vLLM imports it wherever it finds it, and that takes
time.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

STORE_BYTES = 80 << 20  # nothing is put there; Ray refuses less


def find() -> None:
    """Makes Ray importable in this process and in Ray's own. To be called before vLLM is imported."""
    folder = os.environ.get("VLLM_PD_RAY")
    if folder:
        sys.path.append(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))


@contextlib.contextmanager
def cluster(ranks: int) -> Iterator[None]:
    """A cluster with room for `ranks` actors. At the end they are gone, with all files that Ray has written."""
    # vLLM's actors delete the variable in which Ray names their GPUs; without GPUs Ray sets it only with the first one.
    os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1", "RAY_USAGE_STATS_ENABLED": "0",
                   "RAY_AUTH_MODE": "disabled"}
    import ray
    import ray.util.state

    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # a short path, because it holds sockets
    try:
        ray.init(num_gpus=ranks, num_cpus=2 * ranks, include_dashboard=False, object_store_memory=STORE_BYTES,
                 _temp_dir=folder)
        # vLLM asks Ray's dashboard for the nodes, a server with a dozen dependencies of its own.
        ray.util.state.list_nodes = lambda: [
            SimpleNamespace(node_id=node["NodeID"], node_ip=node["NodeManagerAddress"]) for node in ray.nodes()
        ]
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
