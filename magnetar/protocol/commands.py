"""`BaseCommand` from bytes and back."""

from collections.abc import Mapping
from struct import Struct
from types import MappingProxyType
from typing import Final, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from magnetar.protocol.frame_error import MalformedCommand
from magnetar.protocol.pulsar_pb2 import BaseCommand
from magnetar.protocol.text_check import TextPlan, has_broken_text, text_plan

_DESCRIPTOR: Final = cast("Descriptor", BaseCommand.DESCRIPTOR)
_FIELDS: Final = tuple(field for field in _DESCRIPTOR.fields if field.number != 1)
FIELD_OF_TYPE: Final[Mapping[int, str]] = MappingProxyType(
    {field.number: field.name for field in _FIELDS}
)
"""The name of the field that holds the command of a type."""
_TEXT: Final[Mapping[int, TextPlan]] = MappingProxyType(
    {
        field.number: plan
        for field in _FIELDS
        if field.message_type is not None and (plan := text_plan(field.message_type)) is not None
    }
)
_WITHOUT_FIELDS: Final = frozenset((BaseCommand.PING, BaseCommand.PONG))
_SEND: Final = int(BaseCommand.SEND)
_SIZES: Final = Struct(">II")


def parse_command(raw: bytes) -> BaseCommand:
    """Parse a command.  Raises `MalformedCommand` unless it is complete.

    Its type is known, it has the message of that type (PING and PONG may omit it), every required
    field at every depth is set, and all text is UTF-8.  So handlers need not check its form.
    """
    try:
        command = BaseCommand.FromString(raw)
    except DecodeError as error:
        raise MalformedCommand(
            f"The {len(raw)} bytes of a command are not a BaseCommand ({error}); "
            "check that the peer speaks the Pulsar binary protocol without TLS on this port."
        ) from error
    kind = command.type
    if kind == _SEND and command.send.IsInitialized():
        return command  # A SEND has required fields, so it is present, and it has no text.
    if not command.IsInitialized():
        raise _incomplete(command)
    field = FIELD_OF_TYPE[kind]
    if not command.HasField(field) and kind not in _WITHOUT_FIELDS:
        raise MalformedCommand(
            f"{BaseCommand.Type.Name(kind)} came without its {field!r} field; "
            "send the command in the field that has the number of its type."
        )
    plan = _TEXT.get(kind)
    if plan is not None and not raw.isascii() and has_broken_text(getattr(command, field), plan):
        raise MalformedCommand(
            f"{BaseCommand.Type.Name(kind)} holds text that is not UTF-8; encode strings as UTF-8."
        )
    return command


def _incomplete(command: BaseCommand) -> MalformedCommand:
    if not command.HasField("type"):
        return MalformedCommand(
            "A command has no type, or one that this broker does not know; "
            "check the protocol version that CONNECTED announced."
        )
    return MalformedCommand(
        f"{BaseCommand.Type.Name(command.type)} is incomplete ({_first_missing(command)} is not "
        "set); set the field and send the command again."
    )


def _first_missing(message: Message) -> str:
    """The path of one required field that is not set."""
    # One only: a peer can omit a million.
    for field in cast("Descriptor", message.DESCRIPTOR).fields:
        if field.is_required and not message.HasField(field.name):
            return field.name
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else (value,):
                if not part.IsInitialized():
                    return f"{field.name}.{_first_missing(part)}"
    raise AssertionError("a complete message lacks nothing")


def encode_command(command: BaseCommand) -> bytes:
    """The whole frame of a command without payload."""
    return frame_of(command.SerializeToString())


def frame_of(body: bytes) -> bytes:
    """The whole frame of an encoded command without payload."""
    size = len(body)
    return _SIZES.pack(size + 4, size) + body
