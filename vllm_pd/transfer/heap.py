# SPDX-License-Identifier: Apache-2.0
"""The garbage collector of an engine's process."""

import gc


def freeze_heap() -> None:
    """Leave all objects of now out of the garbage collector's work, where vLLM has done so at the end of its own start.
    A full collection, which is cheap then and so comes every few steps, would go through all that was made since."""
    if gc.get_freeze_count():
        gc.collect()
        gc.freeze()
