# SPDX-License-Identifier: Apache-2.0
"""A model whose forward passes must meet those of all ranks of its data-parallel group, and two fleets that serve it:
one by waves, one with the step sync."""
