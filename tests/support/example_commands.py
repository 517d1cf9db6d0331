"""Commands with all fields that they must have, on the names of docs/access.md or on others."""

from google.protobuf.message import Message

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE
from scripts.print_access_rules import example


def complete_command(kind: int) -> pb.BaseCommand:
    """The example of a command with all fields that it must have."""
    command = example(kind)
    body: Message = getattr(command, FIELD_OF_TYPE[kind])
    body.SetInParent()
    for field in body.DESCRIPTOR.fields:
        if not field.is_required or body.HasField(field.name):
            continue
        if field.name == "schema":
            body.schema.CopyFrom(  # type: ignore[attr-defined]
                pb.Schema(name="s", schema_data=b"", type=pb.Schema.String)
            )
        elif field.message_type is not None:
            getattr(body, field.name).CopyFrom(pb.MessageIdData(ledger_id=0, entry_id=0))
        else:
            setattr(body, field.name, "x" if field.cpp_type == field.CPPTYPE_STRING else 1)
    return command
