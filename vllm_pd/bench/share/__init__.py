# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench share`: how much of a traffic repeats, and what caches and a router could save of it."""
