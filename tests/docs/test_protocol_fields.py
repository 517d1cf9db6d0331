"""The page of fields speaks of every field of its messages, once, and of no other."""

import re
from collections import Counter
from pathlib import Path

import pytest

from magnetar.protocol import pulsar_pb2

PAGE = Path(__file__).parents[2] / "docs" / "protocol-fields.md"
ROW = re.compile(r"^\| (\w+) \| (`.*?) \| (served|refused|no effect)", re.MULTILINE)
MESSAGES = (
    "CommandConnect",
    "CommandLookupTopic",
    "CommandProducer",
    "CommandSend",
    "CommandSubscribe",
    "CommandAck",
    "CommandSeek",
    "CommandGetLastMessageId",
    "CommandConsumerStats",
    "CommandGetTopicsOfNamespace",
    "CommandWatchTopicList",
    "MessageMetadata",
)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_page_lists_each_field_of_a_message_once(message: str) -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    listed = [
        name for of, names, _ in rows if of == message for name in re.findall(r"`(\w+)`", names)
    ]
    fields = pulsar_pb2.DESCRIPTOR.message_types_by_name[message].fields
    assert Counter(listed) == Counter(field.name for field in fields)
