# SPDX-License-Identifier: Apache-2.0
"""Choices of an engine, pure: whether a prompt goes to a peer, in which order jobs are computed, how long what will
take."""
