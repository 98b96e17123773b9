# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible router: a request goes to the engine that holds most of its prompt and has the least load."""
