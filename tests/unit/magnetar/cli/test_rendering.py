"""A message as the command line shows it."""

import json

import pytest

from magnetar.cli.rendering import as_json, as_line, as_value, is_plain_text
from magnetar.consume.message import Entry, Message, RawMessage
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.schema.plain import BYTES


def message(payload: bytes, **metadata: object) -> Message[bytes]:
    told = pb.MessageMetadata(producer_name="p", sequence_id=7, publish_time=1_700_000_000_123)
    for name, value in metadata.items():
        setattr(told, name, value)
    told.properties.add(key="colour", value="grün")
    entry = Entry((3, 4), -1, 2, told, 0)
    received: RawMessage[object] = RawMessage(None, entry, -1, None, payload)
    return Message(received, BYTES, "topic://t/n/x", 5)


def test_json_has_everything() -> None:
    assert json.loads(as_json(message("hallo ü".encode(), partition_key="k", event_time=1))) == {
        "topic": "topic://t/n/x",
        "id": "5:3:4:-1",
        "key": "k",
        "properties": {"colour": "grün"},
        "publish_time": "2023-11-14T22:13:20.123+00:00",
        "event_time": "1970-01-01T00:00:00.001+00:00",
        "producer": "p",
        "sequence_id": 7,
        "redelivery_count": 2,
        "value": "hallo ü",
    }


def test_json_is_one_line_whatever_the_value() -> None:
    assert "\n" not in as_json(message(b"two\nlines"))


@pytest.mark.parametrize(
    ("shown", "has", "lacks"),
    [
        (message(b"\xff\x00"), ("value_base64", "/wA="), "value"),
        (message(b"", null_value=True), ("value", None), "value_base64"),
    ],
)
def test_binary_value_is_rendered_differently_from_text(
    shown: Message[bytes], has: tuple[str, object], lacks: str
) -> None:
    told = json.loads(as_json(shown))
    assert told[has[0]] == has[1]
    assert lacks not in told


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("ü\ttwo\nlines".encode(), "ü\ttwo\nlines"),
        (b"a\xff", r"a\xff"),
        (b"\x1b[2Jgone\r\x07\x7f", r"\x1b[2Jgone\r\x07\x7f"),
        ("\x9b31m".encode(), r"\x9b31m"),
        ("\u202edrow".encode(), r"\u202edrow"),
        (b"\x00\xff", r"\x00\xff"),
    ],
)
def test_value_has_no_control_characters(data: bytes, text: str) -> None:
    assert as_value(message(data)) == text
    line = as_line(message(b"", partition_key=data.decode("latin-1")))
    assert line.replace("\t", "").replace("\n", "").isprintable()
    assert is_plain_text(data) == (text.encode() == data)


def test_json_has_no_control_characters() -> None:
    line = as_json(message("\x9b31m\x7f\u202e".encode()))
    assert line.isprintable()
    assert json.loads(line)["value"] == "\x9b31m\x7f\u202e"


@pytest.mark.parametrize(("key", "shown"), [({}, ""), ({"partition_key": "k"}, "k  ")])
def test_a_line_has_time_id_key_and_value(key: dict[str, str], shown: str) -> None:
    line = as_line(message(b"v", **key))
    assert line == f"2023-11-14T22:13:20.123+00:00  5:3:4:-1  {shown}v"
