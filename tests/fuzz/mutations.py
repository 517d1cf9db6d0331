"""What can be done to a frame: in its fields, its bytes, its lengths, its order.

Rules: everything comes from one seeded generator, so a seed is a run.  `Fuzzer.frame` says beside
each frame what a decoder makes of it: WHOLE frames leave the stream in step, BROKEN ones must end
the connection, OPEN ones make the broker wait for more.
"""

import enum
import random
from collections.abc import Callable, Sequence
from struct import Struct
from types import MappingProxyType
from typing import Final, NamedTuple, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from config.bounds import MAX_FRAME_SIZE
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE
from magnetar.protocol.frames import FrameDecoder, FrameError, Received, Send, encode_command
from tests.fuzz import corpus

U32: Final = Struct(">I")
PING: Final = encode_command(pb.BaseCommand(type=pb.BaseCommand.PING, ping=pb.CommandPing()))
NUMBERS: Final = [
    *(0, 1, 2, 3, 4, 5, 6, 7, 8, 100, 65_535, 65_536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1),
]
TEXTS: Final = [
    *("", " ", "/", "\0", "\u0661", "\U0001f300", "x" * 3000, "../..", "%2f", "public/default"),
    *("topic://", "segment://public/default/attacked/0000-7fff-99", "non-persistent://a/b/c"),
    *("persistent://public/default/attacked-0-partition-1", "persistent://no/such/topic", ".*("),
    *("segment://public/default/attacked/zzzz-0000-1", "attacked-1", "__change_events"),
    *corpus.NAMES,
]
_RANGES: Final = MappingProxyType(
    {
        FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
        FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    }
)


class Effect(enum.Enum):
    """What a frame does to the stream it is in."""

    WHOLE = "whole"
    BROKEN = "broken"
    OPEN = "open"


class Mutated(NamedTuple):
    """A frame and what it does."""

    data: bytes
    effect: Effect


def effect_of(data: bytes) -> Effect:
    """What a broker's decoder makes of these bytes."""
    decoder = FrameDecoder(MAX_FRAME_SIZE)
    try:
        frames = decoder.feed(data + PING)
    except FrameError:
        return Effect.BROKEN
    if decoder.buffered_size or not _is_ping(frames[-1]):
        return Effect.OPEN
    return Effect.WHOLE


def _is_ping(frame: Received) -> bool:
    return not isinstance(frame, Send) and frame.command.type == pb.BaseCommand.PING


class Fuzzer:
    """An endless, seeded source of mutated frames.  One frame in `breaking` aims at the framing."""

    def __init__(self, rng: random.Random, breaking: int) -> None:
        self._rng = rng
        self._breaking = breaking
        commands = corpus.requests()
        going_on = [c for c in commands if c.type not in corpus.ENDING]
        self._commands = going_on * 16 + [c for c in commands if c.type in corpus.ENDING]
        self._commands += [*corpus.in_transactions()] * 8
        self._on_bytes: tuple[Callable[[bytes], bytes], ...] = (
            *(self._flip, self._flip, self._flip, self._resize, self._resize_command),
            *(self._truncate, self._insert, self._oversize, self._noise),
        )

    def frame(self) -> Mutated:
        """The next one."""
        command = pb.BaseCommand()
        command.CopyFrom(self._rng.choice(self._commands))
        self._name_transaction(command)
        return self.mutate(command)

    def mutate(self, command: pb.BaseCommand) -> Mutated:
        """The frame of a command, which this changes."""
        rng = self._rng
        if rng.randrange(self._breaking):
            for _ in range(rng.choice((1, 1, 2, 4))):
                self._change_field(getattr(command, FIELD_OF_TYPE[command.type]), depth=0)
            data = self._encode(command)
        else:
            data = rng.choice(self._on_bytes)(self._encode(command))
        return Mutated(data, effect_of(data))

    def _name_transaction(self, command: pb.BaseCommand) -> None:
        """One of those that were begun, if it names one."""
        body = getattr(command, FIELD_OF_TYPE[command.type])
        if "txnid_least_bits" in body.DESCRIPTOR.fields_by_name and body.HasField(
            "txnid_least_bits"
        ):
            body.txnid_least_bits = self._rng.randrange(corpus.TRANSACTIONS)

    def _encode(self, command: pb.BaseCommand) -> bytes:
        carries = command.type in (pb.BaseCommand.SEND, pb.BaseCommand.MESSAGE)
        entry = corpus.entry(self._rng, command.send) if carries else b""
        body = command.SerializePartialToString()
        return U32.pack(len(body) + 4 + len(entry)) + U32.pack(len(body)) + body + entry

    # Fields

    def _change_field(self, message: Message, depth: int) -> None:
        fields = cast("Sequence[FieldDescriptor]", message.DESCRIPTOR.fields)
        if not fields:
            return
        field = self._rng.choice(fields)
        if field.is_repeated:
            self._change_repeated(message, field, depth)
        elif field.message_type is not None:
            if self._rng.randrange(4) == 0:
                message.ClearField(field.name)
                return
            part = getattr(message, field.name)
            if not message.HasField(field.name):
                part.SetInParent()
                corpus.fill(part)
            if depth < 4:
                self._change_field(part, depth + 1)
        elif not field.is_required and self._rng.randrange(8) == 0:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, self._value(field))

    def _change_repeated(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        values = getattr(message, field.name)
        for _ in range(self._rng.choice((0, 1, 1, 3, 50))):
            if field.message_type is None:
                values.append(self._value(field))
                continue
            part = values.add()
            corpus.fill(part)
            if depth < 4:
                self._change_field(part, depth + 1)
        if values and self._rng.randrange(3) == 0:
            del values[self._rng.randrange(len(values))]

    def _value(self, field: FieldDescriptor) -> object:
        rng = self._rng
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return bool(rng.randrange(2))
        if field.enum_type is not None:
            return rng.choice(field.enum_type.values).number
        if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return rng.choice((0.0, -1.0, float("nan"), float("inf")))
        if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 8, 100)))
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            return rng.choice(TEXTS)
        low, high = _RANGES[field.cpp_type]
        number = rng.choice(NUMBERS)
        return max(low, min(high, -number if low < 0 and rng.randrange(2) else number))

    # Bytes

    def _flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._rng.choice((1, 1, 2, 6))):
            changed[self._rng.randrange(len(changed))] = self._rng.randrange(256)
        return bytes(changed)

    def _resize(self, data: bytes) -> bytes:
        return U32.pack(self._length(len(data) - 4)) + data[4:]

    def _resize_command(self, data: bytes) -> bytes:
        (size,) = U32.unpack_from(data, 4)
        return data[:4] + U32.pack(self._length(size)) + data[8:]

    def _length(self, real: int) -> int:
        near = self._rng.choice((real - 1, real + 1, real * 2, real + 5_000_000))
        return max(0, self._rng.choice((near, near, 0, 3, 4, 2**31, 2**32 - 1)))

    def _truncate(self, data: bytes) -> bytes:
        return data[: self._rng.randrange(1, len(data))]

    def _insert(self, data: bytes) -> bytes:
        place = self._rng.randrange(len(data))
        return data[:place] + self._rng.randbytes(self._rng.randrange(1, 20)) + data[place:]

    def _oversize(self, data: bytes) -> bytes:
        total = self._rng.choice((MAX_FRAME_SIZE, MAX_FRAME_SIZE + 1, 2**32 - 1))
        return U32.pack(total) + U32.pack(self._rng.choice((4, total - 4, 2**32 - 1))) + data[8:]

    def _noise(self, data: bytes) -> bytes:
        return self._rng.randbytes(self._rng.randrange(1, 200))
