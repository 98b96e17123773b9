# SPDX-License-Identifier: Apache-2.0
"""Moving KV blocks between engines: where they lie, which go where, and the transports that move them."""
