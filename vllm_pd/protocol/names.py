# SPDX-License-Identifier: Apache-2.0
"""What a transport calls an engine: its incarnation, and the generation of its transfer agents (`generations`).

What was granted in one generation can't be written in another, for each has a name of its own.
"""

_SEPARATOR = "~"  # an incarnation is made of letters and digits


def generation_name(incarnation: str, generation: int) -> str:
    """The transport name of this engine in that generation; in the first one, 0, it is the incarnation."""
    return f"{incarnation}{_SEPARATOR}{generation}" if generation else incarnation


def incarnation_of(name: str) -> str:
    """The engine that a transport calls so."""
    return name.partition(_SEPARATOR)[0]
