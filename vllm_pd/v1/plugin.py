# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads in each of its processes: the entry point `vllm_pd` in `vllm.general_plugins`.

It registers our connector's name and nothing else. No class of vLLM is changed and no thread is started before a
configuration names PDConnector; vLLM then imports `vllm_pd.v1.activate`.
"""
from __future__ import annotations

from vllm_pd.installation import check_installation

CONNECTOR = "PDConnector"
MODULE = "vllm_pd.v1.activate"


def register() -> None:
    """Make the connector known by its name. May be called again. Raises ConfigError if the patched vLLM of this project
    is installed, too."""
    check_installation()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
