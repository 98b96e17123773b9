# SPDX-License-Identifier: Apache-2.0
"""What a user sets, checked before anything starts."""
