"""A connection's core without a socket: what it writes and decides is kept."""

from magnetar.errors import ConnectionLost
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE, encode_command, parse_command
from magnetar.protocol.frames import Frame
from magnetar.protocol.server_error import MagnetarError
from magnetar.wire.connection_core import ConnectionCore

Kind = pb.BaseCommand
KEEP_ALIVE_S = 30.0


class RecordingShell:
    """What the core asks of its shell."""

    def __init__(self) -> None:
        self.writable = True
        self.written: list[pb.BaseCommand] = []
        self.challenges: list[pb.AuthData] = []
        self.greetings: list[pb.CommandConnected] = []
        self.ends: list[MagnetarError] = []

    def write(self, *parts: bytes) -> None:
        for part in parts:
            self.written.append(parse_command(part[8:]))

    def prove(self, challenge: pb.AuthData) -> None:
        self.challenges.append(challenge)

    def ready(self, connected: pb.CommandConnected) -> None:
        self.greetings.append(connected)

    def end(self, error: MagnetarError) -> None:
        self.ends.append(error)

    @property
    def kinds(self) -> list[int]:
        return [each.type for each in self.written]


class RecordingHandler:
    """What a handler is told."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.losses: list[ConnectionLost] = []

    def received(self, frame: Frame) -> None:
        self.frames.append(frame)

    def connection_lost(self, error: ConnectionLost) -> None:
        self.losses.append(error)


def command(kind: pb.BaseCommand.Type, **fields: object) -> pb.BaseCommand:
    """A command of that type with these fields."""
    made = pb.BaseCommand(type=kind)
    body = getattr(made, FIELD_OF_TYPE[kind])
    body.SetInParent()
    for name, value in fields.items():
        setattr(body, name, value)
    return made


def framed(kind: pb.BaseCommand.Type, **fields: object) -> bytes:
    """Its frame."""
    return encode_command(command(kind, **fields))


def core(
    shell: RecordingShell,
    keep_alive_s: float = KEEP_ALIVE_S,
    max_frame_bytes: int | None = None,
) -> ConnectionCore:
    """One that has sent nothing."""
    hello = pb.CommandConnect(client_version="test", protocol_version=21, auth_method_name="token")
    return ConnectionCore(shell, hello, keep_alive_s, max_frame_bytes)


def ready_core(shell: RecordingShell, max_message_size: int = 0) -> ConnectionCore:
    """One that has shaken hands at time 0; what was written so far is forgotten."""
    made = core(shell)
    made.begin(0.0)
    connected = {"server_version": "test"} | (
        {"max_message_size": max_message_size} if max_message_size else {}
    )
    made.received(framed(Kind.CONNECTED, **connected), 0.0)
    shell.written.clear()
    return made
