# SPDX-License-Identifier: Apache-2.0
"""What an operator's commands ask and tell running engines and brokers, from outside of them."""
