# SPDX-License-Identifier: Apache-2.0
"""Typed messages over ZMQ: the codec, the sockets, the wake-up. Nothing on any socket is ever unpickled."""
