# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads in each of its processes: the entry point `vllm_pd` in `vllm.general_plugins`.

It registers our connectors' names and nothing else. No class of vLLM is changed and no thread is started before a
configuration names PDConnector; vLLM then imports `vllm_pd.v1.activate`. It would not in time where the command line
has a flag for the hybrid KV cache manager; there the plugin does. It also imports what the step sync needs where the
command line asks for that.
"""
from __future__ import annotations

import importlib

from vllm_pd.model.installation import check_installation
from vllm_pd.model.offloading import check_command_line, hybrid_flag, is_named

CONNECTOR = "PDConnector"
STEP_SYNC, STEP_SYNC_MODULE = "vllm_pd_step_sync", "vllm_pd.v1.lockstep.activate"  # the key in additional_config
MODULES = {CONNECTOR: "vllm_pd.v1.activate", "PDStoreConnector": "vllm_pd.v1.store.activate"}


def register() -> None:
    """Make the connectors known by their names. May be called again. Raises ConfigError if the patched vLLM of this
    project is installed, too, and for a command line with which vLLM would replace one of them, or not come to it."""
    check_installation()
    check_command_line(MODULES)
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    for name, module in MODULES.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
    if hybrid_flag() is not None and is_named(CONNECTOR):
        importlib.import_module(MODULES[CONNECTOR])
    if is_named(STEP_SYNC):
        importlib.import_module(STEP_SYNC_MODULE)
