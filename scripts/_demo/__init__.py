# SPDX-License-Identifier: Apache-2.0
"""What `scripts/demo.sh` runs: a real model over two engines, checked token by token against PD off."""
