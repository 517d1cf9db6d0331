"""Finds text fields that are not UTF-8.

protobuf does not check the text of proto2 strings when it parses, and returns text that is not
UTF-8 as `bytes` in place of `str`.  So messages of a peer are checked here, before other code
relies on the type.  Message types without text cost nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message


class TextPlan(NamedTuple):
    """The text fields of one message type, and its fields with messages that have text."""

    single: tuple[str, ...]
    repeated: tuple[str, ...]
    nested: tuple[tuple[str, "TextPlan"], ...]
    nested_repeated: tuple[tuple[str, "TextPlan"], ...]


def text_plan(descriptor: Descriptor, inside: frozenset[str] = frozenset()) -> TextPlan | None:
    """The text fields in messages of this type; None if it has none at any depth."""
    # A type inside itself (MessageIdData) is visited once: none of those has text.
    names: dict[bool, list[str]] = {False: [], True: []}
    nested: dict[bool, list[tuple[str, TextPlan]]] = {False: [], True: []}
    inside |= {descriptor.full_name}
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            names[field.is_repeated].append(field.name)
        elif field.message_type is not None and field.message_type.full_name not in inside:
            plan = text_plan(field.message_type, inside)
            if plan is not None:
                nested[field.is_repeated].append((field.name, plan))
    if not any((*names.values(), *nested.values())):
        return None
    return TextPlan(
        tuple(names[False]), tuple(names[True]), tuple(nested[False]), tuple(nested[True])
    )


def has_broken_text(message: Message, plan: TextPlan) -> bool:
    """Whether any text field of the message, at any depth, is not UTF-8."""
    for name in plan.single:
        if type(getattr(message, name)) is bytes:
            return True
    for name in plan.repeated:
        texts: Sequence[str | bytes] = getattr(message, name)
        if texts and any(type(text) is bytes for text in texts):
            return True
    for name, inner in plan.nested:
        if message.HasField(name) and has_broken_text(getattr(message, name), inner):
            return True
    for name, inner in plan.nested_repeated:
        items: Sequence[Message] = getattr(message, name)
        if items and any(has_broken_text(item, inner) for item in items):
            return True
    return False
