# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible front: each request goes to the engine that holds most of its prompt and has least to do."""
