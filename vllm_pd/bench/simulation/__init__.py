# SPDX-License-Identifier: Apache-2.0
"""The simulation behind `vllm-pd bench router --hit-rate`: which prefix hits routing policies get out of a trace."""
