# SPDX-License-Identifier: Apache-2.0
"""The one error of these tools."""


class Refusal(Exception):
    """Something does not hold, and nothing has been written. The text says what was expected and what found."""


def refuse_all(heading: str, problems: "list[str]") -> None:
    """Raise one Refusal that lists `problems`; do nothing if there are none."""
    if problems:
        raise Refusal(heading + "".join(f"\n  - {problem}" for problem in problems))
