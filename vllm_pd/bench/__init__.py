# SPDX-License-Identifier: Apache-2.0
"""What an operator measures his own fleet with: the commands `vllm-pd bench ...`.

All of them share one load generator (`load`), one launcher of servers (`servers`) and one report (`report`). What
proves the design to its developers lives in `scripts/`.
"""
