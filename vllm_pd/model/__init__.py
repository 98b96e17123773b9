# SPDX-License-Identifier: Apache-2.0
"""What tells two models or installations apart, and what is refused before a model is loaded."""
