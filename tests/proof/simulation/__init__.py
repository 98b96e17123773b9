# SPDX-License-Identifier: Apache-2.0
"""A whole fleet in one thread, under a virtual clock and seeded faults."""
