# SPDX-License-Identifier: Apache-2.0
"""What speaks for an engine: the peer protocol, the thread that owns the sockets, and their life cycle (`agent`)."""
