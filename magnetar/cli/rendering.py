"""A message as text or as one line of JSON, safe for a terminal.  Pure."""

import base64
import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from magnetar.consume.message import Message

Rendering = Callable[[Message[bytes]], str]

# Control characters, tab and newline aside, move the cursor or change the terminal's state;
# controls of the writing direction show a line in another order.
_UNSAFE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def as_value(message: Message[bytes]) -> str:
    """The value alone, escaped where it is not plain text."""
    return _text(message.data)


def as_line(message: Message[bytes]) -> str:
    """Time, id, key and value."""
    key = "" if message.key is None else f"{_escaped(message.key)}  "
    return f"{_time(message.publish_time_ms)}  {message.id}  {key}{_text(message.data)}"


def as_json(message: Message[bytes]) -> str:
    """All fields as one line of JSON.  A value that is not UTF-8 is `value_base64`."""
    line = json.dumps(
        {
            "topic": message.topic,
            "id": str(message.id),
            "key": message.key,
            "properties": dict(message.properties),
            "publish_time": _time(message.publish_time_ms),
            "event_time": _time(message.event_time_ms),
            "producer": message.producer_name,
            "sequence_id": message.sequence_id,
            "redelivery_count": message.redelivery_count,
            **_value(message),
        },
        ensure_ascii=False,
    )
    # Each is inside of a string, where JSON allows this escape.
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def is_plain_text(data: bytes) -> bool:
    """Whether a value is UTF-8 without control characters, so that it is printed as it is."""
    try:
        return _UNSAFE.search(data.decode()) is None
    except UnicodeDecodeError:
        return False


def _value(message: Message[bytes]) -> Mapping[str, str | None]:
    if message.is_null:
        return {"value": None}
    try:
        return {"value": message.data.decode()}
    except UnicodeDecodeError:
        return {"value_base64": base64.b64encode(message.data).decode()}


def _text(data: bytes) -> str:
    return _escaped(data.decode("utf-8", "backslashreplace"))


def _escaped(text: str) -> str:
    """The text with `\\x1b` for a control character."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def _time(time_ms: int | None) -> str | None:
    """A time in milliseconds since 1970 as ISO 8601 in UTC."""
    if time_ms is None:
        return None
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
