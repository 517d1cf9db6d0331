"""A relay in front of a broker that keeps what the client says."""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import FrameDecoder
from tests.support.frame_relay import FrameRelay, serving

MAX_FRAME_SIZE: Final = 6 << 20


@dataclass
class Relay(FrameRelay):
    """`commands` and `entries` are those of all connections, in order."""

    commands: list[pb.BaseCommand] = field(default_factory=list)
    entries: list[bytes] = field(default_factory=list)

    def sent(self, frame: bytes, command: pb.BaseCommand | None) -> bool:
        """As `FrameRelay.sent`."""
        if command is not None:
            self.commands.append(command)
            return False
        (received,) = FrameDecoder(MAX_FRAME_SIZE).feed(frame)
        assert received.entry is not None, "the client has sent a damaged entry"
        self.entries.append(received.entry)
        return False


def relaying(broker_port: int) -> AbstractAsyncContextManager[Relay]:
    """A relay to the broker on that port of 127.0.0.1."""
    return serving(Relay(broker_port))
