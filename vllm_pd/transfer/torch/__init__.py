# SPDX-License-Identifier: Apache-2.0
"""The transport over `torch.distributed`."""
