# SPDX-License-Identifier: Apache-2.0
"""The protocol's small worlds, and a search through all of their states."""
