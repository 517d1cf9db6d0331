"""Print `docs/protocol.md`: each command and field of the binary protocol, and its use here.

The page is made from `tests/docs/protocol.json`, which has a row for each command, each field of a
message and each value of an enum; `*` in the place of a field stands for all of them.  Types and
numbers come from the compiled protocol.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE

ROOT: Final = Path(__file__).parent.parent
TABLE: Final = ROOT / "tests" / "docs" / "protocol.json"
PAGE: Final = ROOT / "docs" / "protocol.md"
ALL: Final = "*"
"""In the place of a name: every field or value."""
USED: Final = "used"
ANSWERED: Final = "answered"
BOTH: Final = "used, answered"
PASSED: Final = "passed through"
REFUSED: Final = "refused"
NONE: Final = "no meaning"
KINDS: Final = (USED, ANSWERED, BOTH, PASSED, REFUSED, NONE)
"""The ways to treat a field or value."""
SERVED: Final = "served"
SENT: Final = "sent"
SERVED_AND_SENT: Final = "served, sent"
UNUSED: Final = "unused"
COMMAND_KINDS: Final = (SERVED, SENT, SERVED_AND_SENT, REFUSED, UNUSED)
"""The ways to treat a command."""
_MESSAGES: Final = pb.DESCRIPTOR.message_types_by_name
_ENUMS: Final = pb.DESCRIPTOR.enum_types_by_name
MESSAGES: Final[Mapping[str, Descriptor]] = {
    name: each for name, each in _MESSAGES.items() if name != "BaseCommand"
}
"""All messages; of BaseCommand there are rows by command."""
ENUMS: Final[Mapping[str, EnumDescriptor]] = dict(_ENUMS) | {
    f"{name}.{enum}": found
    for name, each in MESSAGES.items()
    for enum, found in each.enum_types_by_name.items()
}
"""All enums, those inside a message with its name; the commands' types have rows of their own."""
_TYPES: Final = {
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_FIXED64: "fixed64",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_UINT32: "uint32",
}
_HEAD: Final = """\
# Commands and fields of the binary protocol

Each command, each field and each value of an enum of Apache Pulsar's binary protocol, version 21,
and what this broker does with it. The list is that of the compiled protocol
(`magnetar/protocol/pulsar.proto`). `tests/docs/test_protocol_page.py` fails if one has no row, if
the broker's code reads or sets a field whose row says otherwise, and if a row says that a field is
used or answered and no code does so. Print the page with `python -m scripts.print_protocol`.

- **used**: the broker acts on it, or shows it;
- **answered**: the broker sets it;
- **passed through**: stored, and given to consumers as it came;
- **refused**: the request fails with that error, as the named test shows;
- **no meaning**: it changes nothing here, for the reason given.

The fields with numbers from 1000 on, and the commands, are this project's own. A value that an enum
does not have counts as if the field were absent, as in Apache Pulsar. What a client sends beside
its commands to a broker (SUCCESS, MESSAGE and the like) ends the connection:
`test_a_command_that_only_brokers_send_ends_the_connection`.

"""


@dataclass(frozen=True, slots=True)
class Row:
    """The row of a command, a field or a value."""

    here: str
    note: str = ""
    error: str = ""
    """The ServerError of a refusal."""
    tests: Sequence[str] = ()
    """Tests that show it, as `file::name`."""

    @property
    def is_read(self) -> bool:
        """Whether code reads it."""
        return self.here in (USED, BOTH, REFUSED)

    @property
    def is_written(self) -> bool:
        """Whether code sets it."""
        return self.here in (ANSWERED, BOTH)


Rows = Mapping[str, Mapping[str, Row]]
"""For each message or enum, the rows of its fields or values."""


@dataclass(frozen=True, slots=True)
class Table:
    """The committed table."""

    commands: Mapping[str, Row]
    messages: Rows
    enums: Rows


def table() -> Table:
    """Read the committed table."""
    found = json.loads(TABLE.read_text("utf-8"))
    commands = {name: _row(each) for name, each in found["commands"].items()}
    return Table(commands, _rows(found["messages"]), _rows(found["enums"]))


def _rows(found: Mapping[str, Mapping[str, object]]) -> Rows:
    return {
        name: {field: _row(each) for field, each in rows.items()} for name, rows in found.items()
    }


def _row(found: object) -> Row:
    """A row, which may be only its kind."""
    if isinstance(found, str):
        return Row(found)
    return Row(**cast("Mapping[str, str]", found))


def row_of(rows: Mapping[str, Row], name: str) -> Row:
    """The row of a field or value.  Raises `KeyError` if there is none."""
    return rows[name] if name in rows else rows[ALL]


def commands() -> Mapping[str, int]:
    """All commands: their names, and their types."""
    return {pb.BaseCommand.Type.Name(kind): kind for kind in FIELD_OF_TYPE}


def message_of(command: str) -> str:
    """The message of a command."""
    field = FIELD_OF_TYPE[commands()[command]]
    kind = _MESSAGES["BaseCommand"].fields_by_name[field].message_type
    assert kind is not None, "each command is a message"
    return kind.name


def page() -> str:
    """The text of the page."""
    return _HEAD + "".join(_sections(table()))


def _sections(found: Table) -> Iterator[str]:
    yield "## Commands\n\n| command | type | message | here | note |\n|---|---|---|---|---|\n"
    for name, kind in commands().items():
        row = found.commands[name]
        of = message_of(name)
        yield f"| {name} | {kind} | [{of}](#{of.lower()}) | {_here(row)} | {_note(row)} |\n"
    yield "\n## Messages\n"
    for name, message in MESSAGES.items():
        yield f"\n### {name}\n\n"
        if not message.fields:
            yield "It has no fields.\n"
            continue
        yield "| field | type | here | note |\n|---|---|---|---|\n"
        for field in message.fields:
            row = row_of(found.messages[name], field.name)
            yield f"| `{field.name}` | {_type(field)} | {_here(row)} | {_note(row)} |\n"
    yield "\n## Enums\n"
    for name, enum in ENUMS.items():
        yield f"\n### {name}\n\n| value | number | here | note |\n|---|---|---|---|\n"
        for value in enum.values:
            row = row_of(found.enums[name], value.name)
            yield f"| `{value.name}` | {value.number} | {_here(row)} | {_note(row)} |\n"


def _type(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    name = _TYPES[field.type] if kind is None else kind.full_name.rpartition("protocol.")[2]
    if field.is_required:
        return f"{name}, required"
    return f"{name}, repeated" if field.is_repeated else name


def _here(row: Row) -> str:
    return f"{row.here}: {row.error}" if row.error else row.here


def _note(row: Row) -> str:
    shown = ", ".join(f"`{each.rpartition('::')[2]}`" for each in row.tests)
    return "; ".join(filter(None, (row.note.replace("|", r"\|"), shown)))


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
