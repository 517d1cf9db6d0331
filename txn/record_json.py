"""Pure: helpers to encode and decode the JSON of transactions' records."""

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import TypeVar

from txn.errors import CorruptTransactionRecord

_T = TypeVar("_T")
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


def json_bytes(members: Mapping[str, object]) -> bytes:
    """A JSON object without spaces, its members in this order."""
    return _ENCODE(members).encode()


def decode_members(value: bytes) -> Mapping[str, object]:
    """The members of a JSON object.  Raises ValueError."""
    members = json.loads(value, parse_float=Decimal)
    if not isinstance(members, dict):
        raise ValueError("it is no JSON object")
    return members


def decode_or_raise(key: str, decode: Callable[[], _T]) -> _T:
    """Decode the record at `key`; any error becomes a `CorruptTransactionRecord` that names it."""
    try:
        return decode()
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptTransactionRecord(
            f"The record {key} cannot be read ({error}): restore the metadata store."
        ) from error


def integer(value: object) -> int:
    """A whole number.  Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is no whole number")
    return value


def text(value: object) -> str:
    """A text.  Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value
