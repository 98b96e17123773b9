# SPDX-License-Identifier: Apache-2.0
"""What two releases agree on of a struct to which one of them has added fields."""
from typing import Any

import msgspec


def stable_values(struct: msgspec.Struct) -> list[Any]:
    """The values of its fields, without the empty ones at its end. So a field that a release has added, and that is
    empty, changes no digest of them."""
    values = list(msgspec.structs.astuple(struct))
    while values and not values[-1]:
        values.pop()
    return values
