# SPDX-License-Identifier: Apache-2.0
"""Starting a broker, engines and a router as processes of this machine, and ending them together: `vllm-pd up`."""
