"""Whole numbers in JSON, as operators and their tools send them."""

from typing import TypeGuard

LARGEST = 2**63 - 1
"""Largest whole number in a body or query: a `long` of Apache Pulsar."""

INT32_MAX = 2**31 - 1
"""Largest number where Pulsar keeps an `int`."""


def is_number(value: object, least: int = -LARGEST - 1, most: int = LARGEST) -> TypeGuard[int]:
    """Whether a member of a body is a whole number in a range; JSON's true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
