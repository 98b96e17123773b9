# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster for one group, on this machine alone, that vLLM takes for one with GPUs.

Ray may be in a folder of its own, named by VLLM_PD_RAY, so that no other process pays for importing it: vLLM does so
wherever it finds it.
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
    """Let this process, and Ray's own, import Ray. Before vLLM is imported."""
    folder = os.environ.get("VLLM_PD_RAY")
    if folder:
        sys.path.append(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))


@contextlib.contextmanager
def cluster(ranks: int) -> Iterator[None]:
    """Begin it with room for `ranks` actors; at the end they are gone with all that Ray has written."""
    # The first: vLLM's actors take away what Ray says of GPUs, which it no longer does by itself where there are none.
    os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1", "RAY_USAGE_STATS_ENABLED": "0",
                   "RAY_AUTH_MODE": "disabled"}  # fmt: skip
    import ray
    import ray.util.state

    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short, for there are sockets in it
    try:
        ray.init(num_gpus=ranks, num_cpus=2 * ranks, include_dashboard=False, object_store_memory=STORE_BYTES,
                 _temp_dir=folder)  # fmt: skip
        # vLLM asks Ray's dashboard for the nodes, a server with a dozen requirements of its own.
        ray.util.state.list_nodes = lambda: [
            SimpleNamespace(node_id=node["NodeID"], node_ip=node["NodeManagerAddress"]) for node in ray.nodes()
        ]
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
