# SPDX-License-Identifier: Apache-2.0
"""Showing an operator what engines, brokers and servers have sent, and what was measured."""


def printable(text: str) -> str:
    """The text on one line, with escapes in place of what can't be printed. Engines and brokers send addresses, names,
    reasons as they like: none may move the operator's cursor, add a line, or change the direction of text."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
                   for char in text)


def three_digits(value: float) -> str:
    """Three digits that count, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
