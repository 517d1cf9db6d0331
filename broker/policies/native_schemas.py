"""Definitions of PROTOBUF_NATIVE schemas: file descriptors, and the name of a message.  Pure."""

import base64
import json
from collections.abc import Iterable

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError


def root_message(definition: bytes) -> tuple[str, bool]:
    """The full name of the message, and whether the files that come along have it.

    Raises `ValueError` for anything that is no such definition.
    """
    try:
        found = json.loads(definition)
        files = FileDescriptorSet.FromString(base64.b64decode(found["fileDescriptorSet"]))
        root = str(found["rootMessageTypeName"])
    except (DecodeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(repr(error)) from error
    return root, any(
        _has_message(file.message_type, root, at)
        for file in files.file
        if (at := _end_of(file.package, root, 0) if file.package else 0) is not None
    )


def _has_message(messages: Iterable[DescriptorProto], wanted: str, at: int) -> bool:
    """Whether one of the messages, or one within it, has the name that begins at wanted[at].

    Names are compared where they are: full names of all messages may be longer than all memory.
    """
    left = len(wanted) - at
    # Protobuf's own parser bounds the depth of nesting.
    return any(
        (len(message.name) == left and wanted.startswith(message.name, at))
        or (
            (behind := _end_of(message.name, wanted, at)) is not None
            and _has_message(message.nested_type, wanted, behind)
        )
        for message in messages
    )


def _end_of(name: str, wanted: str, at: int) -> int | None:
    """The index behind a name and its dot at wanted[at]; None if that is not there."""
    end = at + len(name)
    return end + 1 if wanted.startswith(name, at) and wanted.startswith(".", end) else None
