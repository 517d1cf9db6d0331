"""Unbatched sends over one bare connection, as fast as the window lets them: a process of its own.

    python -m bench.raw_generator --port PORT --topic TOPIC [--seconds S] [--runs N]

Rules: a frame is an encoded head with the sequence id patched in, and one entry that all sends
share (the metadata keeps sequence id 0: brokers go by the command's); at most `--window` sends are
unanswered; every receipt is read, and its sequence id must be the next. Prints one JSON object with
the sends per second of each run, and how many sends there were in all. What this process can do at
most is measured against `bench.sink`.
"""

import argparse
import json
import socket
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import encode_command
from magnetar.protocol.message import build_entry

PAYLOAD_BYTES: Final = 1024
PRODUCER_ID: Final = 1
RECEIVE_BYTES: Final = 256 * 1024
ANSWER_TIMEOUT_S: Final = 30
_SIZE: Final = struct.Struct(">I")
_SIZES: Final = struct.Struct(">II")


class Answers:
    """Reads command frames from a blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    def read(self) -> list[bytes]:
        """Commands, still encoded, that came with the next bytes; at least one."""
        commands: list[bytes] = []
        while not commands:
            data = self._connection.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionError("the broker closed the connection")
            buffer = self._buffer + data
            position, end = 0, len(buffer)
            while position + 4 <= end:
                (size,) = _SIZE.unpack_from(buffer, position)
                if position + 4 + size > end:
                    break
                commands.append(buffer[position + 8 : position + 4 + size])
                position += 4 + size
            self._buffer = buffer[position:]
        return commands


@dataclass(frozen=True)
class Options:
    """What one generator does."""

    port: int
    topic: str
    seconds: float
    warmup_s: float
    runs: int
    window: int
    trust: str | None
    token: str | None


def head_of(sequence_id: int, entry_size: int) -> bytes:
    """The bytes of a SEND frame that come before its entry."""
    command = pb.BaseCommand(
        type=pb.BaseCommand.SEND,
        send=pb.CommandSend(producer_id=PRODUCER_ID, sequence_id=sequence_id),
    ).SerializeToString()
    return _SIZES.pack(4 + len(command) + entry_size, len(command)) + command


def varint(value: int) -> bytes:
    """Protobuf's variable-length integer."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def head_maker(entry_size: int) -> Callable[[int], bytes]:
    """A fast `head_of`: the command as it is encoded, with another sequence id."""
    sample = head_of(0, entry_size)
    # type = SEND, then field 6 with its length, producer id, and the sequence id as the last field.
    prefix = sample[8:-1]
    length_at = prefix.index(b"\x32") + 1

    def head(sequence_id: int) -> bytes:
        number = varint(sequence_id)
        size = len(prefix) + len(number)
        command = (
            prefix[:length_at]
            + bytes((prefix[length_at] - 1 + len(number),))
            + prefix[length_at + 1 :]
            + number
        )
        return _SIZES.pack(4 + size + entry_size, size) + command

    for sequence_id in (0, 1, 127, 128, 20_000, 3_000_000):
        if head(sequence_id) != head_of(sequence_id, entry_size):
            raise AssertionError("SEND is encoded differently now: mend head_maker")
    return head


class Generator:
    """One connection with one producer."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._connection = socket.create_connection(("127.0.0.1", options.port), ANSWER_TIMEOUT_S)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if options.trust is not None:
            context = ssl.create_default_context(cafile=options.trust)
            self._connection = context.wrap_socket(self._connection, server_hostname="127.0.0.1")
        self._answers = Answers(self._connection)
        self._waiting: list[pb.BaseCommand] = []
        self._sent = 0
        self._answered = 0
        metadata = pb.MessageMetadata(
            producer_name="generator", sequence_id=0, publish_time=int(time.time() * 1000)
        )
        self._entry = build_entry(metadata, bytes(PAYLOAD_BYTES))
        self._head = head_maker(len(self._entry))

    @property
    def sends(self) -> int:
        """Since it is open."""
        return self._sent

    def open(self) -> None:
        """CONNECT, LOOKUP (which makes a broker load the topic), PRODUCER."""
        connect = pb.BaseCommand(type=pb.BaseCommand.CONNECT)
        connect.connect.client_version = "bench"
        connect.connect.protocol_version = 21
        if self._options.token is not None:
            connect.connect.auth_method_name = "token"
            connect.connect.auth_data = self._options.token.encode()
        lookup = pb.BaseCommand(type=pb.BaseCommand.LOOKUP)
        lookup.lookup.topic = self._options.topic
        lookup.lookup.request_id = 1
        producer = pb.BaseCommand(type=pb.BaseCommand.PRODUCER)
        producer.producer.topic = self._options.topic
        producer.producer.producer_id = PRODUCER_ID
        producer.producer.request_id = 2
        for request, answer in (
            (connect, pb.BaseCommand.CONNECTED),
            (lookup, pb.BaseCommand.LOOKUP_RESPONSE),
            (producer, pb.BaseCommand.PRODUCER_SUCCESS),
        ):
            self._connection.sendall(encode_command(request))
            came = self._next_command()
            if came.type != answer:
                raise ConnectionError(f"{request.type} was answered by {came}")

    def run(self, seconds: float) -> float:
        """Send for that long; receipts per second."""
        begin = time.perf_counter()
        first = self._answered
        deadline = begin + seconds
        while time.perf_counter() < deadline:
            self._top_up()
            self._take_receipts()
        rate = (self._answered - first) / (time.perf_counter() - begin)
        while self._answered < self._sent:
            self._take_receipts()
        return rate

    def close(self) -> None:
        """Drop the connection."""
        self._connection.close()

    def _top_up(self) -> None:
        head, entry = self._head, self._entry
        end = self._answered + self._options.window
        pieces: list[bytes] = []
        for sequence_id in range(self._sent, end):
            pieces.append(head(sequence_id))
            pieces.append(entry)
        self._sent = end
        self._connection.sendall(b"".join(pieces))

    def _take_receipts(self) -> None:
        last: bytes | None = None
        for raw in self._answers.read():
            if raw[:2] == b"\x08\x07":
                last = raw
                self._answered += 1
            else:
                self._other(pb.BaseCommand.FromString(raw))
        if last is not None:
            receipt = pb.BaseCommand.FromString(last).send_receipt
            if receipt.sequence_id != self._answered - 1:
                raise ConnectionError(f"receipt {receipt.sequence_id} after {self._answered - 1}")

    def _other(self, command: pb.BaseCommand) -> None:
        if command.type == pb.BaseCommand.PING:
            self._connection.sendall(encode_command(pb.BaseCommand(type=pb.BaseCommand.PONG)))
        elif command.type != pb.BaseCommand.PONG:
            raise ConnectionError(f"the broker said {command}")

    def _next_command(self) -> pb.BaseCommand:
        while not self._waiting:
            self._waiting = [pb.BaseCommand.FromString(raw) for raw in self._answers.read()]
        return self._waiting.pop(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--warmup-s", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--window", type=int, default=1000)
    parser.add_argument("--trust", help="authorities of the broker's certificate: speak TLS")
    parser.add_argument("--token")
    options = Options(**vars(parser.parse_args()))
    generator = Generator(options)
    generator.open()
    generator.run(options.warmup_s)
    rates = [generator.run(options.seconds) for _ in range(options.runs)]
    generator.close()
    print(json.dumps({"sends_per_s": rates, "sends": generator.sends}))


if __name__ == "__main__":
    main()
