"""docs/protocol.md is printed from its table, which has a row for all, as the broker's code is."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from broker.wire.handlers.table import handler_table
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.server_error import ServerError
from scripts.print_protocol import (
    ALL,
    COMMAND_KINDS,
    ENUMS,
    KINDS,
    MESSAGES,
    NONE,
    PAGE,
    PASSED,
    REFUSED,
    SENT,
    SERVED,
    SERVED_AND_SENT,
    UNUSED,
    Row,
    commands,
    message_of,
    page,
    row_of,
    table,
)
from tests.support.field_uses import ROOT, Field, uses_in, uses_of_broker

TABLE = table()
ENTRIES = ("MessageMetadata", "SingleMessageMetadata", "EncryptionKeys", "ReplicatedPart")
"""The messages of an entry, which clients send beside a command."""
MARKERS = (
    "MarkersMessageIdData",
    "ClusterMessageId",
    "ReplicatedSubscriptionsSnapshotRequest",
    "ReplicatedSubscriptionsSnapshotResponse",
    "ReplicatedSubscriptionsSnapshot",
    "ReplicatedSubscriptionsUpdate",
)
"""Those of a marker's entry, which brokers of other clusters send."""
DEFINED = re.compile(r"^\s*(?:async )?def (\w+)\(", re.MULTILINE)


def all_rows() -> Iterator[tuple[str, Row]]:
    yield from TABLE.commands.items()
    for name, rows in (*TABLE.messages.items(), *TABLE.enums.items()):
        for field, row in rows.items():
            yield f"{name}.{field}", row


def messages_within(roots: set[str]) -> set[str]:
    """These messages, and those inside them."""
    found: set[str] = set()
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            kinds = [field.message_type for field in MESSAGES[name].fields]
            pending += [kind.name for kind in kinds if kind is not None]
    return found


def messages_of(*kinds: str) -> set[str]:
    """The messages of the commands with which one of these is done, and those inside them."""
    return messages_within(
        {message_of(name) for name, row in TABLE.commands.items() if row.here in kinds}
    )


def fields_where(messages: set[str], holds: Callable[[Row], bool]) -> set[Field]:
    """The fields of messages whose rows have a property."""
    return {
        (name, field.name)
        for name in messages
        for field in MESSAGES[name].fields
        if holds(row_of(TABLE.messages[name], field.name))
    }


RECEIVED = messages_of(SERVED, SERVED_AND_SENT, REFUSED) | set(ENTRIES) | set(MARKERS)
ANSWERS = messages_of(SENT, SERVED_AND_SENT)


def test_the_page_of_the_protocol_is_as_the_table_says() -> None:
    assert PAGE.read_text("utf-8") == page(), "print it: python -m scripts.print_protocol"


def test_each_command_has_a_row() -> None:
    assert set(TABLE.commands) == set(commands())


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (TABLE.messages, {name: [each.name for each in m.fields] for name, m in MESSAGES.items()}),
        (TABLE.enums, {name: [each.name for each in e.values] for name, e in ENUMS.items()}),
    ],
    ids=["fields", "values of enums"],
)
def test_each_name_of_the_protocol_has_a_row_and_each_row_a_name(
    rows: Mapping[str, Mapping[str, Row]], names: Mapping[str, list[str]]
) -> None:
    assert set(rows) == set(names)
    for name, fields in names.items():
        assert set(rows[name]) in (set(fields), {ALL}), name


def test_each_row_says_what_is_done_and_why_nothing_is() -> None:
    for name, row in all_rows():
        kinds = COMMAND_KINDS if name in TABLE.commands else KINDS
        assert row.here in kinds, name
        assert row.note or row.here not in (NONE, PASSED, UNUSED), f"{name} has no reason"
        assert (
            row.error in ENUMS["ServerError"].values_by_name and bool(row.tests)
        ) or row.here != REFUSED, name


@pytest.mark.parametrize("test", sorted({test for _, row in all_rows() for test in row.tests}))
def test_a_test_that_a_row_names_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert name in DEFINED.findall((ROOT / file).read_text("utf-8"))


def test_the_commands_served_are_those_with_a_handler() -> None:
    kinds = (SERVED, SERVED_AND_SENT, REFUSED)
    served = {commands()[name] for name, row in TABLE.commands.items() if row.here in kinds}
    assert served == {*handler_table(), pb.BaseCommand.SEND}


def test_the_commands_sent_are_those_that_code_makes() -> None:
    uses = uses_of_broker()
    made = uses.made | {message for message, _ in uses.written}
    for name, row in TABLE.commands.items():
        if row.here in (SENT, SERVED_AND_SENT):
            assert message_of(name) in made, f"{name} is never sent"
        elif row.here == UNUSED:
            assert message_of(name) not in made, f"{name} is sent"


def test_the_fields_used_are_those_that_code_reads() -> None:
    read = {each for each in uses_of_broker().read if each[0] in RECEIVED}
    used = fields_where(RECEIVED, lambda row: row.is_read)
    assert sorted(used - read) == [], "no code reads these: they are not used"
    assert sorted(read - used) == [], "code reads these: their rows say otherwise"


def test_the_fields_answered_are_those_that_code_sets() -> None:
    written = {each for each in uses_of_broker().written if each[0] in ANSWERS}
    answered = fields_where(ANSWERS, lambda row: row.is_written)
    assert sorted(answered - written) == [], "no code sets these: they are not answered"
    assert sorted(written - answered) == [], "code sets these: their rows say otherwise"


def test_nothing_is_used_that_no_client_sends_and_nothing_answered_that_is_not_sent() -> None:
    everything = set(MESSAGES)
    assert fields_where(everything - RECEIVED, lambda row: row.is_read) == set()
    assert fields_where(everything - ANSWERS, lambda row: row.is_written) == set()


def test_the_errors_answered_are_those_that_code_raises() -> None:
    places = ("broker", "txn", "storage", "security", "magnetar/protocol")
    named = {
        node.attr
        for place in places
        for path in (ROOT / place).rglob("*.py")
        if not path.stem.endswith("_pb2")
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("Error")
    }
    raised = {
        pb.ServerError.Name(each.value)
        for each in ServerError
        if each.name in named or pb.ServerError.Name(each.value) in named
    }
    rows = TABLE.enums["ServerError"]
    assert {name for name, row in rows.items() if row.is_written} == raised


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


CODE = """
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.pulsar_pb2 import BaseCommand, CommandAck as Received, CommandSuccess

class Takes(Protocol):
    consumer_id: int

class Holds:
    def __init__(self, holder: Takes) -> None:
        self.holder = holder
        self.features = pb.FeatureFlags()

def first(ack: Received) -> pb.MessageIdData:
    return ack.message_id[0]

def number(request: Takes) -> int:
    return request.consumer_id

def serve(command: BaseCommand, other: Other) -> pb.CommandSuccess:
    ack = command.ack
    if ack.HasField("txnid_least_bits"):
        return CommandSuccess(request_id=ack.request_id)
    entries = [each.entry_id for each in ack.message_id]
    ledger = first(ack).ledger_id
    other.validation_error
    number(command.flow)
    other.holder.features.supports_auth_refresh
    answer = BaseCommand(type=BaseCommand.ACK_RESPONSE)
    answer.ack_response.message = "no"
"""


def test_uses_are_found_by_the_type_of_what_they_are_used_on() -> None:
    uses = uses_in([ast.parse(CODE)])
    assert {each for each in uses.read if each[0] in ("CommandAck", "CommandFlow")} == {
        ("CommandAck", "message_id"),
        ("CommandAck", "txnid_least_bits"),
        ("CommandAck", "request_id"),
        ("CommandFlow", "consumer_id"),
    }
    assert {name for owner, name in uses.read if owner == "MessageIdData"} == {
        "entry_id",
        "ledger_id",
    }
    assert ("FeatureFlags", "supports_auth_refresh") in uses.read
    assert uses.written >= {("CommandSuccess", "request_id"), ("CommandAckResponse", "message")}
    assert ("CommandAckResponse", "request_id") not in uses.written
