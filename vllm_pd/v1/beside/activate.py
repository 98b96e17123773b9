# SPDX-License-Identifier: Apache-2.0
"""What V1 imports for PDConnector where it was named beside OffloadingConnector: the plugin names this module in
`kv_connector_module_path`, and V1 takes the class of that name from here. All else is as in `vllm_pd.v1.activate`.
"""
import vllm_pd.v1.activate  # noqa: F401  it changes vLLM's classes
from vllm_pd.v1.beside.connector import PDConnectorBeside as PDConnector  # noqa: F401
