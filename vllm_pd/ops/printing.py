# SPDX-License-Identifier: Apache-2.0
"""Showing an operator what engines, brokers and servers have sent."""


def printable(text: str) -> str:
    """The text on one line, with escapes in place of what can't be printed. Engines and brokers send addresses, names,
    reasons as they like: none may move the operator's cursor, add a line, or change the direction of text."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
                   for char in text)
