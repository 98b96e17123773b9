# SPDX-License-Identifier: Apache-2.0
"""What speaks for an engine: its door (`agent`), the thread (`thread`) and what it decides by (`sides`)."""
