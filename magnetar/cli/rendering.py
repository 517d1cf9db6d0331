"""A message as text or as one line of JSON.  Pure."""

import base64
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from magnetar.consume.message import Message

Rendering = Callable[[Message[bytes]], str]


def as_value(message: Message[bytes]) -> str:
    """The value alone."""
    return _text(message.data)


def as_line(message: Message[bytes]) -> str:
    """Time, id, key and value."""
    key = "" if message.key is None else f"{message.key}  "
    return f"{_time(message.publish_time_ms)}  {message.id}  {key}{_text(message.data)}"


def as_json(message: Message[bytes]) -> str:
    """All fields as one line of JSON.  A value that is not UTF-8 is `value_base64`."""
    return json.dumps(
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


def _value(message: Message[bytes]) -> Mapping[str, str | None]:
    if message.is_null:
        return {"value": None}
    try:
        return {"value": message.data.decode()}
    except UnicodeDecodeError:
        return {"value_base64": base64.b64encode(message.data).decode()}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _time(time_ms: int | None) -> str | None:
    """A time in milliseconds since 1970 as ISO 8601 in UTC."""
    if time_ms is None:
        return None
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
