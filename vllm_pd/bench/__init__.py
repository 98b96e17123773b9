# SPDX-License-Identifier: Apache-2.0
"""What `vllm-pd bench router` measures with: engines that only pretend, a load generator, and the reports."""
